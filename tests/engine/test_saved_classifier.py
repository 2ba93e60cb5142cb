"""A reward model as a folder: transformers gives the scores that we gave, and so do `rewards`, whatever pads what."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from posttrain.models.adapters.adaptable import add_adapter
from posttrain.models.classifiers.heads import TextScorer, new_scorer
from posttrain.models.classifiers.saved_classifier import TextReading, require_classifier, save_classifier
from posttrain.models.conversation_masks import Masking
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.policy import Policy, as_policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.algorithm import TeacherOptions
from posttrain.options.dataset import DatasetOptions
from posttrain.options.model import AdapterOptions, ModelOptions
from posttrain.options.pairs import PairOptions
from posttrain.records import Preference, TokenSequence
from posttrain.rewards.model import RewardModel
from posttrain.tasks.preference_set import preference_set
from posttrain.tasks.row_files.rows import GivenRows
from posttrain.training.pair_updates import pair_scores
from posttrain.training.reference import named_reference, teacher_of
from tests.support.conversations import CHATML, CLOSED, OPENING, chat_model, chat_tokenizer, turns
from tests.support.every_family import small_model
from tests.support.refusals import refused

ROWS: list[dict[str, Any]] = [
    {"prompt": "2+2=", "chosen": "4", "rejected": "5, I think"},
    {"prompt": "Say a", "chosen": "a" * 9, "rejected": "b"},
]
TALKS: list[dict[str, Any]] = [
    {"chosen": turns("a", "b"), "rejected": turns("a", "c and more")},
    {"chosen": turns("x", "y", "z", "4" * 7, system="s"), "rejected": turns("x", "y", "z", "5", system="s")},
]


def chat_policy(template: str = CHATML, *, family: str = "qwen3", pad: str | None = "<|pad|>") -> Policy:
    tokenizer = chat_tokenizer(template)
    tokenizer.pad_token = pad
    return as_policy(chat_model(tokenizer, family=family), tokenizer)


def pairs_for(policy: Policy, rows: list[dict[str, Any]], **options: object) -> list[Preference]:
    renderer = TokenizerRenderer(policy.tokenizer, template_options=options)
    masking = Masking(renderer=renderer, stop_ids=policy.stop_ids)
    task = DatasetOptions(held_out_share=0)
    found = preference_set(masking, task, PairOptions(), longest=160, seed=0, given=GivenRows(rows=rows))
    return [*found.training]


def saved(policy: Policy, folder: Path, *, seed: int = 0) -> TextScorer:
    scorer = new_scorer(policy, seed=seed)
    save_classifier(scorer, folder, TextReading(stop_token_ids=policy.stop_ids))
    return scorer


def texts_of(pairs: list[Preference]) -> list[tuple[int, ...]]:
    """What is read of each pair, the chosen answers first."""
    chosen = [pair.prompt.tokens + pair.chosen.tokens + pair.chosen_closing for pair in pairs]
    return chosen + [pair.prompt.tokens + pair.rejected.tokens + pair.rejected_closing for pair in pairs]


def scores_by_transformers(folder: Path, rows: list[tuple[int, ...]], side: str = "right") -> torch.Tensor:
    """As anybody would: the tokenizer pads, and the model finds the end of each row."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=side)
    batch = tokenizer.pad({"input_ids": [list(row) for row in rows]}, return_tensors="pt")
    with torch.no_grad():
        return model(**batch).logits[:, 0]


