"""Tokenizers as models have them: without padding, with padding that stops, with a BOS, with pieces of a character."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.models.loading.description import tokenizer_lines
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.loading.new_model import END, PAD, new_tokenizer
from posttrain.models.loading.saving import save_policy
from posttrain.models.policy import Policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.model import ModelOptions
from posttrain.records import Finish, Prompt
from tests.support.model_folders import changed, family_folder, small_folder
from tests.support.refusals import refused
from tests.support.tiny import request


def special(**names: str) -> PreTrainedTokenizerFast:
    """The tokenizer of new models with these special tokens and no others."""
    return PreTrainedTokenizerFast(tokenizer_object=new_tokenizer().backend_tokenizer, **names)


def that_opens_text() -> PreTrainedTokenizerFast:
    """A tokenizer that puts <|pad|> before every text, as others put <s>."""
    backend = new_tokenizer().backend_tokenizer
    backend.post_processor = TemplateProcessing(
        single=f"{PAD} $A", pair=f"{PAD} $A $B", special_tokens=[(PAD, backend.token_to_id(PAD))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=PAD, eos_token=END)


def policy_with(folder: Path, tokenizer: PreTrainedTokenizerFast, **options: object) -> Policy:
    small_folder(folder)
    for name in ("tokenizer_config.json", "tokenizer.json", "chat_template.jinja"):
        (folder / name).unlink()
    tokenizer.save_pretrained(folder)
    return load_policy(ModelOptions(path=str(folder), **options))  # type: ignore[arg-type]


def said_of(policy: Policy) -> str:
    return "\n".join(tokenizer_lines(policy))


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"eos_token": END}, "padding none (none is needed)"),
        ({"eos_token": END, "pad_token": END}, f"padding '{END}', a stop token too (none is needed)"),
        ({"eos_token": END, "pad_token": PAD}, f"padding '{PAD}' (none is needed)"),
    ],
)
def test_padding_plays_no_part(names: dict[str, str], says: str, tmp_path: Path) -> None:
    policy = policy_with(tmp_path / "model", special(**names))
    whole = load_policy(ModelOptions(path=str(small_folder(tmp_path / "whole"))))
    assert says in said_of(policy)
    prompts = [TokenizerRenderer(policy.tokenizer).render(text, id=text) for text in ("abc", "a longer one")]
    found, expected = (sample_groups(InProcessEngine(each), prompts, request(4, 20)) for each in (policy, whole))
    assert found == expected


def test_a_stop_token_that_is_padding_too_is_sampled_and_kept(tmp_path: Path) -> None:
    policy = policy_with(tmp_path / "model", special(eos_token=END, pad_token=END))
    (stop,) = policy.stop_ids
    with torch.no_grad():  # the model's tied embedding makes the stop token the likeliest after itself
        policy.model.get_input_embeddings().weight[stop] *= 50
    prompt = Prompt(id="p", text="", tokens=(stop,))
    group = sample_groups(InProcessEngine(policy), [prompt], request(4, 20))[0]
    stopped = [rollout for rollout in group.rollouts if rollout.finish is Finish.STOP]
    assert stopped
    assert all(rollout.tokens[-1] == stop and len(rollout.logprobs) == len(rollout.tokens) for rollout in stopped)


def test_a_bos_opens_a_prompt_once(tmp_path: Path) -> None:
    policy = policy_with(tmp_path / "model", that_opens_text())
    bos = policy.tokenizer.bos_token_id
    rendered = TokenizerRenderer(policy.tokenizer).render("abc", id="p")
    assert rendered.tokens == (bos, *policy.tokenizer("abc", add_special_tokens=False)["input_ids"])
    assert TokenizerRenderer(policy.tokenizer).render(f"{PAD}abc", id="p").tokens == rendered.tokens
    assert f"opens plain text with '{PAD}'" in said_of(policy)


def test_pieces_of_a_character_become_the_character(tmp_path: Path) -> None:
    policy = load_policy(ModelOptions(path=str(small_folder(tmp_path / "model"))))
    tokens = policy.tokenizer("é😀", add_special_tokens=False)["input_ids"]
    assert len(tokens) == 2 + 4  # bytes
    first = policy.tokenizer("a", add_special_tokens=False)["input_ids"][0]
    chain = [first, *tokens, policy.stop_ids[0]]
    said = sample_groups(
        InProcessEngine(saying(policy, chain)), [Prompt(id="p", text="", tokens=(first,))], request(1, 9)
    )
    assert said[0].rollouts[0].text == "é😀"


def saying(policy: Policy, chain: list[int]) -> Policy:
    """The policy with weights by which every token of a chain is followed by the next; no layer adds anything."""
    made = policy.copy()
    with torch.no_grad():
        for name, parameter in made.model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        width = made.model.config.hidden_size
        rows = made.model.get_input_embeddings().weight
        rows.zero_()
        for place, token in enumerate(chain):
            rows[token, place % width] = 1.0
        head = torch.nn.Linear(width, len(rows), bias=False)
        head.weight.zero_()
        for place, (_, after) in enumerate(pairwise(chain)):
            head.weight[after, place % width] = 100.0
        made.model.lm_head = head
        made.model.config.tie_word_embeddings = False
    made.model.eval()
    return made


def test_all_stop_tokens_end_a_completion_those_of_the_option_too(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "model")
    changed(folder / "generation_config.json", eos_token_id=[0, 7])
    assert load_policy(ModelOptions(path=str(folder))).stop_ids == (0, 7)
    policy = load_policy(ModelOptions(path=str(folder), stop_tokens=("</answer>", "!")))
    ids = policy.tokenizer.convert_tokens_to_ids(["</answer>", "!"])
    assert policy.stop_ids == tuple(sorted([0, 7, *ids]))
    assert "'</answer>'" in said_of(policy)
    groups = sample_groups(InProcessEngine(policy), [Prompt(id="p", text="", tokens=(9,))], request(64, 60))
    ended = {r.tokens[-1] for r in groups[0].rollouts if r.finish is Finish.STOP}
    assert ended & set(ids)
    assert all(not set(r.tokens[:-1]) & set(policy.stop_ids) for r in groups[0].rollouts)
    save_policy(policy, tmp_path / "saved")  # whoever generates with the trained model stops where it was trained to
    assert load_policy(ModelOptions(path=str(tmp_path / "saved"))).stop_ids == policy.stop_ids


@pytest.mark.parametrize(("text", "says"), [("hello!!", "tokens of this model"), ("", "is 0 tokens")])
def test_a_stop_text_that_is_not_one_token_is_refused(text: str, says: str, tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "model")
    with refused(f"model.stop_tokens: {text!r} is ", says):
        load_policy(ModelOptions(path=str(folder), stop_tokens=(text,)))


def test_a_token_beyond_the_embedding_is_refused_with_its_prompt(tmp_path: Path) -> None:
    policy = load_policy(ModelOptions(path=str(family_folder(tmp_path / "model", "gpt2"))))  # 24 rows, 384 tokens
    assert "384 tokens for 24 rows of the embedding" in said_of(policy)
    assert "prompts with a token beyond the embedding are refused" in said_of(policy)
    prompt = TokenizerRenderer(policy.tokenizer).render("</answer>", id="rows.jsonl:7")
    with refused("prompt rows.jsonl:7: the tokenizer's token ", "('</answer>') has no row"):
        sample_groups(InProcessEngine(policy), [prompt], request())


def test_rows_beyond_the_tokenizer_do_no_harm(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "model")
    policy = load_policy(ModelOptions(path=str(folder)))
    policy.model.resize_token_embeddings(400, mean_resizing=False)
    policy.model.save_pretrained(folder)
    padded = load_policy(ModelOptions(path=str(folder)))
    assert "384 tokens for 400 rows of the embedding" in said_of(padded)
    with torch.no_grad():
        padded.model.get_input_embeddings().weight[384:] *= 50  # so that unknown tokens are sampled
    groups = sample_groups(InProcessEngine(padded), [Prompt(id="p", text="", tokens=(9,))], request(32, 8))
    assert any(token >= 384 for rollout in groups[0].rollouts for token in rollout.tokens)
    for rollout in groups[0].rollouts:
        known = [token for token in rollout.tokens if token < 384 and token not in padded.stop_ids]
        assert rollout.text == padded.tokenizer.decode(known)


def test_a_saved_tokenizer_is_the_one_that_was_loaded(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "model")
    save_policy(load_policy(ModelOptions(path=str(folder))), tmp_path / "saved")
    old, new = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "chat_template.jinja").read_text() == (folder / "chat_template.jinja").read_text()
    assert old.get_vocab() == new.get_vocab()
    assert (old.eos_token, old.pad_token, old.padding_side) == (new.eos_token, new.pad_token, new.padding_side)
    text = "Use 3, é and 😀 </answer>"
    assert old(text)["input_ids"] == new(text)["input_ids"]
