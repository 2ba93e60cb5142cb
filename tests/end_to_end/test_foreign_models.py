"""Runs of foreign families: two steps each, and what the plan says of the way that they are sampled."""

import json
from pathlib import Path

import pytest

import posttrain
from posttrain.models.loading.new_model import new_tokenizer
from posttrain.models.policy import as_policy
from posttrain.runs.alarms import GAP, GAP_LIMIT
from tests.support.families import family_model
from tests.support.runs import tiny_recipe

QUICK = {
    "run": {"num_steps": 2},
    "evaluation": {"every_steps": 0},
    "checkpoint": {"every_steps": 0},
    "algorithm": {"name": "grpo", "kl": {"coefficient": 0.1, "estimator": "full"}},
}


@pytest.mark.parametrize(
    ("family", "dtype", "says"),
    [
        ("lfm2", "float32", "sampled without a cache, whole rows again for every token: layers of a lfm2 keep more"),
        ("mistral", "bfloat16", "by the model's own forward pass"),
        ("gptj", "float32", "by the model's own forward pass"),
        ("granite", "float32", "by the model's own forward pass"),
    ],
)
def test_a_foreign_family_trains_and_sampler_and_trainer_stay_together(
    family: str, dtype: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = new_tokenizer()
    model = family_model(family, vocab_size=len(tokenizer))
    before = model.get_input_embeddings().weight.detach().clone()
    folder = tiny_recipe(tmp_path / "case", **QUICK).parent
    policy = as_policy(model, tokenizer, dtype=dtype, forward="plain", context=64)
    posttrain.train(posttrain.load_recipe(folder / "recipe.yaml"), policy=policy)
    printed = capsys.readouterr()
    assert says in printed.out + printed.err
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [step for step in steps if "loss" in step]
    assert [step["step"] for step in trained] == [1, 2]
    assert all(step[GAP] <= step[GAP_LIMIT] / (100 if dtype == "float32" else 1) for step in trained)
    assert trained[1]["kl"] > 0  # the whole divergence, through the same kind of output layer
    assert not model.get_input_embeddings().weight.equal(before)
