"""A run with process rewards: they reach advantages and files, and a resumed run is the run that was never stopped."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import posttrain
from posttrain import ProcessReward, Span
from tests.support.runs import require_same, save_tiny_model

ROWS = [{"prompt": f"Throw {n}. "} for n in range(12)]


def steps_of_the_way(completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[Any]:
    """A digit earns .5, and an even token .25; the score is the text's length."""
    return [
        ProcessReward(
            len(text) / 4,
            [0.25 if token % 2 == 0 else None for token in ids],
            [Span(i, i + 1, 0.5) for i, character in enumerate(text) if character.isdigit()],
        )
        for text, ids in zip(completions, completion_ids, strict=True)
    ]


def config(model: Path, folder: Path, credit: str = "steps") -> posttrain.Config:
    return posttrain.load_recipe(
        model={"path": str(model)},
        task={"name": "dataset", "held_out_share": 0.2},
        algorithm={"name": "grpo", "credit": credit, "kl": {"coefficient": 0.01, "estimator": "k1", "place": "reward"}},
        rollout={"prompts_per_step": 2, "group_size": 4, "max_completion_tokens": 6},
        update={"learning_rate": 1e-2},
        evaluation={"every_steps": 0, "samples": 1, "brief_problems": 2},
        checkpoint={"every_steps": 2, "keep_last": 1, "keep_best": False},
        run={"folder": str(folder), "num_steps": 4, "threads": 1},
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("process") / "model")


def test_a_resumed_run_with_marks_is_the_run_that_was_never_stopped(model: Path, tmp_path: Path) -> None:
    rewards = [posttrain.reward_function(steps_of_the_way, weight=0.5)]
    whole = posttrain.train(config(model, tmp_path / "whole"), rows=ROWS, rewards=rewards).folder
    parts = posttrain.steps(config(model, tmp_path / "parts"), rows=ROWS, rewards=rewards)
    assert [next(parts).step for _ in range(3)] == [1, 2, 3]
    parts.close()
    posttrain.train(config(model, tmp_path / "parts"), rows=ROWS, rewards=rewards, resume=True)
    require_same(tmp_path / "parts", whole)

    rows = pq.read_table(whole / "rollouts" / "step-000004.parquet").to_pylist()
    journal = [json.loads(line) for line in (whole / "scores.jsonl").read_text().splitlines()]
    told = [each for line in journal if line["step"] == 4 for each in line["marks"]["steps_of_the_way"]]
    assert [json.loads(row["marks/steps_of_the_way"]) for row in rows] == told
    for row, marks in zip(rows, told, strict=True):
        # The penalties are small beside the marks: none is 0, and each is within .01 nats of... nothing learned yet.
        total = 0.5 * sum([value or 0.0 for value in marks["tokens"]] + [span[2] for span in marks["spans"]])
        assert len(row["token_rewards"]) == len(row["tokens"])
        assert sum(row["token_rewards"]) == pytest.approx(total, abs=0.1)


@pytest.mark.parametrize("credit", ["completion", "reward_to_go"])
def test_levels_of_credit_give_tokens_what_they_say(model: Path, tmp_path: Path, credit: str) -> None:
    with posttrain.steps(config(model, tmp_path / "run", credit), rows=ROWS, rewards=[steps_of_the_way]) as steps:
        record = next(steps)
    assert record.token_rewards is not None
    assert len(record.token_rewards) == sum(len(r.tokens) for group in record.groups for r in group.rollouts)
    assert record.metrics["process_rewards/steps_of_the_way/mean"] > 0
    assert record.metrics["frac_zero_advantage"] < 1
