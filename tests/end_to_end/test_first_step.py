"""Step 1 is collected first, and once: a mistake in a reward shows before anything is measured or given up."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

import posttrain
from tests.support.dice import dice
from tests.support.own_objects import Counts, Sums, config, policy_of
from tests.support.refusals import refused
from tests.support.runs import metrics_of


def mistaken(completions: Sequence[str], **columns: object) -> list[float]:
    raise ZeroDivisionError("no divisor")


def files(folder: Path) -> dict[str, bytes]:
    """All content but that of the lock, which every writer renews."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != ".posttrain.lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


class Run:
    """A run whose objects can be looked at."""

    def __init__(self, model: Path, folder: Path, **sections: Any) -> None:
        self.policy = policy_of(model)
        self.engine = Counts(self.policy)
        self.config = config(folder, 2, **sections)

    def train(self, *rewards: Any, task: type[Sums] = Sums, **how: Any) -> posttrain.Run:
        objects = {"policy": self.policy, "task": task(self.policy), "engine": self.engine}
        return posttrain.train(self.config, **objects, rewards=rewards, **how)


def test_a_mistake_in_a_reward_shows_before_the_first_measurement(model: Path, tmp_path: Path) -> None:
    run = Run(model, tmp_path / "deep" / "run")
    with refused("reward 'mistaken'", "raised ZeroDivisionError: no divisor"):
        run.train(mistaken)
    assert run.engine.sampled == [("rollout", 1, 0)]
    assert not (tmp_path / "deep" / "run").exists()


def test_what_a_folder_held_already_stays_where_a_run_does_not_begin(model: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with refused("no divisor"):
        Run(model, tmp_path / "run").train(mistaken)
    assert files(tmp_path / "run") == {}


def test_a_mistake_in_a_reward_does_not_cost_the_run_that_is_overwritten(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    Run(model, folder).train(dice)
    earlier = files(folder)
    assert {"summary.json", "scores.jsonl", "model/model.safetensors"} <= earlier.keys()
    with refused("no divisor"):
        Run(model, folder, run={"folder": str(folder), "num_steps": 2, "overwrite": True}).train(mistaken)
    assert files(folder) == earlier
    # And it can still go on.
    longer = Run(model, folder, run={"folder": str(folder), "num_steps": 3, "threads": 1})
    assert longer.train(dice, resume=True).summary["after"]
    assert [line["step"] for line in metrics_of(folder)] == [0, 1, 2, 3]


class Misnamed(Sums):
    """Its probe measures what is not among its readings."""

    def probes(self) -> Mapping[str, posttrain.Probe]:
        readings = {"length": posttrain.Reading("length")}
        return {"mine": posttrain.Probe(readings=readings, measure=lambda groups: {"lenght": 1.0})}


class Mended(Sums):
    def probes(self) -> Mapping[str, posttrain.Probe]:
        readings = {"length": posttrain.Reading("length")}
        return {"mine": posttrain.Probe(readings=readings, measure=lambda groups: {"length": 1.0})}


def test_a_mistake_in_the_first_evaluation_leaves_no_folder(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    calls: list[int] = []

    def counted(completions: Sequence[str], **columns: object) -> list[float]:
        calls.append(len(completions))
        return dice(list(completions))

    with refused("probe 'mine' measured lenght, but its readings are length"):
        Run(model, folder).train(counted, task=Misnamed)
    assert calls[0] == 12, "step 1 comes first"
    assert not folder.exists()
    Run(model, folder).train(counted, task=Mended)
    journal = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    assert [line["step"] for line in journal] == [1, 1, 1, 2, 2, 2]
    assert [line["step"] for line in metrics_of(folder)] == [0, 1, 2]


def test_a_mistake_in_the_first_evaluation_keeps_the_run_that_is_overwritten(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    Run(model, folder).train(dice)
    earlier = files(folder)
    anew = {"folder": str(folder), "num_steps": 2, "overwrite": True}
    with refused("probe 'mine' measured lenght"):
        Run(model, folder, run=anew).train(dice, task=Misnamed)
    assert files(folder) == earlier
    Run(model, folder, run=anew).train(dice, task=Mended)
    assert metrics_of(folder)[0]["eval/length"] == 1.0


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_every_completion_is_scored_once_and_step_1_comes_first(algorithm: str, model: Path, tmp_path: Path) -> None:
    calls: list[int] = []

    def counted(completions: Sequence[str], **columns: object) -> list[float]:
        calls.append(len(completions))
        return dice(list(completions))

    uncached = {"algorithm": {"name": algorithm}, "grading": {"cache_entries": 0}}
    run = Run(model, tmp_path / "run", **uncached).train(dice, counted)  # the first one judges held-out problems too
    tables = [parquet.read_table(file).to_pylist() for file in sorted((run.folder / "rollouts").iterdir())]
    held_out = 2 * 3  # sampled completions of the evaluations before and after, whose reward is measured
    assert sum(calls) == sum(len(table) for table in tables) + held_out
    journal = [json.loads(line) for line in (run.folder / "scores.jsonl").read_text().splitlines()]
    of_first = [line for line in journal if line["step"] == 1]
    assert of_first == journal[: len(of_first)]
    by_name = {line["prompt_id"]: line["scores"]["counted"] for line in of_first}
    rows = {row["prompt_id"]: row for row in tables[0]}
    assert by_name.keys() == rows.keys()
    for row in tables[0]:
        assert by_name[row["prompt_id"]][row["sample"]] == row["score/counted"]
    if algorithm == "grpo":
        assert calls == [12, 3, 12, 3], "one call for each of the two steps and of the two evaluations"
    else:
        assert sum(calls) > 30, "of no use: no group was replaced"
