"""The frame of every training loop: folder, resume, clock, checkpoints, signals and watchers.

with Harness(folder, trained, options) as harness:
    harness.resume(threads)               only where the run resumes
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
from signal import Signals
from typing import Any, Protocol, Self

from torch.optim import Optimizer

from posttrain.config import Config, TrainingConfig
from posttrain.config.reading import COMMAND_OF
from posttrain.errors import RunError
from posttrain.options.training import CheckpointOptions, RunOptions
from posttrain.ranks.group import ONE_RANK, RankGroup
from posttrain.runs import checkpoint
from posttrain.runs.checkpoint import Checkpoint, ThreadClaim
from posttrain.runs.files import saved_steps
from posttrain.runs.folder import saved_recipe
from posttrain.runs.interruption import Interruption, interruptible, kept_of_run, stopped_with_a_word
from posttrain.runs.named_inputs import require_same_recipe
from posttrain.runs.progress import Clock, Progress
from posttrain.runs.reports import BeginReport, CheckpointReport, EndReport, EvaluationReport, Metrics, StepReport
from posttrain.runs.run_folder import RunFolder
from posttrain.runs.tensor_state import Tensors
from posttrain.runs.tracker import Trackers
from posttrain.runs.watchers import Alarms, OwnWatcher, RolloutFiles, StepCall, Watcher


class TrainedState(Protocol):
    """The trained objects that checkpoints save, after `step` steps that took `seconds` in total.

    `tensors` are what the next step reads, by file name; `state` is the rest of its state, as JSON.
    """

    @property
    def step(self) -> int: ...
    @property
    def optimizer(self) -> Optimizer: ...
    @property
    def seconds(self) -> float: ...
    def tensors(self) -> Mapping[str, Tensors]: ...
    def state(self) -> Mapping[str, object]: ...
    def restore(self, saved: Checkpoint) -> None: ...
    def add_seconds(self, seconds: Mapping[str, float]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class HarnessOptions:
    """The options of every kind of run."""

    run: RunOptions
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    time_by_stage: bool = True
    watchers: Sequence[Watcher] = ()
    """The user's watchers; they see each step before its metrics are written and shown, and before it is saved."""
    guards: Sequence[Watcher] = ()
    """The loop's watchers; they may end the run after a step is in the journal and before it is saved."""
    score: Callable[[Metrics], float | None] = lambda metrics: None
    """Rates a step's checkpoint by its metrics: higher is better, None is unknown."""
    stop_early: Callable[[], bool] = bool
    config: TrainingConfig = field(default_factory=Config)
    """The recipe, which is saved with each checkpoint and compared on resume."""
    from_step: int | None = None
    """The step whose checkpoint is resumed; None: the last."""
    ranks: RankGroup = ONE_RANK
    """The ranks of the run; this process is rank 0."""
    kept_from: Mapping[str, int] = field(default_factory=dict)
    """Journals and `rollouts` -> their first step; from that step on, each contains every step."""
    keeps_finished: bool = False
    """Whether a resumed run keeps finished steps after its checkpoint, to train on the same rollouts again."""


