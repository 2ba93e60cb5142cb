"""A user's own watchers see all that a run does, before it is written down and saved; they add to it and may end it."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet

import posttrain
from posttrain.errors import RunError, UserError
from posttrain.runs.reports import BeginReport, CheckpointReport, EndReport, EvaluationReport, StepReport
from posttrain.runs.watchers import OwnWatcher
from tests.support.dice import dice
from tests.support.own_objects import config_for
from tests.support.runs import metrics_of, require_same

ROWS = [{"prompt": f"Throw {n}. "} for n in range(24)]


class Notes(posttrain.Watcher):
    """Keeps every report, and adds a metric."""

    def __init__(self, metric: str = "own/tripled") -> None:
        self.metric = metric
        self.steps: list[StepReport] = []
        self.evaluations: list[EvaluationReport] = []
        self.saves: list[tuple[int, bool]] = []
        self.ends: list[EndReport] = []

    def on_step(self, report: StepReport) -> dict[str, float]:
        self.steps.append(report)
        return {self.metric: 3 * report.metrics["reward"]}

    def on_evaluation(self, report: EvaluationReport) -> None:
        self.evaluations.append(report)

    def on_save(self, report: CheckpointReport) -> None:
        self.saves.append((report.step, (report.path / "policy.safetensors").is_file()))

    def on_end(self, report: EndReport) -> None:
        self.ends.append(report)


def config(model: Path, folder: Path, num_steps: int = 3, **sections: Any) -> posttrain.Config:
    given: dict[str, Any] = {
        "task": {"held_out_share": 0.3, "held_out_size": 3},
        "evaluation": {"every_steps": 2, "samples": 2},
        "checkpoint": {"every_steps": 2},
        "run": {"folder": str(folder), "num_steps": num_steps, "threads": 1},
    }
    return config_for(model, folder, **{**given, **sections})


@pytest.fixture(scope="module")
def watched(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[posttrain.Run, Notes, Notes]:
    """A run of three steps and its two watchers, in their order."""
    first, second = Notes(), Notes("own/again")
    made = config(model, tmp_path_factory.mktemp("run") / "run")
    return posttrain.train(made, rows=ROWS, rewards=[dice], watchers=[first, second]), first, second


def lines(run: posttrain.Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


def test_the_line_of_a_step_has_what_watchers_see_and_return(
    watched: tuple[posttrain.Run, Notes, Notes],
) -> None:
    run, first, _ = watched
    assert [report.step for report in first.steps] == [1, 2, 3]
    _, *steps, _ = lines(run)  # those between the evaluations before and after
    for report, line in zip(first.steps, steps, strict=True):
        told = {name: line.pop(name) for name in ("step", "num_non_finite", "own/tripled", "own/again")}
        tripled = 3 * report.metrics["reward"]
        assert told == {"step": report.step, "num_non_finite": 0, "own/tripled": tripled, "own/again": tripled}
        times = {name for name in line if name.startswith("seconds/")} | {"step_time", "tokens_per_second"}
        assert {name: value for name, value in line.items() if name not in times} == report.metrics
        assert line["seconds/watchers"] > 0
        assert line["step_time"] == pytest.approx(sum(line[name] for name in times if name.startswith("seconds/")))


def test_a_step_has_what_its_rollout_file_has(
    watched: tuple[posttrain.Run, Notes, Notes],
) -> None:
    run, first, _ = watched
    for report in first.steps:
        rows = parquet.read_table(run.folder / "rollouts" / f"step-{report.step:06d}.parquet").to_pylist()
        assert report.grades is not None
        assert report.advantages is not None
        tokens = [list(rollout.tokens) for group in report.groups for rollout in group.rollouts]
        assert tokens == [row["tokens"] for row in rows]
        assert report.grades.rewards.flatten().tolist() == [row["reward"] for row in rows]
        assert report.advantages.flatten().tolist() == [row["advantage"] for row in rows]
        assert report.token_advantages is not None
        assert report.token_advantages.tolist() == [each for row in rows for each in row["token_advantages"]]
        assert [len(row["token_advantages"]) for row in rows] == list(map(len, tokens))
        assert {each for row in rows for each in row["token_advantages"]} == {row["advantage"] for row in rows}
        assert "token_values" not in rows[0]  # no critic
        assert report.num_tokens == sum(map(len, tokens))
        assert {"rollout", "grade", "collate", "update", "save"} <= report.seconds.keys()


def test_what_a_watcher_returns_is_seen_by_those_after_it(watched: tuple[posttrain.Run, Notes, Notes]) -> None:
    _, first, second = watched
    for before, after in zip(first.steps, second.steps, strict=True):
        assert "own/tripled" not in before.metrics
        assert after.metrics == {**before.metrics, "own/tripled": 3 * before.metrics["reward"]}


class Returns(posttrain.Watcher):
    """Returns something in each step."""

    def __init__(self, something: object, stage: str | None = None) -> None:
        self.something, self.stage = something, stage

    def on_step(self, report: StepReport) -> Any:
        return self.something


def test_what_a_watcher_returns_is_shown_and_its_time_is_a_stage_by_a_name_of_its_own(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"my/metric": np.float32(0.25), "mine": torch.tensor(2), "undefined": float("nan")}
    watchers = (each for each in [Returns(own, stage="tracker")])  # gone through once
    run = posttrain.train(config(model, tmp_path / "run", 1), rows=ROWS, rewards=[dice], watchers=watchers)  # type: ignore[arg-type]
    line = lines(run)[1]
    assert (line["my/metric"], line["mine"], line["undefined"], line["num_non_finite"]) == (0.25, 2, None, 1)
    assert line["seconds/tracker"] > 0
    assert "seconds/watchers" not in line
    shown = [text for text in capsys.readouterr().out.splitlines() if text.startswith("step 1/1 ")]
    assert len(shown) == 1
    assert "my/metric 0.25  mine 2  undefined nan" in shown[0]


RETURNED: dict[str, tuple[object, tuple[str, ...]]] = {
    "a number": (3, ("returned 3 (int)", "a mapping of metrics to numbers")),
    "text": ("done", ("returned 'done' (str)", "a mapping")),
    "a name that is none": ({1: 2.0}, ("1 = 2.0", "A name is a text")),
    "a text for a number": ({"mine": "2"}, ("'mine' = '2' (str)", "its value a number")),
    "a metric of this step": ({"reward": 1.0}, ("'reward' = 1.0", "own/reward")),
    "a metric of other steps": ({"eval/accuracy_sampled": 1.0}, ("own/eval_accuracy_sampled",)),
    "a time": ({"seconds/update": 1.0}, ("'seconds/update'", "does not use")),
    "what comes last": ({"step_time": 1.0}, ("'step_time'", "does not use")),
    "the step": ({"step": 1.0}, ("'step'", "own/step")),
}


@pytest.mark.parametrize("mistake", RETURNED)
def test_what_a_watcher_may_not_return_is_named(mistake: str) -> None:
    returned, words = RETURNED[mistake]
    with pytest.raises(RunError) as refused:
        OwnWatcher(Returns(returned), {}).on_step(StepReport(step=1, metrics={"reward": 0.5}))
    assert all(each in str(refused.value) for each in ("watcher Returns: on_step", *words))


def test_watchers_that_return_one_name_and_one_outside_a_list_are_refused(model: Path, tmp_path: Path) -> None:
    twice = [Returns({"mine": 1}), Returns({"mine": 2})]
    for watchers, words in ((twice, "step 1: watcher Returns: on_step returned 'mine'"), (Notes(), "Give a list of")):
        made = config(model, tmp_path / str(len(words)), 1)
        with pytest.raises(UserError) as refused:
            posttrain.train(made, rows=ROWS, rewards=[dice], watchers=watchers)  # type: ignore[arg-type]
        assert words in str(refused.value)


def test_evaluations_are_those_of_the_summary_and_of_the_journal(watched: tuple[posttrain.Run, Notes, Notes]) -> None:
    run, first, _ = watched
    assert [report.step for report in first.evaluations] == [0, 2, 3]
    before, on_the_way, after = first.evaluations
    saved = json.loads((run.folder / "summary.json").read_text())
    assert [json.loads(json.dumps(report.results)) for report in (before, after)] == [saved["before"], saved["after"]]
    assert [len(group.rollouts) for group in after.groups] == [2, 2, 2]
    assert on_the_way.results.items() <= lines(run)[2].items()
    assert "eval/accuracy_sampled" in on_the_way.results


def test_saved_checkpoints_are_told_and_the_summary_at_the_end(
    watched: tuple[posttrain.Run, Notes, Notes],
) -> None:
    run, first, _ = watched
    assert first.saves == [(0, True), (2, True), (3, True)]
    (end,) = first.ends
    assert (end.step, end.folder, end.interrupted) == (3, run.folder, False)
    assert end.summary == run.summary
    assert json.loads((run.folder / "summary.json").read_text()) == json.loads(json.dumps(end.summary))


def test_groups_that_dynamic_sampling_sets_aside_are_told_apart(model: Path, tmp_path: Path) -> None:
    def same(completions: list[str], prompts: list[str]) -> list[float]:
        """Half of the prompts tell nothing."""
        return [float(ord(prompt[-3]) % 2 and score) for prompt, score in zip(prompts, dice(completions), strict=True)]

    notes = Notes()
    made = config(model, tmp_path / "run", 2, algorithm={"name": "dapo", "resample": {"max_rounds": 3}})
    posttrain.train(made, rows=ROWS, rewards=[same], watchers=[notes])
    assert any(report.replaced for report in notes.steps)
    for report in notes.steps:
        groups, grades, advantages = report.all_rollouts()
        aside = [group for more, _ in report.replaced for group in more]
        assert groups == [*report.groups, *aside]
        assert len(aside) == report.metrics["num_replaced_groups"]
        assert grades.rewards.shape == advantages.shape == (len(groups), 4)
        assert not torch.isnan(advantages[:3]).any()
        assert torch.isnan(advantages[3:]).all()


class Stops(Notes):
    """Raises in step 2."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def on_step(self, report: StepReport) -> dict[str, float]:
        if report.step == 2:
            raise self.error
        return super().on_step(report)


