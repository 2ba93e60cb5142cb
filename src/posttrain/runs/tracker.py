"""A watcher that follows metrics.jsonl and tells a tracker, and what becomes of a tracker that fails.

The rule: a tracker that cannot be loaded or opened ends the run before its first step.  One that fails later is named
once, with what it said, and the run goes on: metrics.jsonl has everything, and with each further step the tracker is
told again what it has missed.  Nothing waits for it but the end of the run, and that for a minute.
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
from posttrain.options.tracker import TrackerName, TrackerOptions
from posttrain.runs.files import write_atomically, writing
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
"""How long a tracker is waited for where the run begins and where it ends."""

SERVICES: Mapping[TrackerName, tuple[Callable[[], TrackerService], str, str]] = {
    "tensorboard": (TensorBoard, "tensorboard", "tensorboard"),
    "wandb": (WeightsAndBiases, "wandb", "wandb"),
    "mlflow": (MlFlow, "mlflow", "mlflow-skinny"),
    "trackio": (Trackio, "trackio", "trackio"),
}
"""By its name in recipes, each with the module that it needs and the package that has it."""

LOCAL_STORE = ("sqlalchemy", "alembic")
"""What MLflow's data base on this machine needs."""


def require_trackers(names: Sequence[TrackerName], options: TrackerOptions) -> None:
    """Refuse to begin without the library of a tracker that is asked for."""
    for name in names:
        _, module, package = SERVICES[name]
        if not is_installed(module):
            raise UserError(
                f"run.report_to: {name} needs the package {package}, which is not installed.  `pip install {package}`"
                " (`pip install posttrain[track]` has all four), or leave it out: metrics.jsonl is always written."
            )
    local = options.offline or "MLFLOW_TRACKING_URI" not in os.environ
    if "mlflow" in names and local and not all(map(is_installed, LOCAL_STORE)):
        raise UserError(
            "run.report_to: mlflow keeps runs on this machine in a data base, which mlflow-skinny alone does not have."
            f"  `pip install {' '.join(LOCAL_STORE)}`, or name a server by MLFLOW_TRACKING_URI."
        )


def is_installed(module: str) -> bool:
    """Whether it can be imported; a folder of that name, such as W&B leaves, is no package."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None


class Tracker(Watcher):
    """Tells one tracker what metrics.jsonl says, line by line."""

    def __init__(self, name: TrackerName, run: TrackedRun, note: Callable[[str], None]) -> None:
        """`note` prints a line."""
        self.name, self.run, self.note = name, run, note
        self.service = SERVICES[name][0]()
        self.thread = TrackerThread(name)
        self.found_by = ""
        """What finds the run there again."""
        self._file = run.folder / METRICS
        self._position = self._file.stat().st_size if run.known_as else 0
        """Where what the tracker does not know yet begins.  Only its thread changes it."""
        self._last: Future[None] | None = None
        self._warned = self._ended = False

    def open(self) -> None:
        """Begin there.  Raises RunError where that fails, or takes too long."""

        def opened() -> None:
            self.found_by = self.service.open(self.run)

        try:
            self.thread.submit(opened).result(OPEN_SECONDS)
        except (TrackerFailure, StillWorking) as failure:
            said = str(failure) or f"no answer within {OPEN_SECONDS:g} s"
            raise RunError(
                f"run.report_to: {self.name} could not begin: {said}.  Mend that, or leave {self.name} out; W&B and"
                " MLflow need no network with tracker.offline: true (--tracker.offline)."
            ) from failure

    def on_step(self, report: StepReport) -> None:
        """Send what metrics.jsonl has got since, in the background; what was sent before may still be on its way."""
        self._look()
        if self._last is None or self._last.done():
            rows = tuple(islice(completion_rows(report), self.run.options.completions))
            self._last = self.thread.submit(lambda: self._send(rows))

    def on_end(self, report: EndReport) -> None:
        """Send the rest and close the run there."""
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
        """All complete lines from the position on, each known to be sent before the next."""
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
        """Tell, once, of a tracker that failed."""
        if self._last is not None and self._last.done() and not self._warned:
            failure = self._last.exception()
            if failure is not None:
                self._warned = True
                self.note(
                    f"Tracker {self.name} failed: {failure}.  The run goes on without it; {METRICS} has everything, and"
                    f" {self.name} is told again with each step what it has missed."
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
    """The completions that a step was trained on, in order."""
    if report.grades is None or report.advantages is None:
        return
    rewards, advantages = report.grades.rewards.tolist(), report.advantages.tolist()
    for group, of_group, credits in zip(report.groups, rewards, advantages, strict=True):
        for rollout, reward, advantage in zip(group.rollouts, of_group, credits, strict=True):
            yield report.step, group.prompt.text, rollout.text, reward, advantage


class Trackers(Watcher):
    """Those that a recipe names, from the first step on."""

    def __init__(self, folder: Folder, config: TrainingConfig, note: Callable[[str], None]) -> None:
        """Nothing is begun; `note` prints a line."""
        self.folder, self.config, self.note = folder, config, note
        self.opened: list[Tracker] = []

    def open(self, step: int) -> ExitStack:
        """Begin all of them, after so many steps; leaving what is returned ends those that have not ended.

        Raises RunError where one does not begin.
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
                with writing(path / TRACKERS, path):
                    write_atomically(path / TRACKERS, (json.dumps(content, indent=2) + "\n").encode())
            return begun.pop_all()

    def on_step(self, report: StepReport) -> None:
        """Passed on."""
        for tracker in self.opened:
            tracker.on_step(report)

    def on_end(self, report: EndReport) -> None:
        """Passed on."""
        for tracker in self.opened:
            tracker.on_end(report)


def known_runs(folder: Path) -> dict[str, str]:
    """What the trackers of a run call it; nothing where it had none."""
    file = folder / TRACKERS
    if not file.exists():
        return {}
    try:
        found: dict[str, str] = json.loads(file.read_bytes())
    except ValueError as error:
        raise RunError(f"{file}: no JSON any more, so its trackers cannot be gone on with.  Delete it.") from error
    return found
