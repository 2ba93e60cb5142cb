"""What holds a run together, whichever loop it is of: folder, resume and cut, clock, checkpoints, signals, watchers.

with Harness(folder, trained, options) as harness:
    harness.resume(threads)               where the run goes on from a checkpoint, the last or that of a step
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

from torch.optim import Optimizer

from posttrain.config import Config, TrainingConfig
from posttrain.config.kinds import COMMAND_OF
from posttrain.errors import RunError, UserError
from posttrain.options.training import CheckpointOptions, RunOptions
from posttrain.runs import checkpoint
from posttrain.runs.checkpoint import Checkpoint
from posttrain.runs.folder import saved_recipe
from posttrain.runs.interruption import NOTHING_KEPT, Interruption, interruptible, stopped_with_a_word, what_is_kept
from posttrain.runs.manifest import empty_steps, saved_steps
from posttrain.runs.progress import Clock, Progress
from posttrain.runs.reports import BeginReport, CheckpointReport, EndReport, EvaluationReport, Metrics, StepReport
from posttrain.runs.run_folder import RunFolder
from posttrain.runs.same_recipe import require_same_recipe
from posttrain.runs.tensor_state import Tensors
from posttrain.runs.threads import ThreadClaim
from posttrain.runs.tracker import Trackers
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

    @property
    def optimizer(self) -> Optimizer:
        """What takes the steps."""
        ...

    @property
    def seconds(self) -> float:
        """What they and the evaluations have taken, in all lives of the run."""
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
    config: TrainingConfig = field(default_factory=Config)
    """The recipe: saved with each checkpoint, and what a resumed run must share with it."""
    from_step: int | None = None
    """The step whose checkpoint a resumed run goes on from; None is the last."""
    kept_from: Mapping[str, int] = field(default_factory=dict)
    """Journals, and `rollouts`, with the first step that each tells of; from there on each tells of every step."""


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
        self.trackers = Trackers(folder, options.config, lambda text: self.progress.note(text))
        self._began, self._seconds_before = time.monotonic(), 0.0
        self.stopping = False
        """Whether the run ends after the step that is going on."""
        self._recorded: StepReport | None = None
        """The step that was recorded last."""
        self._saved = -1
        """The step that was saved last."""
        self._told: set[str] = set()
        """Damage to older checkpoints."""
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(self.folder)
        self._open.enter_context(stopped_with_a_word(self.kept))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def resume(self, threads: ThreadClaim) -> list[str]:
        """Be as a checkpoint was, with what was written after it cut away; returns what to tell of it."""
        saved = self.checkpoint_to_resume()
        require_same_recipe(self.folder.path, self.options.config, saved.recipe if saved else "")
        self.require_checkpoints(saved)
        self.folder.replace_config(saved_recipe(self.options.config))
        self.folder.write_format()
        if saved is None:
            self.folder.cut_after(-1)
            return ["No checkpoint yet: the run starts again."]
        notes = checkpoint.restore_threads(saved, threads)
        self.trained.restore(saved)
        given_up = checkpoint.forget_after(self.folder.checkpoints, saved.step)
        self.folder.cut_after(saved.step)
        self._seconds_before = self.trained.seconds
        return [*self.resumed_lines(saved.step, given_up), *notes]

    def checkpoint_to_resume(self) -> Checkpoint | None:
        """The last checkpoint, or that of the step that was asked for."""
        folder, step, command = self.folder.checkpoints, self.options.from_step, self.command
        if step is not None:
            return checkpoint.load_step(folder, step, command=command)
        return checkpoint.load_latest(folder, command=command)

    def require_checkpoints(self, saved: Checkpoint | None) -> None:
        """Refuse to give up finished steps, unasked, because the checkpoints that they led to are gone."""
        if self.options.from_step is not None:
            return
        folder, finished, step = self.folder.checkpoints, self.folder.last_step(), saved.step if saved else 0
        told_at_once = self.options.kept_from.get("metrics.jsonl") == 0  # with a checkpoint before the first step
        emptied = [path for each, path in empty_steps(folder).items() if step < each <= finished]
        gone = saved is None and finished > 0 and (told_at_once or not folder.is_dir())
        if emptied or gone:
            put_back = "its files back or delete the folder" if emptied else "checkpoints back"
            raise RunError(
                f"{(emptied or [folder])[0]}: holds no checkpoint, and metrics.jsonl tells of steps up to {finished}."
                f"  Put {put_back}, or start the run anew: run.overwrite = true (--run.overwrite) in place of resuming."
            )

    def resumed_lines(self, step: int, given_up: Sequence[int]) -> Iterator[str]:
        """What to tell of a run that goes on after a step."""
        left = self.seconds_left()
        if step >= self.options.run.num_steps:
            yield f"Resumed after step {step}.  That was the last one: the run is only measured again."
        elif left is not None and left <= 0:
            yield (
                f"Resumed after step {step}.  The {self._seconds_before / 60:.1f} min so far are all of"
                f" run.time_limit_minutes = {self.options.run.time_limit_minutes:g}: the run is only measured again."
            )
        else:
            yield f"Resumed after step {step}."
        if given_up:
            yield f"Removed: the checkpoints of steps {step_ranges(given_up)}, and all else of the steps after {step}."
        for name, missing in self.folder.missing(step, self.options.kept_from).items():
            yield f"{name} lacks steps {step_ranges(missing)}, which were finished: the run goes on without them."

    @property
    def command(self) -> str:
        """The one that such a run is resumed with."""
        return COMMAND_OF[type(self.options.config)]

    def kept(self) -> str:
        """What there is to go on from."""
        return what_is_kept(self.folder.path, self.command) if self.folder.begun else NOTHING_KEPT

    def seconds_left(self) -> float | None:
        """Until the time limit, which is for all lives of the run together; None without one."""
        limit = self.options.run.time_limit_minutes
        return None if limit is None else 60 * limit - self._seconds_before - (time.monotonic() - self._began)

    def start(self, plan: Sequence[str]) -> None:
        """Show the plan and tell the user's watchers; from here on there is a display, and the built-in ones watch."""
        self.progress = Progress(
            self.options.run.num_steps, first_step=self.trained.step + 1, time_limit_seconds=self.seconds_left()
        )
        self._open.enter_context(self.progress)
        self.watchers = self.watchers_in_order()
        self.progress.start(plan)
        begun = BeginReport(step=self.trained.step, optimizer=self.trained.optimizer)
        for watcher in self.options.watchers:
            watcher.on_begin(begun)

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
            self.trackers,
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
            asked=self.asked_to_save,
            save=lambda report: self.save(score=self.options.score(report.metrics)),
        )

    def steps(self) -> Iterator[int]:
        """The numbers of the steps that are left: until the last, the time limit, an early stop or a signal.

        Only from here on does a signal wait for the end of a step.
        """
        self._open.enter_context(self.trackers.open(self.trained.step))
        self.interruption = self._open.enter_context(interruptible())
        self.decide_to_stop()  # already: a resumed run may have nothing left to do
        while self.trained.step < self.options.run.num_steps and not self.stopping:
            self.step = self.trained.step + 1
            for watcher in self.options.watchers:
                watcher.on_step_begin(self.step)
            yield self.step

    def decide_to_stop(self) -> bool:
        """Whether no further step is to be taken, whatever is left.

        Decided once a step, when its checkpoint is due or not: a run that ended later would end without one.
        """
        left = self.seconds_left()
        passed = left is not None and left <= 0
        self.stopping = bool(self.interruption) or passed or self.told_to_stop or self.options.stop_early()
        return self.stopping

    @property
    def told_to_stop(self) -> bool:
        """Whether one of the user's watchers wants no further step."""
        return any(watcher.stopping for watcher in self.options.watchers)

    def asked_to_save(self) -> bool:
        """Whether a watcher wants the step saved; asked once of each step."""
        asked = [watcher for watcher in self.options.watchers if watcher.saving]
        for watcher in asked:
            watcher.saving = False
        return bool(asked)

    @contextmanager
    def naming_the_step(self) -> Iterator[None]:
        """Let an error that ends the run say in which step it happened, and what is left to go on from."""
        try:
            yield
        except RunError as error:
            saved = saved_steps(self.folder.checkpoints)
            left = f"\n    The last good checkpoint is {saved[max(saved)]}." if saved else ""
            raise RunError(f"step {self.step}: {error}{left}") from error

    def record(self, report: StepReport) -> StepReport:
        """Hand a finished step to the watchers, one after the other; returns it with what they added."""
        metrics = dict(report.metrics)
        for watcher in self.watchers:
            with self.clock(watcher.stage) if watcher.stage else nullcontext():
                more = watcher.on_step(replace(report, metrics=dict(metrics), seconds=dict(self.clock.seconds)))
            metrics |= more or {}
        self._recorded = replace(report, metrics=metrics, seconds=dict(self.clock.seconds))
        self.clock = Clock()
        return self._recorded

    def leave(self) -> None:
        """End the run after the step that was recorded last, as a signal in that step would have: it is saved."""
        self.interruption.left = True
        if self._recorded is not None and self._saved != self._recorded.step:
            self.save(score=self.options.score(self._recorded.metrics))

    def evaluated(self, report: EvaluationReport) -> None:
        """Hand an evaluation to the watchers."""
        for watcher in self.watchers:
            watcher.on_evaluation(report)

    def save(self, *, score: float | None = None) -> None:
        """Save all that the next step reads; on the disk when this returns."""
        keep, step = self.options.checkpoint, self.trained.step
        recipe = saved_recipe(self.options.config)
        folder, tensors, state = self.folder.checkpoints, self.trained.tensors(), self.trained.state()
        path = checkpoint.save(folder, step, tensors, state, score=score, recipe=recipe)
        self._saved = step
        for wrong in checkpoint.prune(folder, keep_last=keep.keep_last, keep_best=int(keep.keep_best)):
            if wrong not in self._told:
                self._told.add(wrong)
                self.progress.note(f"step {step}: {wrong}.  The run goes on; that checkpoint is of no use.")
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


def step_ranges(steps: Sequence[int]) -> str:
    """Step numbers, those in a row by the first and the last: 1-4, 7."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][-1] + 1:
            ranges[-1][1:] = [step]
        else:
            ranges.append([step])
    return ", ".join("-".join(map(str, each)) for each in ranges)


def require_resume(from_step: int | None, *, resume: bool) -> None:
    """Refuse a step to go on from where nothing goes on."""
    if from_step is not None and not resume:
        rule = "only a run that is resumed goes on from a step"
        raise UserError(
            f"from_step = {from_step}: {rule}; call train(config, resume=True, from_step={from_step}).",
            command=f"--from-step {from_step}: {rule}; give --resume RUN as well.",
        )
