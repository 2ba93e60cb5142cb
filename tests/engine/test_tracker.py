"""What watches a run: what a tracker is told and how it may fail, and alarms, which see all that was measured."""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.config import Config, load_recipe
from posttrain.errors import RunError, UserError
from posttrain.options.training import TrackerOptions
from posttrain.records import Grades
from posttrain.runs import tracker as module
from posttrain.runs.progress import Progress
from posttrain.runs.reports import EndReport, EvaluationReport, ScoredCompletions, StepReport
from posttrain.runs.run_folder import RunFolder
from posttrain.runs.tracker import SERVICES, TrackedRun, Tracker, require_trackers
from posttrain.runs.watchers import Alarms
from tests.support.refusals import refused
from tests.support.runs import records
from tests.support.tiny import written_group


class Service:
    """Keeps what it is told; `fails` are the numbers of the calls of `tell` that raise."""

    def __init__(
        self, fails: Sequence[int] = (), *, opens: bool = True, error: type[BaseException] = ConnectionError
    ) -> None:
        self.fails, self.opens, self.error = fails, opens, error
        self.told: list[tuple[int, Mapping[str, float]]] = []
        self.closed: list[tuple[Mapping[str, Any], str]] = []
        self.calls = 0
        self.threads: set[str] = set()
        self.free = threading.Event()
        self.free.set()

    def open(self, run: TrackedRun) -> str:
        if not self.opens:
            raise self.error("no route\n to host")
        return "id-7"

    def tell(self, step: int, numbers: Mapping[str, float]) -> None:
        self.free.wait()
        self.threads.add(threading.current_thread().name)
        self.calls += 1
        if self.calls in self.fails:
            raise self.error("the line is dead")
        self.told.append((step, numbers))

    def show(self, rows: object) -> None: ...

    def close(self, summary: Mapping[str, Any], status: str) -> None:
        self.closed.append((summary, status))


class Told:
    """A tracker over a service, with a metrics.jsonl and the notes that a person would read."""

    def __init__(self, folder: Path, service: Service, monkeypatch: pytest.MonkeyPatch, known_as: str = "") -> None:
        monkeypatch.setitem(SERVICES, "wandb", (lambda: service, "json", "json"))  # type: ignore[misc]
        self.file, self.notes = folder / "metrics.jsonl", list[str]()
        run = TrackedRun(folder=folder, config={}, options=TrackerOptions(), known_as=known_as, step=0)
        self.tracker = Tracker("wandb", run, self.notes.append)

    def line(self, step: int, **numbers: float | None) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps({"step": step, **numbers}) + "\n")

    def step(self, step: int) -> None:
        self.line(step, reward=step / 10)
        self.tracker.on_step(StepReport(step=step, metrics={}))
        self.tracker._last.exception(5)  # it is done

    def end(self) -> None:
        self.tracker.on_end(EndReport(step=3, folder=self.file.parent, summary={"algorithm": "grpo"}))


