"""A tokenizer that knows more than its model: rows with such tokens are refused before there is a run folder."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from posttrain.models.context import num_embeddings
from posttrain.rewards.model import RewardModel
from tests.support.commands import refusal
from tests.support.refusals import refused
from tests.support.reward_models import classifier, reward_folder, reward_tokenizer
from tests.support.runs import save_tiny_model

SAYS = "has no row in the model's embedding, which has 24"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model(tmp_path_factory.mktemp("unknown") / "model")
    smaller = AutoModelForCausalLM.from_pretrained(folder)
    smaller.resize_token_embeddings(24)
    smaller.save_pretrained(folder)
    return folder


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
def test_rows_are_refused_before_a_run(command: str, row: str, model: Path, tmp_path: Path) -> None:
    rows, run = tmp_path / "rows.jsonl", tmp_path / "run"
    rows.write_text(row + "\n")
    flags = ["--model.path", str(model), "--task.path", str(rows), "--task.held-out-share", "0"]
    for more in [], ["--dry-run"]:
        said = refusal(command, *flags, "--run.threads", "1", "--run.folder", run, *more)
        assert "rows.jsonl:1: the tokenizer's token" in said
        assert SAYS in said
    assert not run.exists()


def test_demonstrations_are_refused_before_a_run(model: Path, tmp_path: Path) -> None:
    flags = ["--model.path", str(model), "--run.threads", "1", "--run.folder", str(tmp_path / "run")]
    assert SAYS in refusal("sft", *flags, "--task.name", "countdown", "--run.num-steps", "1")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_reward_model_without_rows_for_its_tokenizer_is_refused_before_a_run(kind: str, tmp_path: Path) -> None:
    folder, run = reward_folder(tmp_path / "rm", kind), tmp_path / "run"
    smaller = AutoModelForSequenceClassification.from_pretrained(folder)
    smaller.resize_token_embeddings(24)
    smaller.save_pretrained(folder)
    flags = ["--model.path", str(save_tiny_model(tmp_path / "model")), "--run.threads", "1", "--run.num-steps", "1"]
    rewards = ["--rewards", f"[{{model: {folder}}}]"]
    said = refusal("rl", *flags, "--task.name", "countdown", *rewards, "--run.folder", run)
    assert f"rewards: model = {folder}: the tokenizer's token" in said
    assert SAYS in said
    assert not run.exists()


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_special_tokens_beyond_the_embedding_are_refused_where_a_text_has_one(kind: str) -> None:
    """A pad token that was added without a row is common, and pads: whatever is masked, a row is looked up."""
    tokenizer, model = reward_tokenizer(), classifier(kind)
    model.resize_token_embeddings(len(tokenizer))
    reward = RewardModel(model, tokenizer=tokenizer)
    texts = {"prompts": ["ab", "abc"], "completions": ["d", "efg"]}
    expected = reward(**texts)
    tokenizer.add_special_tokens({"pad_token": "<|new|>"})
    assert tokenizer.pad_token_id >= num_embeddings(reward.model)
    added = RewardModel(reward.model, tokenizer=tokenizer)
    assert added(**texts) == pytest.approx(expected, abs=1e-5)
    with refused("has no row in the model's embedding"):
        added(prompts=["a<|new|>"], completions=["b"])
