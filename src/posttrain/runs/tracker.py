"""Watchers that send metrics.jsonl to trackers.

A tracker that cannot be loaded or opened ends the run before its first step.  If it fails later, this is reported once
and the run continues; each further step sends again what the tracker has missed.  Only the end of the run waits for
trackers, for a minute.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as StillWorking
from contextlib import ExitStack
from dataclasses import asdict
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from posttrain.config import TrainingConfig
from posttrain.config.sections import plain
from posttrain.errors import RunError, UserError
from posttrain.options.training import TrackerName, TrackerOptions
from posttrain.runs.folder import Folder
from posttrain.runs.reports import EndReport, StepReport
from posttrain.runs.run_folder import METRICS, TRACKERS
from posttrain.runs.tracker_services import (
    MlFlow,
    Row,
    Status,
    TensorBoard,
    TrackedRun,
    TrackerFailure,
    TrackerService,
    TrackerThread,
    Trackio,
    WeightsAndBiases,
)
from posttrain.runs.watchers import Watcher

OPEN_SECONDS, END_SECONDS = 300.0, 60.0
"""Timeouts of a tracker at the beginning and at the end of a run."""

SERVICES: Mapping[TrackerName, tuple[Callable[[], TrackerService], str, str]] = {
    "tensorboard": (TensorBoard, "tensorboard", "tensorboard"),
    "wandb": (WeightsAndBiases, "wandb", "wandb"),
    "mlflow": (MlFlow, "mlflow", "mlflow-skinny"),
    "trackio": (Trackio, "trackio", "trackio"),
}
"""By name in recipes, each with the module and the package that it needs."""

LOCAL_STORE = ("sqlalchemy", "alembic")
"""Packages for MLflow's local data base."""


def require_trackers(names: Sequence[TrackerName], options: TrackerOptions) -> None:
    """Refuse a tracker whose library is missing."""
    needs = {name: (module, package) for name, (_, module, package) in SERVICES.items() if name in names}
    missing = {name: package for name, (module, package) in needs.items() if not is_installed(module)}
    local = options.offline or "MLFLOW_TRACKING_URI" not in os.environ
    if "mlflow" in names and local and not all(map(is_installed, LOCAL_STORE)):
        missing.setdefault("mlflow", " ".join(LOCAL_STORE))
    for name, package in missing.items():
        store = " (or a server in MLFLOW_TRACKING_URI)" if package == " ".join(LOCAL_STORE) else ""
        also = "`pip install posttrain[track]` installs all trackers; without one metrics.jsonl is still written."
        raise UserError(f"run.report_to: {name} needs `pip install {package}`{store}.  {also}")