@pytest.mark.parametrize("error", [ConnectionError, SystemExit, KeyboardInterrupt])
def test_a_tracker_that_fails_is_named_once_and_told_again_what_it_missed(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that leaves the program, as `wandb` does on some errors, fails too: its thread goes on."""
    service = Service(fails=(2, 3), error=error)
    run = Told(tmp_path, service, monkeypatch)
    for step in range(1, 5):
        run.step(step)
    run.end()
    assert [step for step, _ in service.told] == [1, 2, 3, 4]
    (note,) = run.notes
    assert note.startswith(f"Tracker wandb failed: {error.__name__}: the line is dead.  The run continues")


def test_a_tracker_that_fails_to_the_end_is_told_of_at_the_end_too(tmp_path: Path, monkeypatch) -> None:
    run = Told(tmp_path, Service(fails=range(100)), monkeypatch)
    for step in range(1, 4):
        run.step(step)
    run.end()
    first, last = run.notes
    assert "failed" in first
    assert last.startswith("Tracker wandb did not receive the end of the run: ConnectionError: the line is dead.")


def test_no_step_waits_for_a_tracker_that_hangs_and_the_end_waits_for_so_long(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "END_SECONDS", 0.05)
    service = Service()
    service.free.clear()
    run = Told(tmp_path, service, monkeypatch)
    for step in range(1, 4):
        run.line(step)
        run.tracker.on_step(StepReport(step=step, metrics={}))
    run.end()
    (note,) = run.notes
    assert "did not receive the end of the run: no answer within 0.05 s" in note
    service.free.set()


def test_an_error_that_ends_the_run_ends_it_there_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    run = Told(tmp_path, service, monkeypatch)

    def failing() -> None:
        with run.tracker:
            run.step(1)
            raise RunError("the disk is full")

    with refused("the disk is full", error=RunError):
        failing()
    assert service.closed == [({}, "failed")]


@pytest.mark.parametrize("error", [OSError, SystemExit, KeyboardInterrupt])
def test_a_tracker_that_does_not_begin_ends_the_run_with_what_it_said(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Told(tmp_path, Service(opens=False, error=error), monkeypatch)
    with refused(
        f"wandb failed to start: {error.__name__}: no route to host.", "tracker.offline: true", error=RunError
    ):
        run.tracker.open()


def test_a_library_that_is_missing_is_named_with_the_way_to_get_it(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(SERVICES, "trackio", (Service, "no_such_library", "trackio"))
    with refused("trackio needs `pip install trackio`"):
        require_trackers(("trackio",), TrackerOptions())
    (tmp_path / "left_by_wandb").mkdir()  # a folder in the working folder is no package
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(SERVICES, "wandb", (Service, "left_by_wandb", "wandb"))
    with refused("wandb needs `pip install wandb`"):
        require_trackers(("wandb",), TrackerOptions())
    monkeypatch.setitem(SERVICES, "mlflow", (Service, "json", "mlflow-skinny"))
    monkeypatch.setattr(module, "LOCAL_STORE", ("json", "no_such_library"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.internal")
    require_trackers(("mlflow",), TrackerOptions())
    for options, given in ((TrackerOptions(offline=True), True), (TrackerOptions(), False)):
        if not given:
            monkeypatch.delenv("MLFLOW_TRACKING_URI")
        with refused("MLFLOW_TRACKING_URI", "pip install json no_such_library"):
            require_trackers(("mlflow",), options)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"tracker": {"project": "mine"}}, r"tracker\.project = mine is only for run\.report_to"),
        ({"run": {"report_to": ["wandb", "wandb"]}}, "report_to .*names one twice"),
        ({"run": {"report_to": ["wanbd"]}}, "wandb"),
        ({"run": {"report_to": ["wandb"]}, "tracker": {"completions": -1}}, "completions = -1"),
    ],
)
def test_mistakes_in_a_recipe_are_told(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_recipe(**sections)
    assert Config().run.report_to == ()


def report(step: int, reward: float, accuracy: float | None) -> StepReport:
    metrics = {"reward": reward, "reward_std_within_groups": 0.01}
    if accuracy is not None:
        metrics |= evaluation(accuracy)
    rewards = torch.tensor([[reward, reward]], dtype=torch.float64)
    grades = Grades(names=("mine",), scores=rewards[None], weights=torch.ones(1).double(), rewards=rewards)
    return StepReport(step=step, metrics=metrics, groups=[written_group((1,), [(2,), (3,)])], grades=grades)


def evaluation(accuracy: float) -> dict[str, float]:
    return {
        "eval/accuracy_sampled": accuracy,
        "eval/accuracy_sampled_low": accuracy - 0.01,
        "eval/accuracy_sampled_high": accuracy + 0.01,
    }


def test_a_reward_that_rises_alone_is_seen_against_the_evaluation_before_training(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", "{}") as folder:
        alarms = Alarms(folder, Progress(20))
        folder.append_metrics(0, evaluation(0.5))  # written after the watchers have been made, as a run does
        raised = []
        for step in range(1, 12):
            seen = report(step, reward=0.1 * step, accuracy=0.4 if step == 11 else None)
            raised.append(alarms.on_step(seen))
            folder.append_metrics(step, seen.metrics)
        assert raised[-1] == {"num_alarms": 1.0}
        assert folder.raised() == {"reward alone": 11}


def test_an_alarm_about_held_out_completions_shows_one_of_the_evaluation(tmp_path: Path) -> None:
    groups = [replace(written_group((1,), [(2,)] * 2), draw=7)]
    told = {"maths": (("right", "wrong"),)}
    grades = Grades(
        names=(), scores=torch.zeros(0, 1, 2), weights=torch.zeros(0), rewards=torch.zeros(1, 2), outcomes=told
    )
    scored = ScoredCompletions(groups=groups, grades=grades, judged=torch.zeros(1, 2, dtype=torch.float64))
    lines = [{"step": step, "eval/accuracy_sampled": 0.5, "eval/outcomes/maths/wrong": 0.1} for step in range(1, 9)]
    with RunFolder.create(tmp_path / "run", "{}") as folder:
        alarms = Alarms(folder, Progress(20))
        alarms.history = [*lines]
        jump = {"eval/accuracy_sampled": 0.5, "eval/outcomes/maths/wrong": 0.9}
        step = graded(9, 2, score=1.0)
        alarms.on_evaluation(EvaluationReport(step=9, results={}, completions=[scored]))
        alarms.on_step(replace(step, metrics=jump))
        [line] = records(folder.path / "alarms.jsonl")
    assert line["alarm"] == "held-out maths wrong"
    assert line["rollouts"] == [{"draw": 7, "sample": groups[0].rollouts[1].sample}]
    assert line["evaluation"] == "brief"


def graded(step: int, share: int, *, score: float) -> StepReport:
    """Of ten completions so many are `formatted`, which scores this much; the others, `prose`, score .5."""
    told = ("formatted",) * share + ("prose",) * (10 - share)
    rewards = torch.tensor([[score] * share + [0.5] * (10 - share)], dtype=torch.float64)
    grades = Grades(
        names=("form",),
        scores=rewards[None],
        weights=torch.ones(1).double(),
        rewards=rewards,
        outcomes={"form": (told,)},
    )
    metrics = {
        "reward": rewards.mean().item(),
        "outcomes/form/formatted": share / 10,
        "outcomes/form/prose": 1 - share / 10,
    }
    return StepReport(step=step, metrics=metrics, groups=[written_group((1,), [(2,)] * 10)], grades=grades)


@pytest.mark.parametrize(("score", "word"), [(1.0, "Notice"), (0.0, "ALARM")])
def test_an_outcome_that_becomes_frequent_is_an_alarm_unless_it_is_what_the_reward_pays(
    score: float, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunFolder.create(tmp_path / "run", "{}") as folder:
        alarms = Alarms(folder, Progress(20))
        counts = [alarms.on_step(graded(step, 2 if step < 12 else 8, score=score)) for step in range(1, 15)]
        told = records(folder.path / "alarms.jsonl")
    assert [(each["step"], each["alarm"], each.get("notice", False)) for each in told] == [
        (13, "outcome form formatted", word == "Notice")  # .8, .8, .2 on average are .4 above the .2 before
    ]
    assert f"{word}, step 13, outcome form formatted: 60% of completions" in capsys.readouterr().out
    assert sum(each["num_alarms"] for each in counts if each) == (word == "ALARM")
