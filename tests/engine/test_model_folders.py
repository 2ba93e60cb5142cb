"""Kinds of model folders and tokenizers: what can be loaded is, and what cannot is refused in a line that says why."""

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.parity import largest_gap
from posttrain.models.adapters.adaptable import is_4_bit, runs_packed
from posttrain.models.loading.description import tokenizer_lines
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.loading.new_model import END, PAD, new_tokenizer
from posttrain.models.loading.saving import save_policy
from posttrain.models.policy import Policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.model import AdapterOptions, ModelOptions
from posttrain.records import Finish, Prompt
from tests.support.every_family import small_model
from tests.support.model_folders import changed, family_folder, plain_tokenizer, small_folder
from tests.support.refusals import mentions, refused
from tests.support.runs import save_tiny_model
from tests.support.tiny import request


def load(folder: Path, **options: object) -> PreTrainedModel:
    return load_policy(ModelOptions(path=str(folder), **options)).model  # type: ignore[arg-type]


def refusal(folder: Path) -> str:
    with refused() as raised:
        load(folder)
    said = str(raised.value)
    assert said.startswith(f"model.path = {folder}: ")
    assert len(said) < 600
    assert "\n" not in said
    return said


def without(*names: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        small_folder(folder)
        for name in names:
            (folder / name).unlink()

    return make


def of_another_library(folder: Path) -> None:
    without("model.safetensors")(folder)
    (folder / "model-q4.gguf").write_bytes(b"GGUF")


def of_family(label: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        small_model(label).save_pretrained(folder)
        new_tokenizer().save_pretrained(folder)

    return make


def encoder(folder: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(vocab_size=400, **sizes)).save_pretrained(folder)
    new_tokenizer().save_pretrained(folder)


def lacking_a_layer(folder: Path) -> None:
    weights = load_file(small_folder(folder) / "model.safetensors")
    kept = {name: value for name, value in weights.items() if "layers.1." not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def quantised(folder: Path) -> None:
    small_folder(folder)
    changed(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})


def lacking_a_part(folder: Path) -> None:
    small_folder(folder)
    load(folder).save_pretrained(folder, max_shard_size="10KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    sorted(folder.glob("model-0*.safetensors"))[1].unlink()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (without("tokenizer.json"), ("no tokenizer", "Copy tokenizer.json and tokenizer_config.json")),
        (without("model.safetensors"), ("holds no weights", "needs model.safetensors")),
        (of_another_library, ("holds no weights", "llama.cpp's, which are not read")),
        (lacking_a_part, ("or not all that its index names", "all of its parts")),
        (lacking_a_layer, ("are missing", "model.layers.1.", "Copy all files")),
        (of_family("t5"), ("T5ForConditionalGeneration", "it has an encoder")),
        (encoder, ("BertForMaskedLM is not a causal language model",)),
        (of_family("qwen2_5_vl"), ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text")),
        (quantised, ("quantised (gptq)", "that it was quantised from")),
    ],
)
def test_what_is_no_causal_language_model_is_refused_by_name(
    make: Callable[[Path], None], says: tuple[str, ...], tmp_path: Path
) -> None:
    make(tmp_path / "model")
    said = refusal(tmp_path / "model")
    assert [each for each in says if each not in said] == []


def test_an_adapter_keeps_the_context_that_was_asked_for(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "model")
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    changed(folder / "config.json", rope_parameters=rope)
    plain, adapted = (
        load_policy(ModelOptions(path=str(folder), context=200, adapter=adapter))
        for adapter in (None, AdapterOptions(rank=2))
    )
    assert (plain.max_positions, adapted.max_positions) == (200, 200)
    tokens = torch.arange(30)[None]  # B is 0: the adapter changes nothing yet
    assert torch.equal(plain.model(input_ids=tokens).logits, adapted.model(input_ids=tokens).logits)


def test_a_folder_in_4_bits_is_sampled_as_it_is_trained(tmp_path: Path) -> None:
    source = small_folder(tmp_path / "source")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    folder = tmp_path / "folder"
    AutoModelForCausalLM.from_pretrained(source, quantization_config=config).save_pretrained(folder)
    new_tokenizer().save_pretrained(folder)
    policy = load_policy(ModelOptions(path=str(folder)))
    assert len([layer for layer in policy.model.modules() if is_4_bit(layer)]) == 2 * 7
    # Its layers would pack their weights in the first pass without gradient, and compute something else from then on.
    assert not any(runs_packed(layer) for layer in policy.model.modules())
    assert largest_gap(InProcessEngine(policy), 40) < 1e-4


def test_weights_in_several_files_are_loaded_whole(tmp_path: Path) -> None:
    whole = load(small_folder(tmp_path / "one"))
    shutil.copytree(tmp_path / "one", tmp_path / "many")
    (tmp_path / "many" / "model.safetensors").unlink()
    whole.save_pretrained(tmp_path / "many", max_shard_size="10KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    again = load(tmp_path / "many").state_dict()
    assert all(torch.equal(again[name], value) for name, value in whole.state_dict().items())


@pytest.mark.parametrize(
    ("label", "kind"),
    [("gemma3", "Gemma3ForCausalLM"), ("llava", "LlamaForCausalLM"), ("mistral3", "MistralForCausalLM")],
)
def test_of_a_model_that_sees_the_text_part_is_loaded_and_saved(label: str, kind: str, tmp_path: Path) -> None:
    whole = small_model(label).eval()
    whole.save_pretrained(tmp_path / "whole")
    new_tokenizer().save_pretrained(tmp_path / "whole")
    policy = load_policy(ModelOptions(path=str(tmp_path / "whole")))
    assert type(policy.model).__name__ == kind
    assert not any("vision" in name for name, _ in policy.model.named_parameters())
    tokens = torch.arange(20)[None]  # beyond Gemma's window
    expected = whole(input_ids=tokens).logits
    torch.testing.assert_close(policy.model(input_ids=tokens).logits, expected)
    save_policy(policy, tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(again(input_ids=tokens).logits, expected)


CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM


class OwnConfig(Qwen3Config):
    model_type = "own_model"


class OwnModel(Qwen3ForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose code comes with it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = small_folder(tmp_path / "own")
    (folder / "own_code.py").write_text(CODE)
    own = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}
    changed(folder / "config.json", model_type="own_model", architectures=["OwnModel"], auto_map=own)
    return folder


def test_code_that_comes_with_a_model_runs_only_where_it_is_trusted(with_code: Path, tmp_path: Path) -> None:
    said = refusal(with_code)
    mentions(said, "own_code.OwnModel", "model.trust_remote_code: true (--model.trust-remote-code)")
    options = ModelOptions(path=str(with_code), trust_remote_code=True)
    policy = load_policy(options)
    assert type(policy.model).__name__ == "OwnModel"
    assert "OwnModel" in str(policy.forward_reason) or "own_model" in str(policy.forward_reason)
    save_policy(policy, tmp_path / "saved")
    shutil.rmtree(with_code)  # what was saved stands by itself
    tokens = torch.arange(8)[None]
    again = load(tmp_path / "saved", trust_remote_code=True)
    assert torch.equal(again(input_ids=tokens).logits, policy.model(input_ids=tokens).logits)


def test_code_beside_a_family_that_transformers_knows_is_left_alone(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "model")
    changed(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_absent.Absent"})
    assert type(load(folder)).__module__.startswith("transformers.")


def test_a_chosen_attention_is_the_models_and_one_that_is_not_here_is_refused(tmp_path: Path) -> None:
    folder = family_folder(tmp_path / "model", "gpt2")
    assert load(folder, attn_implementation="eager").config._attn_implementation == "eager"
    assert load(folder).config._attn_implementation == "sdpa"
    with refused("attn_implementation = fast", "auto, eager"):
        load(folder, attn_implementation="fast")
    with refused("attn_implementation = flash_attention_2", "Use auto"):
        load(folder, attn_implementation="flash_attention_2")


def test_a_config_that_is_no_json_is_told(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "model")
    (folder / "config.json").write_text("{")
    assert "config.json cannot be read" in refusal(folder)
    (folder / "config.json").write_text("[1]")
    assert "holds a list, not a JSON object" in refusal(folder)


def test_loading_a_policy_leaves_the_progress_bars_of_transformers_as_they_were(tmp_path: Path) -> None:
    bars, options = transformers_logging, ModelOptions(path=str(save_tiny_model(tmp_path / "model")))
    before = bars.is_progress_bar_enabled()
    for turn in (bars.enable_progress_bar, bars.disable_progress_bar, bars.enable_progress_bar)[: 2 + before]:
        turn()
        load_policy(options)
        assert bars.is_progress_bar_enabled() == (turn is bars.enable_progress_bar)


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
    policy = policy_with(tmp_path / "model", plain_tokenizer(**names))
    whole = load_policy(ModelOptions(path=str(small_folder(tmp_path / "whole"))))
    assert says in said_of(policy)
    prompts = [TokenizerRenderer(policy.tokenizer).render(text, id=text) for text in ("abc", "a longer one")]
    found, expected = (sample_groups(InProcessEngine(each), prompts, request(4, 20)) for each in (policy, whole))
    assert found == expected


def test_a_stop_token_that_is_padding_too_is_sampled_and_kept(tmp_path: Path) -> None:
    policy = policy_with(tmp_path / "model", plain_tokenizer(eos_token=END, pad_token=END))
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