def is_installed(module: str) -> bool:
    """Whether it can be imported; a folder of that name, such as W&B leaves, does not count."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None


class Tracker(Watcher):
    """Sends the lines of metrics.jsonl to one tracker."""

    def __init__(self, name: TrackerName, run: TrackedRun, note: Callable[[str], None]) -> None:
        """`note` prints a line."""
        self.name, self.run, self.note = name, run, note
        self.service = SERVICES[name][0]()
        self.thread = TrackerThread(name)
        self.found_by = ""
        """The run's name in the tracker."""
        self._file = run.folder / METRICS
        self._position = self._file.stat().st_size if run.known_as else 0
        """The bytes that were sent.  Only its thread changes it."""
        self._last: Future[None] | None = None
        self._warned = self._ended = False

    def open(self) -> None:
        """Raise RunError where the tracker fails or takes too long."""

        def opened() -> None:
            self.found_by = self.service.open(self.run)

        try:
            self.thread.submit(opened).result(OPEN_SECONDS)
        except (TrackerFailure, StillWorking) as failure:
            said = str(failure) or f"no answer within {OPEN_SECONDS:g} s"
            raise RunError(
                f"run.report_to: {self.name} failed to start: {said}.  Leave it out, or set tracker.offline: true"
                " (--tracker.offline), with which W&B and MLflow need no network."
            ) from failure

    def on_step(self, report: StepReport) -> None:
        """Send the new lines in the background, unless earlier ones are still on their way."""
        self._look()
        if self._last is None or self._last.done():
            rows = tuple(islice(completion_rows(report), self.run.options.completions))
            self._last = self.thread.submit(lambda: self._send(rows))

    def on_end(self, report: EndReport) -> None:
        self._end("interrupted" if report.interrupted else "finished", report.summary)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._ended:
            self._end("failed", {})

    def _send(self, rows: tuple[Row, ...] = ()) -> None:
        """Send all complete lines after the position, one by one."""
        with self._file.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if line.endswith(b"\n"):
                    record: dict[str, Any] = json.loads(line)
                    step = record.pop("step")
                    self.service.tell(step, {name: value for name, value in record.items() if value is not None})
                    self._position += len(line)
        if rows:
            self.service.show(rows)

    def _look(self) -> None:
        """Report a failed tracker, once."""
        if self._last is not None and self._last.done() and not self._warned:
            failure = self._last.exception()
            if failure is not None:
                self._warned = True
                self.note(
                    f"Tracker {self.name} failed: {failure}.  The run continues; {METRICS} has everything, and each"
                    " step sends again what is missing."
                )

    def _end(self, status: Status, summary: Mapping[str, Any]) -> None:
        self._ended = True
        self._look()
        sent = self.thread.submit(self._send)
        closed = self.thread.submit(lambda: self.service.close(summary, status))
        for each in (sent, closed):
            try:
                each.result(END_SECONDS)
            except (TrackerFailure, StillWorking) as failure:
                said = str(failure) or f"no answer within {END_SECONDS:g} s"
                self.note(f"Tracker {self.name} lacks the end of the run: {said}.  {self._file} has everything.")
                return


def completion_rows(report: StepReport) -> Iterator[Row]:
    if report.grades is None or report.advantages is None:
        return
    rewards, advantages = report.grades.rewards.tolist(), report.advantages.tolist()
    for group, of_group, credits in zip(report.groups, rewards, advantages, strict=True):
        for rollout, reward, advantage in zip(group.rollouts, of_group, credits, strict=True):
            yield report.step, group.prompt.text, rollout.text, reward, advantage


class Trackers(Watcher):
    """The trackers that a recipe names."""

    def __init__(self, folder: Folder, config: TrainingConfig, note: Callable[[str], None]) -> None:
        """`note` prints a line."""
        self.folder, self.config, self.note = folder, config, note
        self.opened: list[Tracker] = []

    def open(self, step: int) -> ExitStack:
        """Open all after `step` steps; leaving the returned stack ends those that have not ended.

        Raises RunError where one does not open.
        """
        path, known = self.folder.path, known_runs(self.folder.path)
        with ExitStack() as begun:
            for name in self.config.run.report_to:
                run = TrackedRun(
                    folder=path,
                    config=plain(asdict(self.config)),
                    options=self.config.tracker,
                    known_as=known.get(name, ""),
                    step=step,
                )
                self.opened.append(begun.enter_context(Tracker(name, run, self.note)))
            content = known | {str(tracker.name): tracker.found_by for tracker in self.opened}
            if content != known:
                self.folder.write(TRACKERS, json.dumps(content, indent=2) + "\n")
            return begun.pop_all()

    def on_step(self, report: StepReport) -> None:
        for tracker in self.opened:
            tracker.on_step(report)

    def on_end(self, report: EndReport) -> None:
        for tracker in self.opened:
            tracker.on_end(report)


def known_runs(folder: Path) -> dict[str, str]:
    """The run's name in each of its trackers."""
    file = folder / TRACKERS
    if not file.exists():
        return {}
    try:
        found: dict[str, str] = json.loads(file.read_bytes())
    except ValueError as error:
        raise RunError(f"{file}: damaged: not JSON.  Delete it to start new runs in the trackers.") from error
    return found
