"""What holds a run together, whichever loop it is of: folder, resume and cut, clock, checkpoints, signals, watchers.

with Harness(folder, trained, options) as harness:
    harness.resume(threads)               where the run goes on from a checkpoint
    harness.start(plan)
    for step in harness.steps():
        ...                               the step's work, its stages timed by harness.clock
        harness.record(StepReport(...))
    harness.end(summary, lines)
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Protocol, Self

from posttrain.errors import RunError
from posttrain.options.training import CheckpointOptions, RunOptions
from posttrain.runs import checkpoint
from posttrain.runs.checkpoint import Checkpoint
from posttrain.runs.clock import Clock
from posttrain.runs.interruption import Interruption, interruptible
from posttrain.runs.progress import Progress
from posttrain.runs.reports import CheckpointReport, EndReport, EvaluationReport, Metrics, StepReport
from posttrain.runs.run_folder import RunFolder
from posttrain.runs.tensor_state import Tensors
from posttrain.runs.threads import ThreadClaim
from posttrain.runs.watchers import (
    Alarms,
    CheckpointWriter,
    MetricsJournal,
    OwnWatcher,
    RolloutFiles,
    StepDisplay,
    StepTimes,
    Watcher,
)


class TrainedState(Protocol):
    """What is trained, as far as checkpoints ask."""

    @property
    def step(self) -> int:
        """Steps finished."""
        ...

    def tensors(self) -> Mapping[str, Tensors]:
        """All tensors that the next step reads, by the name of their file."""
        ...

    def state(self) -> Mapping[str, object]:
        """Whatever else it reads, as plain data."""
        ...

    def restore(self, saved: Checkpoint) -> None:
        """Be as the checkpoint was."""
        ...

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        """Count the time of a step, by stage."""
        ...


def no_score(metrics: Metrics) -> float | None:
    """No checkpoint is better than another."""
    return None


@dataclass(frozen=True, kw_only=True)
class HarnessOptions:
    """What a recipe says of every run."""

    run: RunOptions
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    time_by_stage: bool = True
    """Whether metrics tell the seconds of each stage."""
    watchers: Sequence[Watcher] = ()
    """A user's own, who see each step before its metrics are written and shown, and before it is saved."""
    guards: Sequence[Watcher] = ()
    """Those of the loop itself, which may end the run after a step that is in the journal and before it is saved."""
    score: Callable[[Metrics], float | None] = no_score
    """What of a step's metrics tells the best checkpoint: higher is better, None says nothing."""
    stop_early: Callable[[], bool] = bool
    """Whether the run has gone on for long enough although there are steps left."""


