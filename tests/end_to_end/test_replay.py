"""A run replayed from its rollout files: the same weights to the bit, for what steps keep, refill, mark and weigh."""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import posttrain
from posttrain.errors import RunError, UserError
from posttrain.options.model import AdapterOptions
from posttrain.runs.recorded_step import read_step
from posttrain.runs.rollout_file import parquet_bytes
from posttrain.training.run_replay import Replayed, replay
from posttrain.training.session import CallerObjects
from tests.end_to_end.test_rewards_run import steps_of_the_way
from tests.support.dice import dice
from tests.support.own_objects import ROWS, config_for
from tests.support.refusals import mentions, refused
from tests.support.stages import stages_with

STEPS = 3


def letters(completions: Sequence[str], **columns: object) -> list[float | None]:
    """None for some, and beyond what counts for others."""
    return [None if len(text) % 3 == 0 else float(sum(map(str.isalpha, text))) for text in completions]


REWARDS = [dice, posttrain.reward_function(letters, weight=0.3, clip=(0.0, 4.0), weight_to=0.1, over_steps=2)]
CASES: dict[str, dict[str, Any]] = {
    "several updates": {
        "algorithm": {"name": "grpo", "kl": {"coefficient": 0.05}, "reward_aggregation": "normalize_then_sum"},
        "reference": {"refresh_every": 2},
        "update": {"epochs_per_step": 2, "minibatches_per_epoch": 2, "schedule": "cosine", "warmup_steps": 2},
    },
    "refills": {"algorithm": {"name": "dapo", "resample": {"max_rounds": 2}}},
    "critic": {"algorithm": {"name": "ppo", "critic": {"fit_steps": 1}, "kl": {"coefficient": 0.1, "place": "reward"}}},
    "adapter": {"algorithm": {"name": "rloo"}, "adapter": AdapterOptions(rank=2, dropout=0.2)},
    "correction": {"algorithm": {"name": "gspo", "correction": {"level": "token"}}},
}


def trained(
    model: Path, folder: Path, sections: Mapping[str, Any], rewards: Sequence[Any] = REWARDS
) -> posttrain.Config:
    given = {"checkpoint": {"every_steps": 1, "keep_last": 9}, "run": {"num_steps": STEPS, "curves": False}, **sections}
    adapter = given.pop("adapter", None)
    config = config_for(model, folder, **given)
    config = replace(config, model=replace(config.model, adapter=adapter))
    posttrain.train(config, rows=ROWS, rewards=rewards)
    return config


def replayed(config: posttrain.Config, rewards: Sequence[Any] = REWARDS) -> Replayed:
    return replay(config, CallerObjects(rows=ROWS, rewards=rewards))


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_trained_again_to_the_bit(model: Path, tmp_path: Path, case: str) -> None:
    config = trained(model, tmp_path, CASES[case])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    found = replayed(config)
    assert found == Replayed(num_steps=STEPS, differences={step: [] for step in range(STEPS + 1)})
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_marks_on_tokens_and_spans_are_read_back(model: Path, tmp_path: Path) -> None:
    rewards = [posttrain.reward_function(steps_of_the_way, weight=0.5)]
    config = trained(model, tmp_path, {"algorithm": {"name": "grpo", "credit": "steps"}}, rewards)
    assert replayed(config, rewards).equal


def test_rewards_are_not_called_and_nothing_is_sampled(model: Path, tmp_path: Path) -> None:
    config = trained(model, tmp_path, {}, [dice])

    def never(completions: Sequence[str], **columns: object) -> list[float]:
        raise AssertionError("called")

    assert replayed(config, [never]).equal


def change(file: Path, column: str, value: Any) -> None:
    """Another first value of a column."""
    table = pq.read_table(file)
    values = table[column].to_pylist()
    values[0] = value(values[0])
    place = table.column_names.index(column)
    pq.write_table(table.set_column(place, table.field(column), pa.array(values, table.field(column).type)), file)


def test_one_other_log_prob_shows_in_every_later_checkpoint(model: Path, tmp_path: Path) -> None:
    config = trained(model, tmp_path, {"algorithm": {"name": "reinforce"}}, [dice])
    change(tmp_path / "rollouts" / "step-000002.parquet", "logprobs", lambda each: [each[0] - 0.1, *each[1:]])
    found = replayed(config, [dice])
    assert not found.equal
    assert [bool(found.differences[step]) for step in range(STEPS + 1)] == [False, False, True, True]
    mentions(found.differences[2][0], "policy differs in")


