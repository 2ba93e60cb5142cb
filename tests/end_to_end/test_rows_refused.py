"""Rows that no model can read are refused by their place before a run: megabytes of text, and unknown tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from posttrain.models import rendering
from posttrain.models.context import num_embeddings
from posttrain.models.rendering import TokenizerRenderer, TooLongText
from posttrain.rewards.model import RewardModel
from tests.support.commands import refusal
from tests.support.refusals import mentions, refused
from tests.support.reward_models import classifier, reward_folder, reward_tokenizer
from tests.support.runs import SHAPE, save_tiny_model

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
LONG = "1 + 2 " * 500_000
TOO_LONG: dict[str, dict[str, str]] = {
    "rl": {"prompt": LONG},
    "sft": {"prompt": "1", "completion": LONG},
    "dpo": {"prompt": "1", "chosen": "2", "rejected": LONG},
    "reward-model": {"prompt": LONG, "chosen": "2", "rejected": "3"},
}


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Characters of all that is made tokens."""
    found: list[int] = []
    make = rendering.token_ids

    def token_ids(tokenizer: Any, text: str, *, special: bool) -> list[int]:
        found.append(len(text))
        return make(tokenizer, text, special=special)

    monkeypatch.setattr(rendering, "token_ids", token_ids)
    return found


@pytest.mark.parametrize("command", TOO_LONG)
def test_a_text_of_megabytes_is_refused_before_it_is_made_tokens(command: str, sizes: list[int], model: Path) -> None:
    Path("dice.py").write_text("def dice(completions, **columns):\n    return [0.0] * len(completions)\n")
    row = TOO_LONG[command]
    short = {name: value[:6] if value is LONG else value for name, value in row.items()}
    lines = [{**short, next(iter(row)): f"{number}"} for number in range(20)]
    Path("rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [*lines, row]))
    recipe: dict[str, Any] = {"model": {"path": str(model)}, "run": {"folder": "run", "threads": 1}}
    recipe["task"] = {"name": "dataset", "path": "rows.jsonl", "held_out_share": 0.2}
    recipe |= {"rewards": [{"path": "dice.py:dice"}]} if command == "rl" else {}
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    said = refusal(command, "recipe.yaml")
    mentions(said, "rows.jsonl:21", f"more than {SHAPE.max_positions} tokens")
    assert max(sizes) < 50 * SHAPE.max_positions


def test_a_text_is_refused_by_its_tokens_and_not_by_its_size() -> None:
    # A tokenizer to which a word that it does not know is one token, whatever its length, and white space none.
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    words = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    for fits in ("x" * 100_000, " " * 100_000 + "a", "a" + " " * 100_000 + "a"):
        TokenizerRenderer(words, most_tokens=4).tokens(fits, "a row")
    with refused("a row: its 100000 characters are more than 4 tokens", error=TooLongText):
        TokenizerRenderer(words, most_tokens=4).tokens("a " * 50_000, "a row")


# Tokens without a row in the embedding.

SAYS = "has no row in the model's embedding, which has 24"


def smaller(folder: Path, kind: Any) -> Path:
    """A model of 24 rows under a tokenizer that knows more."""
    made = kind.from_pretrained(folder)
    made.resize_token_embeddings(24)
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ignorant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smaller(save_tiny_model(tmp_path_factory.mktemp("unknown") / "model"), AutoModelForCausalLM)


@pytest.mark.parametrize(
    ("command", "row"),
    [
        ("sft", '{"prompt": "1", "completion": "Q"}'),
        ("sft", '{"text": "Q"}'),
        ("sft", '{"input_ids": [1, 50]}'),
        ("dpo", '{"prompt": "1", "chosen": "2", "rejected": "Q"}'),
        ("reward-model", '{"prompt": "Q", "chosen": "2", "rejected": "3"}'),
    ],
)
def test_rows_with_unknown_tokens_are_refused_before_a_run(command: str, row: str, ignorant: Path) -> None:
    Path("rows.jsonl").write_text(row + "\n")
    flags = ["--model.path", ignorant, "--task.path", "rows.jsonl", "--task.held-out-share", 0, "--run.folder", "run"]
    for more in [], ["--dry-run"]:
        said = refusal(command, *flags, "--run.threads", 1, *more)
        assert "rows.jsonl:1: the tokenizer's token" in said
        assert SAYS in said
    assert not Path("run").exists()


def test_demonstrations_are_refused_before_a_run(ignorant: Path) -> None:
    flags = ["--model.path", ignorant, "--run.threads", 1, "--run.folder", "run", "--task.name", "countdown"]
    assert SAYS in refusal("sft", *flags, "--run.num-steps", 1)
    assert not Path("run").exists()


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_reward_model_without_rows_for_its_tokenizer_is_refused_before_a_run(kind: str, model: Path) -> None:
    folder = smaller(reward_folder(Path("rm").absolute(), kind), AutoModelForSequenceClassification)
    flags = ["--model.path", model, "--run.threads", 1, "--run.num-steps", 1, "--run.folder", "run"]
    said = refusal("rl", *flags, "--task.name", "countdown", "--rewards", f"[{{model: {folder}}}]")
    assert f"rewards: model = {folder}: the tokenizer's token" in said
    assert SAYS in said
    assert not Path("run").exists()


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_special_tokens_beyond_the_embedding_are_refused_where_a_text_has_one(kind: str) -> None:
    """A pad token that was added without a row is common, and pads: whatever is masked, a row is looked up."""
    tokenizer, body = reward_tokenizer(), classifier(kind)
    body.resize_token_embeddings(len(tokenizer))
    reward = RewardModel(body, tokenizer=tokenizer)
    texts = {"prompts": ["ab", "abc"], "completions": ["d", "efg"]}
    expected = reward(**texts)
    tokenizer.add_special_tokens({"pad_token": "<|new|>"})
    assert tokenizer.pad_token_id >= num_embeddings(reward.model)
    added = RewardModel(reward.model, tokenizer=tokenizer)
    assert added(**texts) == pytest.approx(expected, abs=1e-5)
    with refused("has no row in the model's embedding"):
        added(prompts=["a<|new|>"], completions=["b"])