class Harness:
    """One run, from its folder to its end.  A context manager: leaving it gives folder, signals and terminal back."""

    def __init__(self, folder: RunFolder, trained: TrainedState, options: HarnessOptions) -> None:
        self.folder, self.trained, self.options = folder, trained, options
        self.clock = Clock()
        """Of the step that is going on."""
        self.step = 0
        """The one that is going on, or was last."""
        self.interruption = Interruption()
        self.progress = Progress(options.run.num_steps)
        self.watchers: list[Watcher] = list(options.watchers)
        limit = options.run.time_limit_minutes
        self.time_limit_seconds = None if limit is None else 60 * limit
        self._deadline = None if limit is None else time.monotonic() + 60 * limit
        self.stopping = False
        """Whether the run ends after the step that is going on."""
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(self.folder)
        self.interruption = self._open.enter_context(interruptible())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def resume(self, threads: ThreadClaim) -> list[str]:
        """Be as the last checkpoint was, with what was written after it cut away; returns what to tell of it."""
        saved = checkpoint.load_latest(self.folder.checkpoints)
        if saved is None:
            self.folder.cut_after(-1)
            return ["No checkpoint yet: the run starts again."]
        notes = checkpoint.restore_threads(saved, threads)
        self.trained.restore(saved)
        self.folder.cut_after(saved.step)
        finished = saved.step >= self.options.run.num_steps
        left = "  That was the last one: the run is only measured again." if finished else ""
        return [f"Resumed after step {saved.step}.{left}", *notes]

    def start(self, plan: Sequence[str]) -> None:
        """Show the plan; from here on there is a display, and the built-in watchers watch."""
        self.progress = Progress(
            self.options.run.num_steps, first_step=self.trained.step + 1, time_limit_seconds=self.time_limit_seconds
        )
        self._open.enter_context(self.progress)
        self.watchers = self.watchers_in_order()
        self.progress.start(plan)

    def watchers_in_order(self) -> list[Watcher]:
        """All watchers: each adds to the metrics that the next ones see.

        Checkpoints last: a step that one could not take in is taken again by the run that is resumed, and what others
        have written of it is cut away.
        """
        own: dict[str, None] = {}
        return [
            RolloutFiles(self.folder),
            Alarms(self.folder, self.progress),
            *(OwnWatcher(each, own) for each in self.options.watchers),
            StepTimes(self.trained.add_seconds, by_stage=self.options.time_by_stage),
            MetricsJournal(self.folder),
            StepDisplay(self.progress, own),
            *self.options.guards,
            self.checkpoint_writer(),
        ]

    def checkpoint_writer(self) -> CheckpointWriter:
        """Who saves a step once all others have seen it."""
        return CheckpointWriter(
            self.options.checkpoint,
            last_step=self.options.run.num_steps,
            stopping=self.decide_to_stop,
            save=lambda report: self.save(score=self.options.score(report.metrics)),
        )

    def steps(self) -> Iterator[int]:
        """The numbers of the steps that are left: until the last, the time limit, an early stop or a signal."""
        self.decide_to_stop()  # already: a resumed run may have nothing left to do
        while self.trained.step < self.options.run.num_steps and not self.stopping:
            self.step = self.trained.step + 1
            yield self.step

    def decide_to_stop(self) -> bool:
        """Whether no further step is to be taken, whatever is left.

        Decided once a step, when its checkpoint is due or not: a run that ended later would end without one.
        """
        passed = self._deadline is not None and time.monotonic() >= self._deadline
        self.stopping = bool(self.interruption) or passed or self.options.stop_early()
        return self.stopping

    @contextmanager
    def naming_the_step(self) -> Iterator[None]:
        """Let an error that ends the run say in which step it happened, and what is left to go on from."""
        try:
            yield
        except RunError as error:
            saved = checkpoint.saved_steps(self.folder.checkpoints)
            left = f"\n    The last good checkpoint is {saved[max(saved)]}." if saved else ""
            raise RunError(f"step {self.step}: {error}{left}") from error

    def record(self, report: StepReport) -> None:
        """Hand a finished step to the watchers, one after the other."""
        metrics = dict(report.metrics)
        for watcher in self.watchers:
            with self.clock(watcher.stage) if watcher.stage else nullcontext():
                more = watcher.on_step(replace(report, metrics=dict(metrics), seconds=dict(self.clock.seconds)))
            metrics |= more or {}
        self.clock = Clock()

    def evaluated(self, report: EvaluationReport) -> None:
        """Hand an evaluation to the watchers."""
        for watcher in self.watchers:
            watcher.on_evaluation(report)

    def save(self, *, score: float | None = None) -> None:
        """Save all that the next step reads; on the disk when this returns."""
        keep, step = self.options.checkpoint, self.trained.step
        path = checkpoint.save(self.folder.checkpoints, step, self.trained.tensors(), self.trained.state(), score=score)
        checkpoint.prune(self.folder.checkpoints, keep_last=keep.keep_last, keep_best=int(keep.keep_best))
        for watcher in self.watchers:
            watcher.on_save(CheckpointReport(step=step, path=path))

    def end(self, summary: Mapping[str, object], lines: Sequence[str]) -> None:
        """Write the summary, if there is one, tell the watchers, and print the last lines."""
        if summary:
            self.folder.write_summary(summary)
        report = EndReport(
            step=self.trained.step, folder=self.folder.path, summary=summary, interrupted=bool(self.interruption)
        )
        for watcher in self.watchers:
            watcher.on_end(report)
        self.progress.finish(lines)