class Harness:
    """One run from start to end.  A context manager: leaving it releases folder, signals and terminal."""

    def __init__(self, folder: RunFolder, trained: TrainedState, options: HarnessOptions) -> None:
        self.folder, self.trained, self.options = folder, trained, options
        self.clock = Clock(self.show_stage)
        self.step = 0
        self.steps_again = range(0)
        """Finished steps after the checkpoint that a run resumes from, which are kept."""
        self.interruption = Interruption()
        self.progress = Progress(options.run.num_steps)
        self.watchers: list[Watcher] = list(options.watchers)
        self.trackers = Trackers(folder, options.config, lambda text: self.progress.note(text))
        self._began, self._seconds_before = time.monotonic(), 0.0
        self.stopping = False
        self._recorded: StepReport | None = None
        self._saved = -1
        self._reported: set[str] = set()
        """Damage to older checkpoints."""
        self._open = ExitStack()
        self._signals = ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(self.folder)
        kept = stopped_with_a_word(lambda: kept_of_run(self.folder.path if self.folder.begun else "", self.command))
        self._open.enter_context(kept)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._open.__exit__(*raised)

    def resume(self, threads: ThreadClaim) -> list[str]:
        """Restore a checkpoint and remove everything written after it; returns lines about it."""
        checkpoints, step = self.folder.checkpoints, self.options.from_step
        if step is None:
            saved = checkpoint.load_latest(checkpoints, command=self.command)
        else:
            saved = checkpoint.load_step(checkpoints, step, command=self.command)
        require_same_recipe(self.folder.path, self.options.config, saved.recipe if saved else "")
        if step is None:
            self.require_checkpoints(saved)
        self.folder.replace_config(saved_recipe(self.options.config))
        self.folder.write_format()
        if saved is None:
            self.folder.cut_after(-1)
            return ["No checkpoint yet: the run starts from the beginning."]
        notes = checkpoint.restore_threads(saved, threads, self.options.ranks)
        with self.options.ranks.leading("restore", saved.path):
            self.trained.restore(saved)
        removed = checkpoint.forget_after(checkpoints, saved.step)
        kept = self.folder.finished_after(saved.step) if self.options.keeps_finished and step is None else saved.step
        self.steps_again = range(saved.step + 1, kept + 1)
        self.folder.cut_after(kept)
        self._seconds_before = self.trained.seconds
        return [*self.resumed_lines(saved.step, removed), *notes]

    def require_checkpoints(self, saved: Checkpoint | None) -> None:
        """Raise an error instead of losing finished steps whose checkpoints are missing."""
        folder, finished, step = self.folder.checkpoints, self.folder.last_step(), saved.step if saved else 0
        saves_step_0 = self.options.kept_from.get("metrics.jsonl") == 0  # with a checkpoint before the first step
        emptied = [path for each, path in saved_steps(folder, empty=True).items() if step < each <= finished]
        gone = saved is None and finished > 0 and (saves_step_0 or not folder.is_dir())
        if emptied or gone:
            raise RunError(
                f"{(emptied or [folder])[0]}: has no checkpoint, but metrics.jsonl has steps up to {finished}."
                f"  {'Restore its files, delete it' if emptied else 'Restore the checkpoints'}, or start again"
                " with run.overwrite = true (--run.overwrite)."
            )

    def resumed_lines(self, step: int, removed: Sequence[int]) -> Iterator[str]:
        left = self.seconds_left()
        spent = ""
        if step >= self.options.run.num_steps:
            spent = "  That was the last step: only the final measurement is repeated."
        elif left is not None and left <= 0:
            limit = f"run.time_limit_minutes = {self.options.run.time_limit_minutes:g}"
            spent = f"  Its {self._seconds_before / 60:.1f} min reach {limit}: only the final measurement is repeated."
        yield f"Resumed after step {step}.{spent}"
        if removed:
            yield f"Removed: the checkpoints of steps {step_ranges(removed)}, and everything else after step {step}."
        for name, missing in self.folder.missing(step, self.options.kept_from).items():
            yield f"{name}: finished steps {step_ranges(missing)} are missing; the run continues without them."

    @property
    def command(self) -> str:
        return COMMAND_OF[type(self.options.config)]

    def seconds_left(self) -> float | None:
        """Seconds until the time limit, which counts the whole run; None without a limit."""
        limit = self.options.run.time_limit_minutes
        return None if limit is None else 60 * limit - self._seconds_before - (time.monotonic() - self._began)

    def start(self, plan: Sequence[str]) -> None:
        """Show the plan and call the user's watchers; from here on the display and the built-in watchers are active."""
        self.progress = Progress(
            self.options.run.num_steps, first_step=self.trained.step + 1, time_limit_seconds=self.seconds_left()
        )
        self._open.enter_context(self.progress)
        own: dict[str, None] = {}
        # Each adds to the metrics that the next ones see.  Checkpoints last: a step that a watcher could not record is
        # taken again by the resumed run, which first removes what the others wrote of it.
        self.watchers = [
            RolloutFiles(self.folder),
            Alarms(self.folder, self.progress),
            *(OwnWatcher(each, own) for each in self.options.watchers),
            StepCall(self.count_seconds),
            StepCall(lambda report: self.folder.append_metrics(report.step, report.metrics)),
            self.trackers,
            StepCall(lambda report: self.progress.step(report.step, report.metrics, own=own)),
            *self.options.guards,
            StepCall(self.save_if_due),
        ]
        self.progress.start(plan)
        for watcher in self.options.watchers:
            watcher.on_begin(BeginReport(step=self.trained.step, optimizer=self.trained.optimizer))

    def steps(self) -> Iterator[int]:
        """The remaining steps: until the last step, the time limit, an early stop or a signal.

        Only here, a signal waits for the end of a step; later, it ends the run immediately, with all steps saved.
        """
        self.options.ranks.begins()
        self._open.enter_context(self.trackers.open(self.trained.step))
        self._open.enter_context(self._signals)
        self.interruption = self._signals.enter_context(
            interruptible(lambda: f"the run stops after step {self.step} and saves it.")
        )
        self.decide_to_stop()  # already: a resumed run may have no steps left
        while self.trained.step < self.options.run.num_steps and not self.stopping:
            self.step = self.trained.step + 1
            for watcher in self.options.watchers:
                watcher.on_step_begin(self.step)
            yield self.step
        self._signals.close()

    def decide_to_stop(self) -> bool:
        """Whether to stop here.

        Decided once per step, together with its checkpoint: a run that ended later would end without a checkpoint.
        """
        left, told = self.seconds_left(), self.options.ranks.signal
        if told and not self.interruption:
            self.interruption.signal = Signals[told]
        passed = left is not None and left <= 0
        asked = any(watcher.stopping for watcher in self.options.watchers)
        self.stopping = bool(self.interruption) or passed or asked or self.options.stop_early()
        return self.stopping

    @contextmanager
    def naming_the_step(self) -> Iterator[None]:
        try:
            with self.options.ranks.naming_peers():
                yield
        except RunError as error:
            saved = saved_steps(self.folder.checkpoints)
            left = f"\n    The last good checkpoint is {saved[max(saved)]}." if saved else ""
            raise RunError(f"step {self.step}: {error}{left}") from error

    def record(self, report: StepReport) -> StepReport:
        """Pass a finished step to each watcher in turn; returns it with the metrics that they added."""
        metrics = dict(report.metrics)
        for watcher in self.watchers:
            with self.clock(watcher.stage) if watcher.stage else nullcontext():
                more = watcher.on_step(replace(report, metrics=dict(metrics), seconds=dict(self.clock.seconds)))
            metrics |= more or {}
        self._recorded = replace(report, metrics=metrics, seconds=dict(self.clock.seconds))
        self.clock = Clock(self.show_stage)
        return self._recorded

    def show_stage(self, name: str) -> None:
        self.progress.show_stage(name)

    def count_seconds(self, report: StepReport) -> Metrics:
        """The time of a step as metrics; it is added to the run's time."""
        self.trained.add_seconds(report.seconds)
        total, by_stage = sum(report.seconds.values()), report.seconds if self.options.time_by_stage else {}
        stages = {f"seconds/{stage}": value for stage, value in by_stage.items()}
        return {"step_time": total, "tokens_per_second": report.num_tokens / total, **stages}

    def save_if_due(self, report: StepReport) -> None:
        """Save every few steps, at the last step, when the run stops, and when a watcher asks for it."""
        every, stops = self.options.checkpoint.every_steps, self.decide_to_stop()
        asking = [watcher for watcher in self.options.watchers if watcher.saving]
        for watcher in asking:
            watcher.saving = False
        if stops or asking or (every and report.step % every == 0) or report.step == self.options.run.num_steps:
            self.save(score=self.options.score(report.metrics))

    def leave(self) -> None:
        """End the run after the last recorded step and save it, as after a signal."""
        self.interruption.left = True
        if self._recorded is not None and self._saved != self._recorded.step:
            self.save(score=self.options.score(self._recorded.metrics))

    def evaluated(self, report: EvaluationReport) -> None:
        for watcher in self.watchers:
            watcher.on_evaluation(report)

    def save(self, *, score: float | None = None) -> None:
        """Save everything that the next step reads; it is on disk when this returns."""
        keep, step = self.options.checkpoint, self.trained.step
        recipe = saved_recipe(self.options.config)
        folder, state = self.folder.checkpoints, self.trained.state()
        parts, ranks = self.trained.tensors(), self.options.ranks
        tensors = parts if ranks.size == 1 else checkpoint.RankTensors(parts, ranks)
        path = checkpoint.save(folder, step, tensors, state, score=score, recipe=recipe)
        self._saved = step
        for wrong in checkpoint.prune(folder, keep_last=keep.keep_last, keep_best=int(keep.keep_best)):
            if wrong not in self._reported:
                self._reported.add(wrong)
                self.progress.note(f"step {step}: {wrong}.  The run continues without that checkpoint.")
        for watcher in self.watchers:
            watcher.on_save(CheckpointReport(step=step, path=path))

    def end(self, summary: Mapping[str, object], lines: Sequence[str]) -> None:
        if summary:
            self.folder.write_summary(summary)
        report = EndReport(
            step=self.trained.step, folder=self.folder.path, summary=summary, interrupted=bool(self.interruption)
        )
        for watcher in self.watchers:
            watcher.on_end(report)
        self.progress.finish(lines)


def step_ranges(steps: Sequence[int]) -> str:
    """Step numbers, consecutive ones as a range: 1-4, 7."""
    first = [step for step in steps if step - 1 not in steps]
    last = [step for step in steps if step + 1 not in steps]
    return ", ".join(f"{low}-{high}" if low < high else f"{low}" for low, high in zip(first, last, strict=True))