def test_what_cannot_be_replayed_says_why(model: Path, tmp_path: Path) -> None:
    config, file = trained(model, tmp_path, {}, [dice]), tmp_path / "rollouts" / "step-000002.parquet"
    kept = file.read_bytes()
    pq.write_table(pq.read_table(file).replace_schema_metadata(None), file)
    with refused(str(file), "does not contain the weights of rewards"):
        replayed(config, [dice])
    file.write_bytes(kept[:-40])
    with refused(str(file), "damaged", error=RunError):
        replayed(config, [dice])
    shutil.copy(tmp_path / "rollouts" / "step-000003.parquet", file)
    with refused(str(file), "holds step 3, where step 2 is expected", error=RunError):
        replayed(config, [dice])
    file.write_bytes(kept)
    with refused("draw 0 is of prompt", "Restore the rows of the run", error=RunError):
        replay(config, CallerObjects(rows=ROWS[::-1], rewards=[dice]))
    file.unlink()
    with refused("steps before a checkpoint are missing", error=UserError):
        replayed(config, [dice])


@pytest.mark.parametrize(
    "column", ["step", "advantage", "sampled", "weights_version", "score/even_tokens", "turn_calls"]
)
def test_a_file_that_lacks_a_column_is_refused_with_its_name(tmp_path: Path, column: str) -> None:
    stages = stages_with()
    collected = stages.collected()
    file = tmp_path / "step.parquet"
    file.write_bytes(parquet_bytes(4, collected.groups, collected.grades, torch.zeros_like(collected.grades.rewards)))
    whole = pq.read_table(file)
    for name in ("turn_ends", "turn_given", "turn_rewards", "failure", "turn_calls"):
        whole = whole.append_column(name, pa.nulls(len(whole), pa.string()))
    pq.write_table(whole, file)
    assert read_step(file).step == 4
    pq.write_table(whole.drop_columns([column]), file)
    error = UserError if column == "sampled" else RunError
    with refused(str(file), "lacks" if column == "sampled" else f"the column `{column}` is missing", error=error):
        read_step(file)


def test_a_step_is_read_as_it_was_written(tmp_path: Path) -> None:
    """In float64 too, where float32 would round log-probs, and with scores that are missing or beyond their bounds."""
    stages = stages_with()
    collected = stages.collected()
    grades = collected.grades
    scores = torch.stack([grades.scores[0], grades.scores[0] * 7 - 1 / 3])
    scores[1, 0, 0] = math.nan
    grades = replace(
        grades,
        names=("dice", "a/b"),
        scores=scores,
        weights=torch.tensor([0.1, 1 / 3], dtype=torch.float64),
        clips={"a/b": (-math.inf, 0.7)},
    )
    advantages = torch.zeros_like(grades.rewards)
    advantages[1] = math.nan
    file = tmp_path / "step.parquet"
    file.write_bytes(parquet_bytes(4, collected.groups, grades, advantages))
    found = read_step(file)
    assert found.step == 4
    assert found.replaced is not None
    rest = [place for place in range(len(collected.groups)) if place != 1]
    for part, rows in ((found.trained, rest), (found.replaced, [1])):
        expected = grades.select(rows)
        assert part.grades.names == expected.names
        for name in ("scores", "weights", "rewards"):
            assert torch.equal(getattr(part.grades, name).nan_to_num(9.0), getattr(expected, name).nan_to_num(9.0))
        assert part.grades.clips == expected.clips
        for mine, row in zip(part.groups, rows, strict=True):
            theirs = collected.groups[row]
            assert (mine.draw, mine.prompt.tokens) == (theirs.draw, theirs.prompt.tokens)
            for rollout, other in zip(mine.rollouts, theirs.rollouts, strict=True):
                assert rollout.sequence == replace(other.sequence, messages=None)
    assert "double" in str(pq.read_schema(file).field("logprobs").type)
    assert json.loads(pq.read_schema(file).metadata[b"posttrain.rewards"])["weights"] == {"dice": 0.1, "a/b": 1 / 3}


class Opens:
    """Adds to the prompt, and replies to nothing."""

    def reset(self, row: Mapping[str, object], seed: int) -> str:
        return " Think."

    def reply(self, said: str) -> None:
        """Every answer stands."""


def test_prompts_that_an_environment_added_to_are_those_of_the_task_without_a_reply(
    model: Path, tmp_path: Path
) -> None:
    config = config_for(model, tmp_path, checkpoint={"every_steps": 1}, run={"num_steps": 1, "curves": False})
    posttrain.train(config, rows=ROWS, rewards=[dice], environment=Opens)
    assert replay(config, CallerObjects(rows=ROWS, rewards=[dice], environment=Opens)).equal
