"""The four tracker services.  A library is loaded when it is used."""

import importlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Literal, Protocol

from posttrain.options.training import TrackerOptions

Job = Callable[[], None]
LONGEST = 300
"""Characters of a library's message that are shown."""


class TrackerFailure(Exception):
    """A tracker's library failed; its error is the cause."""


def attempt(job: Job) -> None:
    """Do it.  Raises TrackerFailure, whatever the library raises."""
    try:
        job()
    except TrackerFailure:
        raise
    except BaseException as error:  # SystemExit would end the thread
        said = " ".join(str(error).split())
        raise TrackerFailure(f"{type(error).__name__}: {said}"[:LONGEST]) from error


class TrackerThread:
    """Does jobs in order; the program may end without waiting for it."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Future[None], Job]] = SimpleQueue()
        Thread(target=self._work, name=f"tracker {name}", daemon=True).start()

    def submit(self, job: Job) -> Future[None]:
        """Queue a job; its exception is a TrackerFailure."""
        future: Future[None] = Future()
        self._jobs.put((future, job))
        return future

    def _work(self) -> None:
        while True:
            future, job = self._jobs.get()
            try:
                attempt(job)
            except TrackerFailure as failure:
                future.set_exception(failure)
            else:
                future.set_result(None)


Status = Literal["finished", "interrupted", "failed"]
COLUMNS = ["step", "prompt", "completion", "reward", "advantage"]
"""Of a table of completions; a `Row` has their values."""
Row = tuple[int, str, str, float, float]


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker knows of a run when it opens."""

    folder: Path
    config: Mapping[str, Any]
    """As plain data."""
    options: TrackerOptions
    known_as: str
    """The run's name in the tracker before a resume; empty for a new run."""
    step: int
    """Steps finished."""

    @property
    def name(self) -> str:
        return self.options.name or self.folder.name


class TrackerService(Protocol):
    """One service, for one run; all calls come from one thread."""

    def open(self, run: TrackedRun) -> str:
        """Begin a run or continue the known one; returns its name for the next time, empty if it has none."""
        ...

    def tell(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send numbers of a step, by the names of docs/metrics.md."""
        ...

    def show(self, rows: Sequence[Row]) -> None:
        """Send completions of a step."""
        ...

    def close(self, summary: Mapping[str, Any], status: Status) -> None:
        """The run has ended; the summary is empty if it did not finish."""
        ...


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def open(self, run: TrackedRun) -> str:
        """Steps that are repeated after a resume replace the earlier ones."""
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

    statuses: Mapping[Status, str] = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
    longest, most = 500, 100
    """Limits: characters of a parameter, parameters in one call."""

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
        options = [entities.Param(allowed(name), str(value)[: self.longest]) for name, value in flat(run.config)]
        for first in range(0, len(options), self.most):
            self.client.log_batch(self.id, params=options[first : first + self.most])
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
        self.client.set_terminated(self.id, status=self.statuses[status])


class Trackio:
    """A run of a Trackio project, in its own folder on this machine (TRACKIO_DIR)."""

    def open(self, run: TrackedRun) -> str:
        """Runs are found by their names: a new one gets a unique name."""
        trackio: Any = importlib.import_module("trackio")
        self.table = trackio.Table
        name = run.known_as or f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
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
    """A name that MLflow accepts: letters, digits, _ - . / : and blanks."""
    return re.sub(r"[^\w\-. :/]", "_", name)
