"""The four trackers: how each is opened, told numbers and texts, and closed.  A library is loaded when it is used."""

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

from posttrain.options.tracker import TrackerOptions

Job = Callable[[], None]
LONGEST = 300
"""Characters of what a library says that are told."""


class TrackerFailure(Exception):
    """A tracker's library raised an error, which is the cause."""


def attempt(job: Job) -> None:
    """Do it.  Raises TrackerFailure, whatever the library raises."""
    try:
        job()
    except TrackerFailure:
        raise
    except BaseException as error:  # one that leaves, by SystemExit, would take its thread along
        said = " ".join(str(error).split())
        raise TrackerFailure(f"{type(error).__name__}: {said}"[:LONGEST]) from error


class TrackerThread:
    """Does what it is given one after the other; the program may end without waiting for it."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Future[None], Job]] = SimpleQueue()
        Thread(target=self._work, name=f"tracker {name}", daemon=True).start()

    def submit(self, job: Job) -> Future[None]:
        """Have it done after what was given before; its exception is a TrackerFailure."""
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
"""Of a table of completions."""
Row = tuple[int, str, str, float, float]


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker is told of a run when it begins."""

    folder: Path
    config: Mapping[str, Any]
    """As plain data."""
    options: TrackerOptions
    known_as: str
    """What the tracker called the run in an earlier life of it; empty where it is new there."""
    step: int
    """Steps finished."""

    @property
    def name(self) -> str:
        """What people call it."""
        return self.options.name or self.folder.name


class TrackerService(Protocol):
    """One service, for one run; all calls come from one thread."""

    def open(self, run: TrackedRun) -> str:
        """Begin, or go on with the run that is known there; returns what finds it again, empty if nothing does."""
        ...

    def tell(self, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers of a step, by the names of docs/metrics.md."""
        ...

    def show(self, rows: Sequence[Row]) -> None:
        """Some completions of a step."""
        ...

    def close(self, summary: Mapping[str, Any], status: Status) -> None:
        """The run has ended; the summary is empty where it did not come to its end."""
        ...


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def open(self, run: TrackedRun) -> str:
        """Steps that are taken again after a resume take the place of what was written of them."""
        self.writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter(
            log_dir=str(run.folder / "tensorboard"), purge_step=run.step + 1 if run.step else None
        )
        if not run.known_as:
            self.writer.add_text("config", as_code(json.dumps(run.config, indent=2)), 0)
        return "tensorboard"

    def tell(self, step: int, numbers: Mapping[str, float]) -> None:
        """On the disk when this returns."""
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def show(self, rows: Sequence[Row]) -> None:
        """A text for each."""
        for place, (step, prompt, completion, reward, advantage) in enumerate(rows):
            text = f"reward {reward:.4g}, advantage {advantage:.4g}\n\n{as_code(prompt)}\n\n{as_code(completion)}"
            self.writer.add_text(f"completions/{place}", text, step)

    def close(self, summary: Mapping[str, Any], status: Status) -> None:
        """The summary as a text."""
        if summary:
            self.writer.add_text("summary", as_code(json.dumps(summary, indent=2)), 0)
        self.writer.close()


class WeightsAndBiases:
    """A run of W&B, whose files are in RUN/wandb.  Its axis is our step: a resumed run may take steps again."""

    def open(self, run: TrackedRun) -> str:
        """Where and whether it is sent is W&B's own affair (WANDB_MODE, `wandb login`), unless `offline` says no."""
        wandb: Any = importlib.import_module("wandb")
        mode = "offline" if run.options.offline else os.environ.get("WANDB_MODE", "online")
        if mode == "online" and wandb.api.api_key is None:  # it would ask at the terminal, and wait
            raise TrackerFailure("there is no API key: `wandb login`, or set tracker.offline: true")
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
        """W&B sends it when it can."""
        self.run.log({"step": step, **numbers})

    def show(self, rows: Sequence[Row]) -> None:
        """A table for each step."""
        self.run.log({"step": rows[0][0], "completions": self.table(columns=COLUMNS, data=[list(row) for row in rows])})

    def close(self, summary: Mapping[str, Any], status: Status) -> None:
        """Numbers of the summary by their dotted names."""
        self.run.summary.update(dict(flat(summary)))
        self.run.finish(exit_code=1 if status == "failed" else 0)


class MlFlow:
    """A run of an MLflow experiment: at MLFLOW_TRACKING_URI, or local."""

    statuses: Mapping[Status, str] = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
    longest, most = 500, 100
    """Characters of a parameter that every store takes, and parameters in one call."""

    def open(self, run: TrackedRun) -> str:
        """Options are parameters, by their dotted names."""
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
        """One call for all numbers of a step."""
        now = int(1000 * time.time())
        told = [self.metric(allowed(name), value, now, step) for name, value in numbers.items()]
        self.client.log_batch(self.id, metrics=told)

    def show(self, rows: Sequence[Row]) -> None:
        """A file for each step."""
        content = {"columns": COLUMNS, "data": [list(row) for row in rows]}
        self.client.log_dict(self.id, content, f"completions/step-{rows[0][0]:06d}.json")

    def close(self, summary: Mapping[str, Any], status: Status) -> None:
        """The summary is a file of the run."""
        if summary:
            self.client.log_dict(self.id, dict(summary), "summary.json")
        self.client.set_terminated(self.id, status=self.statuses[status])


class Trackio:
    """A run of a Trackio project, in its own folder on this machine (TRACKIO_DIR)."""

    def open(self, run: TrackedRun) -> str:
        """Runs are found again by their names: a new one gets a name that no other has."""
        trackio: Any = importlib.import_module("trackio")
        self.table = trackio.Table
        name = run.known_as or f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        resume = "must" if run.known_as else "never"
        self.run: Any = trackio.init(
            project=run.options.project, name=name, config=dict(flat(run.config)), resume=resume, embed=False
        )
        return str(self.run.name)

    def tell(self, step: int, numbers: Mapping[str, float]) -> None:
        """Written to its data base by a thread of its own."""
        self.run.log(dict(numbers), step=step)

    def show(self, rows: Sequence[Row]) -> None:
        """A table for each step."""
        self.run.log({"completions": self.table(columns=COLUMNS, data=[list(row) for row in rows])}, step=rows[0][0])

    def close(self, summary: Mapping[str, Any], status: Status) -> None:
        """What the last line of metrics.jsonl says of the end is there already."""
        self.run.finish()


def flat(content: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """What nested mappings hold, by dotted names."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def as_code(text: str) -> str:
    """A text that Markdown shows as it stands."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def allowed(name: str) -> str:
    """A name that MLflow takes: letters, digits, _ - . / : and blanks."""
    return re.sub(r"[^\w\-. :/]", "_", name)
