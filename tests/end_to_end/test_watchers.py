"""Watchers and trackers see all that a run does, before it is written down; watchers add to it and may end it."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import posttrain
from posttrain.errors import RunError, UserError
from posttrain.runs import tracker
from posttrain.runs.reports import BeginReport, StepReport
from posttrain.runs.watchers import OwnWatcher
from tests.support.dice import dice
from tests.support.own_objects import Notes, config_for
from tests.support.runs import metrics_of, records, require_same, rollout_rows

ROWS = [{"prompt": f"Throw {n}. "} for n in range(24)]


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
    first, second = Notes("own/tripled"), Notes("own/again")
    made = config(model, tmp_path_factory.mktemp("run") / "run")
    return posttrain.train(made, rows=ROWS, rewards=[dice], watchers=[first, second]), first, second


def lines(run: posttrain.Run) -> list[dict[str, Any]]:
    return records(run.folder / "metrics.jsonl")


def test_the_line_of_a_step_has_what_watchers_see_and_return(watched: tuple[posttrain.Run, Notes, Notes]) -> None:
    run, first, second = watched
    assert [report.step for report in first.steps] == [1, 2, 3]
    _, *steps, _ = lines(run)  # those between the evaluations before and after
    for report, after, line in zip(first.steps, second.steps, steps, strict=True):
        told = {name: line.pop(name) for name in ("step", "num_non_finite", "own/tripled", "own/again")}
        tripled = 3 * report.metrics["reward"]
        assert after.metrics == {**report.metrics, "own/tripled": tripled}, "seen by those after it"
        assert told == {"step": report.step, "num_non_finite": 0, "own/tripled": tripled, "own/again": tripled}
        times = {name for name in line if name.startswith("seconds/")} | {"step_time", "tokens_per_second"}
        assert {name: value for name, value in line.items() if name not in times} == report.metrics
        assert line["seconds/watchers"] > 0
        assert line["step_time"] == pytest.approx(sum(line[name] for name in times if name.startswith("seconds/")))


def test_a_step_has_what_its_rollout_file_has(watched: tuple[posttrain.Run, Notes, Notes]) -> None:
    run, first, _ = watched
    for report in first.steps:
        rows = rollout_rows(run.folder, report.step)
        tokens = [list(rollout.tokens) for group in report.groups for rollout in group.rollouts]
        assert tokens == [row["tokens"] for row in rows]
        assert report.grades.rewards.flatten().tolist() == [row["reward"] for row in rows]
        assert report.advantages.flatten().tolist() == [row["advantage"] for row in rows]
        assert report.token_advantages.tolist() == [each for row in rows for each in row["token_advantages"]]
        assert [len(row["token_advantages"]) for row in rows] == list(map(len, tokens))
        assert {each for row in rows for each in row["token_advantages"]} == {row["advantage"] for row in rows}
        assert "token_values" not in rows[0]  # no critic
        assert report.num_tokens == sum(map(len, tokens))
        assert {"rollout", "grade", "collate", "update", "save"} <= report.seconds.keys()


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
    "a name that is none": ({1: 2.0}, ("1 = 2.0", "Use a name that the run does not use")),
    "a text for a number": ({"mine": "2"}, ("'mine' = '2' (str)", "a number as its value")),
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


def test_saved_checkpoints_are_told_and_the_summary_at_the_end(watched: tuple[posttrain.Run, Notes, Notes]) -> None:
    run, first, _ = watched
    assert first.saves == [(0, True), (2, True), (3, True)]
    (end,) = first.ends
    assert (end.step, end.folder, end.interrupted) == (3, run.folder, False)
    assert end.summary == run.summary
    assert json.loads((run.folder / "summary.json").read_text()) == json.loads(json.dumps(end.summary))


class Stops(Notes):
    """Raises in step 2."""

    def __init__(self, error: Exception) -> None:
        super().__init__("own/tripled")
        self.error = error

    def on_step(self, report: StepReport) -> dict[str, float]:
        if report.step == 2:
            raise self.error
        return super().on_step(report)


def test_a_step_in_which_a_watcher_failed_is_taken_again_and_told_once(model: Path, tmp_path: Path) -> None:
    def run(name: str, watcher: posttrain.Watcher, *, resume: bool = False) -> None:
        made = config(model, tmp_path / name, 3, checkpoint={"every_steps": 2})  # due when the watcher fails
        posttrain.train(made, rows=ROWS, rewards=[dice], watchers=[watcher], resume=resume)

    run("whole", Notes("own/tripled"))
    with pytest.raises(LookupError):
        run("broken", Stops(LookupError("enough")))
    assert [line["step"] for line in metrics_of(tmp_path / "broken")] == [0, 1]
    run("broken", Notes("own/tripled"), resume=True)
    assert all("own/tripled" in line for line in metrics_of(tmp_path / "broken")[1:])
    require_same(tmp_path / "whole", tmp_path / "broken")


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


THROWS = [{"prompt": f"Throw {n}. "} for n in range(12)]
STAND_INS = Path(__file__).parents[1] / "support" / "stand_ins"


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[tuple[str, Any]]]]:
    """Stand-ins for the libraries, by the list of calls that each keeps."""
    monkeypatch.syspath_prepend(STAND_INS)
    monkeypatch.setattr(tracker, "LOCAL_STORE", ())
    names = ("wandb", "trackio", "mlflow", "mlflow.entities", "mlflow.tracking")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    modules = {"wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow.tracking"}
    yield {name: importlib.import_module(module).CALLS for name, module in modules.items()}
    for name in names:
        sys.modules.pop(name, None)


def tracked(model: Path, folder: Path, report_to: list[str], num_steps: int, **options: Any) -> posttrain.Config:
    return config_for(
        model,
        folder,
        task={"held_out_share": 0.2},
        rollout={"prompts_per_step": 2, "group_size": 2, "max_completion_tokens": 3},
        evaluation={"every_steps": 2, "samples": 1, "brief_problems": 2},
        checkpoint={"every_steps": 1},
        tracker=options,
        run={"num_steps": num_steps, "report_to": report_to},
    )


def told_lines(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """What metrics.jsonl has, without null."""
    told = records(folder / "metrics.jsonl")
    return [(each.pop("step"), {name: value for name, value in each.items() if value is not None}) for each in told]


def test_tensorboards_files_hold_the_metrics_and_a_step_taken_again_once(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    made = tracked(model, folder, ["tensorboard"], 3, completions=1)
    posttrain.train(made, rows=THROWS, rewards=[dice])
    first = told_lines(folder)
    posttrain.train(made, rows=THROWS, rewards=[dice], resume=True, from_step=2)

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    for name in ("reward", "step_time", "loss"):
        told = [(event.step, event.value) for event in events.Scalars(name)]
        assert told == [
            (step, pytest.approx(line[name], rel=1e-6)) for step, line in told_lines(folder) if name in line
        ]
    names = {name for _, line in first for name in line}
    assert names == set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("eval/accuracy_sampled")] == [0, 2, 3]
    texts = {name.removesuffix("/text_summary") for name in events.Tags()["tensors"]}
    assert texts == {"config", "summary", "completions/0"}
    assert {event.step for event in events.Tensors("completions/0/text_summary")} == {1, 2, 3}
    assert b"Throw " in events.Tensors("completions/0/text_summary")[0].tensor_proto.string_val[0]
    assert json.loads((folder / "trackers.json").read_text()) == {"tensorboard": "tensorboard"}


def test_the_others_are_told_the_same_and_a_resumed_run_goes_on_in_theirs(
    model: Path, tmp_path: Path, libraries: dict[str, list[tuple[str, Any]]]
) -> None:
    names, folder = ["wandb", "mlflow", "trackio"], tmp_path / "run"
    told = {"project": "known", "name": "first", "offline": True, "completions": 3}
    posttrain.train(tracked(model, folder, names, 1, **told), rows=THROWS, rewards=[dice])
    wandb, mlflow, trackio = (dict(reversed(libraries[name])) for name in names)  # the first call of each kind
    begun, first = wandb["init"], told_lines(folder)
    assert (begun["project"], begun["name"], begun["mode"], begun["id"]) == ("known", "first", "offline", None)
    assert begun["config"]["rollout"]["group_size"] == 2
    assert begun["dir"] == str(folder)
    assert mlflow["uri"] == f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert mlflow["create"] == ("e1", "first")
    assert trackio["init"]["project"] == "known"
    assert trackio["init"]["name"].startswith("first-")
    assert trackio["init"]["config"]["rollout.group_size"] == 2
    assert numbers_of(libraries) == dict.fromkeys(names, first)
    shown = [numbers["completions"] for kind, numbers in libraries["wandb"] if "completions" in numbers]
    assert [len(table.data) for table in shown] == [3]
    assert shown[0].columns == ["step", "prompt", "completion", "reward", "advantage"]
    assert wandb["finish"][0] == 0
    assert wandb["finish"][1]["after.num_problems"] == 2
    parameters = [each for kind, call in libraries["mlflow"] if kind == "batch" for each in call[2]]
    assert ("rollout.group_size", "2") in parameters
    assert mlflow["end"] == ("m1", "FINISHED")

    for calls in libraries.values():
        calls.clear()
    posttrain.train(tracked(model, folder, names, 2, **told), rows=THROWS, rewards=[dice], resume=True)
    new = [line for line in told_lines(folder) if line[0] == 2]
    assert dict(libraries["wandb"])["init"]["id"] == "w1"
    assert ("update", ("m1", "RUNNING")) in libraries["mlflow"]
    resumed = dict(libraries["trackio"])["init"]
    assert (resumed["resume"], resumed["name"]) == ("must", trackio["init"]["name"])
    assert {name: [line for line in found if line[0] == 2] for name, found in numbers_of(libraries).items()} == (
        dict.fromkeys(names, new)
    )


def numbers_of(libraries: dict[str, list[tuple[str, Any]]]) -> dict[str, list[tuple[int, dict[str, float]]]]:
    """What each library was told of steps."""
    wandb = [dict(numbers) for kind, numbers in libraries["wandb"] if kind == "log" and "completions" not in numbers]
    batches = [call[1] for kind, call in libraries["mlflow"] if kind == "batch" and call[1]]
    trackio = [call for kind, call in libraries["trackio"] if kind == "log" and "completions" not in call[1]]
    return {
        "wandb": [(numbers.pop("step"), numbers) for numbers in wandb],
        "mlflow": [(batch[0].step, {each.key: each.value for each in batch}) for batch in batches],
        "trackio": [(step, numbers) for step, numbers in trackio],
    }


def test_supervised_runs_are_told_too(model: Path, tmp_path: Path) -> None:
    made = posttrain.load_recipe(
        kind=posttrain.SftConfig,
        model={"path": str(model)},
        task={"name": "dataset", "held_out_size": 2},
        sft={"rows_per_batch": 4, "learning_rate": 1e-3},
        run={"folder": str(tmp_path / "run"), "num_steps": 2, "threads": 1, "report_to": ["tensorboard"]},
    )
    posttrain.train_sft(made, rows=[{"prompt": f"{n}+{n}=", "completion": str(2 * n)} for n in range(8)])
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    told = [(event.step, pytest.approx(event.value)) for event in events.Scalars("loss")]
    assert told == [(step, line["loss"]) for step, line in told_lines(tmp_path / "run") if "loss" in line]
    assert len(told) == 2
