"""Watchers that send metrics.jsonl to trackers: four services; their libraries are only loaded when used.

If a tracker cannot be loaded or opened, the run ends before its first step.  If it fails later, this is reported once
and the run continues; later steps resend what the tracker missed.  Only the end of the run waits for trackers, for up
to a minute.
"""

import importlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, TimeoutError as StillWorking
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Literal, Protocol, Self

from posttrain.config import TrainingConfig
from posttrain.config.sections import plain
from posttrain.errors import RunError, UserError
from posttrain.options.training import TrackerName, TrackerOptions
from posttrain.runs.folder import Folder
from posttrain.runs.reports import EndReport, StepReport
from posttrain.runs.run_folder import METRICS, TRACKERS
from posttrain.runs.watchers import Watcher

OPEN_SECONDS, END_SECONDS = 300.0, 60.0
"""Timeouts of a tracker at the beginning and at the end of a run."""
LOCAL_STORE = ("sqlalchemy", "alembic")
"""Packages for MLflow's local database."""
LONGEST = 300
Status = Literal["finished", "interrupted", "failed"]
COLUMNS = ["step", "prompt", "completion", "reward", "advantage"]
Row = tuple[int, str, str, float, float]
"""Values of these columns, for a table of completions."""


class TrackerFailure(Exception):
    """A tracker's library failed; its error is the cause."""


def attempt(job: Callable[[], None]) -> None:
    """Call the library.  Raises TrackerFailure for every exception."""
    try:
        job()
    except TrackerFailure:
        raise
    except BaseException as error:  # SystemExit would end the thread
        said = " ".join(str(error).split())
        raise TrackerFailure(f"{type(error).__name__}: {said}"[:LONGEST]) from error


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker gets to know about a run when it opens."""

    folder: Path
    config: Mapping[str, Any]
    options: TrackerOptions
    known_as: str
    """The run's name in the tracker before a resume; empty for a new run."""
    step: int

    @property
    def name(self) -> str:
        return self.options.name or self.folder.name