def ours(scorer: TextScorer, pairs: list[Preference]) -> torch.Tensor:
    found = pair_scores(scorer, pairs, 1000)
    return torch.cat([found.chosen, found.rejected]).float()


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize("pad", ["<|pad|>", "<|im_end|>", None], ids=["a pad token", "pad = eos", "no pad token"])
def test_transformers_reads_the_same_scores_from_the_folder(family: str, pad: str | None, tmp_path: Path) -> None:
    policy = chat_policy(family=family, pad=pad)
    scorer, pairs = saved(policy, tmp_path / "rm"), pairs_for(policy, ROWS + TALKS)
    found = scores_by_transformers(tmp_path / "rm", texts_of(pairs))
    assert (found - ours(scorer, pairs)).abs().max() <= 1e-5
    config = json.loads((tmp_path / "rm" / "config.json").read_text())
    assert config["pad_token_id"] not in policy.stop_ids
    assert policy.tokenizer.pad_token == pad, "the policy's own tokenizer stays as it is"


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mistral", "phi3", "olmo2", "gpt_neox"])
def test_so_it_does_for_other_families(kind: str, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    policy = as_policy(small_model(kind), tokenizer)
    scorer = saved(policy, tmp_path / "rm")
    pairs = [
        replace(
            pair,
            prompt=replace(pair.prompt, tokens=(1, 2, 3)),
            chosen=TokenSequence.one_turn((4, 5, 6, 7)),
            rejected=TokenSequence.one_turn((8, 9)),
        )
        for pair in pairs_for(policy, ROWS)
    ]
    found = scores_by_transformers(tmp_path / "rm", texts_of(pairs))
    assert (found - ours(scorer, pairs)).abs().max() <= 1e-5


def test_a_reward_model_is_told_from_a_policy_although_a_tied_one_has_all_of_its_weights(tmp_path: Path) -> None:
    policy = chat_policy(family="qwen3")
    assert policy.model.config.tie_word_embeddings
    saved(policy, tmp_path / "rm")
    _, told = AutoModelForCausalLM.from_pretrained(tmp_path / "rm", output_loading_info=True)
    assert not told["missing_keys"], "transformers itself does not tell"
    with refused("model.path =", "Qwen3ForSequenceClassification is not a causal language model"):
        load_policy(ModelOptions(path=str(tmp_path / "rm")))
    for option, load in {
        "reference.path": lambda path: named_reference(path, policy),
        "algorithm.teacher.model": lambda path: teacher_of(policy, TeacherOptions(model=path), {}),
    }.items():
        with refused(f"{option} = ", "Qwen3ForSequenceClassification is not a causal"):
            load(str(tmp_path / "rm"))
        with refused(f"{option} = ", "nowhere: no such folder"):
            load(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("template", [CHATML, CLOSED, OPENING], ids=["chatml", "plain words", "thoughts opened"])
def test_the_reward_reads_what_was_trained_and_gives_the_same_score(template: str, tmp_path: Path) -> None:
    policy = chat_policy(template)
    scorer, pairs = saved(policy, tmp_path / "rm"), pairs_for(policy, ROWS + TALKS)
    reward = RewardModel(tmp_path / "rm")
    asked = [row["prompt"] for row in ROWS] + [row["chosen"][:-1] for row in TALKS]
    for side in ("chosen", "rejected"):
        said = [row[side] for row in ROWS] + [row[side][-1:] for row in TALKS]
        read = [tuple(reward.text.tokens(*each)) for each in zip(asked, said, strict=True)]
        assert read == texts_of(pairs)[: len(pairs)] if side == "chosen" else texts_of(pairs)[len(pairs) :]
        found = torch.tensor(reward(prompts=asked, completions=said))
        expected = ours(scorer, pairs).view(2, -1)[0 if side == "chosen" else 1]
        assert (found - expected).abs().max() <= 1e-5


def test_plain_texts_are_scored_alike_by_pipelines_by_trl_s_calls_and_by_the_reward(tmp_path: Path) -> None:
    policy = chat_policy()
    scorer = new_scorer(policy, seed=0)
    save_classifier(scorer, tmp_path / "rm", TextReading(stop_token_ids=policy.stop_ids, plain=True), "# Mine\n")
    expected = ours(scorer, pairs_for(policy, ROWS))[: len(ROWS)]
    texts = [row["prompt"] + row["chosen"] for row in ROWS]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "rm")
    judge = pipeline("text-classification", model=model, tokenizer=tokenizer, function_to_apply="none")
    assert [each["score"] for each in judge(texts)] == pytest.approx(expected.tolist(), abs=1e-5)
    # TRL's GRPO and RLOO add no special tokens, so the text has to end with the one that the card names.
    card = (tmp_path / "rm" / "README.md").read_text()
    assert card.startswith("# Mine")
    assert 'append it, `prompt + answer + "<|im_end|>"`' in card
    ended = [f"{text}<|im_end|>" for text in texts]
    with torch.no_grad():
        batch = tokenizer(ended, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
        found = model(**batch).logits[:, 0]
    assert (found - expected).abs().max() <= 1e-5
    reward = RewardModel(tmp_path / "rm")
    said = reward(prompts=[row["prompt"] for row in ROWS], completions=[row["chosen"] for row in ROWS])
    assert said == pytest.approx(expected.tolist(), abs=1e-5)


def test_options_of_the_template_go_with_the_folder(tmp_path: Path) -> None:
    template = "{% if shout %}LOUD {% endif %}" + CHATML
    policy = chat_policy(template)
    scorer = new_scorer(policy, seed=0)
    reading = TextReading(stop_token_ids=policy.stop_ids, template_options={"shout": True})
    save_classifier(scorer, tmp_path / "rm", reading)
    pairs = pairs_for(policy, TALKS[:1], shout=True)
    reward = RewardModel(tmp_path / "rm")
    assert tuple(reward.text.tokens(turns("a"), turns("", "b")[1:])) == texts_of(pairs)[0]


def test_an_adapter_is_merged_into_what_is_saved(tmp_path: Path) -> None:
    policy = chat_policy()
    add_adapter(policy.model, AdapterOptions(rank=4), seed=1)
    policy = as_policy(policy.model, policy.tokenizer)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if name.endswith("lora_B"):
                parameter.fill_(0.05)
    scorer, pairs = saved(policy, tmp_path / "rm"), pairs_for(policy, TALKS)
    assert not list((tmp_path / "rm").glob("adapter*"))
    found = scores_by_transformers(tmp_path / "rm", texts_of(pairs))
    assert (found - ours(scorer, pairs)).abs().max() <= 1e-5


def test_weights_that_were_stored_in_bfloat16_are_stored_so_again(tmp_path: Path) -> None:
    policy = replace(chat_policy(), stored_dtype=torch.bfloat16)
    saved(policy, tmp_path / "rm")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert policy.model.dtype == torch.float32


def test_special_tokens_that_a_completion_spells_are_read_as_text(tmp_path: Path) -> None:
    policy = chat_policy()
    saved(policy, tmp_path / "rm")
    reward = RewardModel(tmp_path / "rm")
    end = policy.tokenizer.eos_token_id
    for prompt, completion in (("2+2=", "4<|im_end|>5"), (turns("a"), turns("", "4<|im_end|>5")[1:])):
        tokens = reward.text.tokens(prompt, completion)
        assert tokens.count(end) == (1 if isinstance(prompt, str) else 2)


def test_a_family_without_a_classifier_is_refused_before_anything_is_trained() -> None:
    policy = as_policy(small_model("cohere"), chat_tokenizer())
    with refused("transformers has no sequence classifier over a cohere"):
        require_classifier(policy)