def test_a_step_in_which_a_watcher_failed_is_taken_again_and_told_once(model: Path, tmp_path: Path) -> None:
    def run(name: str, watcher: posttrain.Watcher, *, resume: bool = False) -> None:
        made = config(model, tmp_path / name, 3, checkpoint={"every_steps": 2})  # due when the watcher fails
        posttrain.train(made, rows=ROWS, rewards=[dice], watchers=[watcher], resume=resume)

    run("whole", Notes())
    with pytest.raises(LookupError):
        run("broken", Stops(LookupError("enough")))
    assert [line["step"] for line in metrics_of(tmp_path / "broken")] == [0, 1]
    run("broken", Notes(), resume=True)
    assert all("own/tripled" in line for line in metrics_of(tmp_path / "broken")[1:])
    require_same(tmp_path / "whole", tmp_path / "broken")


def test_an_interrupted_run_tells_its_end_without_a_summary(model: Path, tmp_path: Path) -> None:
    class Interrupts(Notes):
        def on_step(self, report: StepReport) -> dict[str, float]:
            os.kill(os.getpid(), signal.SIGTERM)
            return super().on_step(report)

    notes = Interrupts()
    run = posttrain.train(config(model, tmp_path / "run"), rows=ROWS, rewards=[dice], watchers=[notes])
    assert run.interrupted
    (end,) = notes.ends
    assert (end.step, end.summary, end.interrupted) == (1, {}, True)
    assert notes.saves == [(0, True), (1, True)]


def test_a_watcher_has_a_step_saved_and_ends_a_run_that_is_then_a_whole_one(model: Path, tmp_path: Path) -> None:
    class Asks(Notes):
        began: list[int]

        def on_begin(self, report: BeginReport) -> None:
            self.begun = report

        def on_step_begin(self, step: int) -> None:
            self.began.append(step)

        def on_step(self, report: StepReport) -> dict[str, float]:
            self.saving, self.stopping = report.step == 1, report.step == 3
            return super().on_step(report)

    asks = Asks()
    asks.began = []
    made = config(model, tmp_path / "run", 9, checkpoint={"every_steps": 0})
    run = posttrain.train(made, rows=ROWS, rewards=[dice], watchers=[asks])
    assert asks.begun.step == 0
    assert {int(each["step"]) for each in asks.begun.optimizer.state.values()} == {3}
    assert asks.began == [1, 2, 3]
    assert [step for step, _ in asks.saves] == [0, 1, 3]
    assert not run.interrupted
    assert (run.model_folder / "model.safetensors").is_file()