class TrackerService(Protocol):
    """One service, for one run; all calls come from one thread.

    `open` starts a run or continues a known one; it returns the run's name in the tracker, or an empty text.  `tell`
    sends the numbers of a step by their names in docs/metrics.md, `show` some of its completions.  A run that did not
    finish has an empty summary.
    """

    def open(self, run: TrackedRun) -> str: ...
    def tell(self, step: int, numbers: Mapping[str, float]) -> None: ...
    def show(self, rows: Sequence[Row]) -> None: ...
    def close(self, summary: Mapping[str, Any], status: Status) -> None: ...


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def open(self, run: TrackedRun) -> str:
        """Steps repeated after a resume replace the earlier ones."""
        self.writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter(
            log_dir=str(run.folder / "tensorboard"), purge_step=run.step + 1 if run.step else None
        )
        if not run.known_as:
            self.writer.add_text("config", as_code(json.dumps(run.config, indent=2)), 0)
        return "tensorboard"

    def tell(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def show(self, rows: Sequence[Row]) -> None:
        for place, (step, prompt, completion, reward, advantage) in enumerate(rows):
            text = f"reward {reward:.4g}, advantage {advantage:.4g}\n\n{as_code(prompt)}\n\n{as_code(completion)}"
            self.writer.add_text(f"completions/{place}", text, step)

    def close(self, summary: Mapping[str, Any], status: Status) -> None:
        if summary:
            self.writer.add_text("summary", as_code(json.dumps(summary, indent=2)), 0)
        self.writer.close()


class WeightsAndBiases:
    """A run of W&B, with files in RUN/wandb.  Its axis is our step, since a resumed run may repeat steps."""

    def open(self, run: TrackedRun) -> str:
        """W&B's settings decide where and whether it sends (WANDB_MODE, `wandb login`), unless `offline` is set."""
        wandb: Any = importlib.import_module("wandb")
        mode = "offline" if run.options.offline else os.environ.get("WANDB_MODE", "online")
        if mode == "online" and wandb.api.api_key is None:  # it would ask at the terminal
            raise TrackerFailure("API key is missing: run `wandb login`, or set tracker.offline: true")
        self.table = wandb.Table
        self.run: Any = wandb.init(
            project=run.options.project,
            name=run.name,
            dir=str(run.folder),
            config=dict(run.config),
            id=run.known_as or None,
            resume="allow",
            mode=mode,
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        return str(self.run.id)

    def tell(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log({"step": step, **numbers})

    def show(self, rows: Sequence[Row]) -> None:
        self.run.log({"step": rows[0][0], "completions": self.table(columns=COLUMNS, data=[list(row) for row in rows])})

    def close(self, summary: Mapping[str, Any], status: Status) -> None:
        self.run.summary.update(dict(flat(summary)))
        self.run.finish(exit_code=1 if status == "failed" else 0)


class MlFlow:
    """A run of an MLflow experiment: at MLFLOW_TRACKING_URI, or local."""

    def open(self, run: TrackedRun) -> str:
        entities: Any = importlib.import_module("mlflow.entities")
        tracking: Any = importlib.import_module("mlflow.tracking")
        local = f"sqlite:///{run.folder.parent / 'mlflow.db'}"
        self.client: Any = tracking.MlflowClient(tracking_uri=local if run.options.offline else None)
        self.metric = entities.Metric
        if run.known_as:
            self.id = run.known_as
            self.client.update_run(self.id, status="RUNNING")
            return self.id
        experiment = self.client.get_experiment_by_name(run.options.project)
        where = experiment.experiment_id if experiment else self.client.create_experiment(run.options.project)
        self.id = str(self.client.create_run(where, run_name=run.name).info.run_id)
        options = [entities.Param(allowed(name), str(value)[:500]) for name, value in flat(run.config)]
        for first in range(0, len(options), 100):  # at most so many in one call
            self.client.log_batch(self.id, params=options[first : first + 100])
        return self.id

    def tell(self, step: int, numbers: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        told = [self.metric(allowed(name), value, now, step) for name, value in numbers.items()]
        self.client.log_batch(self.id, metrics=told)

    def show(self, rows: Sequence[Row]) -> None:
        content = {"columns": COLUMNS, "data": [list(row) for row in rows]}
        self.client.log_dict(self.id, content, f"completions/step-{rows[0][0]:06d}.json")

    def close(self, summary: Mapping[str, Any], status: Status) -> None:
        if summary:
            self.client.log_dict(self.id, dict(summary), "summary.json")
        statuses = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
        self.client.set_terminated(self.id, status=statuses[status])


class Trackio:
    """A run of a Trackio project, in its own folder on this machine (TRACKIO_DIR)."""

    def open(self, run: TrackedRun) -> str:
        trackio: Any = importlib.import_module("trackio")
        self.table = trackio.Table
        name = run.known_as or f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}"  # runs are found by their names
        resume = "must" if run.known_as else "never"
        self.run: Any = trackio.init(
            project=run.options.project, name=name, config=dict(flat(run.config)), resume=resume, embed=False
        )
        return str(self.run.name)

    def tell(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log(dict(numbers), step=step)

    def show(self, rows: Sequence[Row]) -> None:
        self.run.log({"completions": self.table(columns=COLUMNS, data=[list(row) for row in rows])}, step=rows[0][0])

    def close(self, summary: Mapping[str, Any], status: Status) -> None:
        self.run.finish()


def flat(content: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def as_code(text: str) -> str:
    """A text that Markdown shows unchanged."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def allowed(name: str) -> str:
    """A name that MLflow accepts: letters, digits, _ - . / : and spaces."""
    return re.sub(r"[^\w\-. :/]", "_", name)


SERVICES: Mapping[TrackerName, tuple[Callable[[], TrackerService], str, str]] = {
    "tensorboard": (TensorBoard, "tensorboard", "tensorboard"),
    "wandb": (WeightsAndBiases, "wandb", "wandb"),
    "mlflow": (MlFlow, "mlflow", "mlflow-skinny"),
    "trackio": (Trackio, "trackio", "trackio"),
}
"""Trackers by their name in recipes, each with the module and the package that it needs."""


def require_trackers(names: Sequence[TrackerName], options: TrackerOptions) -> None:
    """Reject a tracker whose library is missing."""
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
    """Whether it can be imported; a mere folder of that name, such as W&B creates, does not count."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None


class Tracker(Watcher):
    """Sends the lines of metrics.jsonl to one tracker, from a thread; the program may end without waiting for it."""

    def __init__(self, name: TrackerName, run: TrackedRun, note: Callable[[str], None]) -> None:
        """`note` prints a line."""
        self.name, self.run, self.note = name, run, note
        self.service = SERVICES[name][0]()
        self._jobs: SimpleQueue[tuple[Future[None], Callable[[], None]]] = SimpleQueue()
        Thread(target=self._work, name=f"tracker {name}", daemon=True).start()
        self.found_by = ""
        self._file = run.folder / METRICS
        self._position = self._file.stat().st_size if run.known_as else 0
        """Number of bytes sent.  Only its thread changes it."""
        self._last: Future[None] | None = None
        self._warned = self._ended = False

    def open(self) -> None:
        def opened() -> None:
            self.found_by = self.service.open(self.run)

        try:
            self._submit(opened).result(OPEN_SECONDS)
        except (TrackerFailure, StillWorking) as failure:
            said = str(failure) or f"no answer within {OPEN_SECONDS:g} s"
            raise RunError(
                f"run.report_to: {self.name} failed to start: {said}.  Leave it out, or set tracker.offline: true"
                " (--tracker.offline), so that W&B and MLflow do not need a network."
            ) from failure

    def on_step(self, report: StepReport) -> None:
        """Send the new lines in the background, unless earlier ones are still being sent."""
        self._look()
        if self._last is None or self._last.done():
            rows = tuple(islice(completion_rows(report), self.run.options.completions))
            self._last = self._submit(lambda: self._send(rows))

    def on_end(self, report: EndReport) -> None:
        self._end("interrupted" if report.interrupted else "finished", report.summary)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._ended:
            self._end("failed", {})

    def _submit(self, job: Callable[[], None]) -> Future[None]:
        """Queue a job; its exception is a TrackerFailure."""
        future: Future[None] = Future()
        self._jobs.put((future, job))
        return future

    def _work(self) -> None:
        while True:
            future, job = self._jobs.get()
            try:
                attempt(job)
                future.set_result(None)
            except TrackerFailure as failure:
                future.set_exception(failure)

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
        last = None if self._warned else self._last
        if last is not None and last.done() and (failure := last.exception()) is not None:
            self._warned = True
            says = f"The run continues; {METRICS} has everything, and later steps resend what is missing."
            self.note(f"Tracker {self.name} failed: {failure}.  {says}")

    def _end(self, status: Status, summary: Mapping[str, Any]) -> None:
        self._ended = True
        self._look()
        for each in [self._submit(self._send), self._submit(lambda: self.service.close(summary, status))]:
            try:
                each.result(END_SECONDS)
            except (TrackerFailure, StillWorking) as failure:
                said = str(failure) or f"no answer within {END_SECONDS:g} s"
                self.note(
                    f"Tracker {self.name} did not receive the end of the run: {said}.  {self._file} has everything."
                )
                return


def completion_rows(report: StepReport) -> Iterator[Row]:
    if report.grades is None or report.advantages is None:
        return
    rewards, advantages = report.grades.rewards.tolist(), report.advantages.tolist()
    for group, of_group, credits in zip(report.groups, rewards, advantages, strict=True):
        for rollout, reward, advantage in zip(group.rollouts, of_group, credits, strict=True):
            yield report.step, group.prompt.text, rollout.text, reward, advantage


class Trackers(Watcher):
    """The trackers that a recipe names; `note` prints a line."""

    def __init__(self, folder: Folder, config: TrainingConfig, note: Callable[[str], None]) -> None:
        self.folder, self.config, self.note = folder, config, note
        self.opened: list[Tracker] = []

    def open(self, step: int) -> ExitStack:
        """Open all trackers after `step` steps; leaving the returned stack closes those that are still open."""
        file, known, config = self.folder.path / TRACKERS, dict[str, str](), plain(asdict(self.config))
        try:
            known = json.loads(file.read_bytes()) if file.exists() else known
        except ValueError as error:
            raise RunError(f"{file}: damaged: not JSON.  Delete it to start new runs in the trackers.") from error
        run = TrackedRun(folder=file.parent, config=config, options=self.config.tracker, known_as="", step=step)
        with ExitStack() as begun:
            for name in self.config.run.report_to:
                tracker = Tracker(name, replace(run, known_as=known.get(name, "")), self.note)
                self.opened.append(begun.enter_context(tracker))
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
