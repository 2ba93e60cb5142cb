"""Who watches a run: journals, alarms, the display, and whatever a user adds, all in the same way."""

import math
from collections.abc import Callable, Iterable
from itertools import takewhile

from posttrain.errors import RunError, UserError
from posttrain.options.training import CheckpointOptions
from posttrain.runs.alarms import Line, alarms, transcript
from posttrain.runs.progress import Progress
from posttrain.runs.reports import CheckpointReport, EndReport, EvaluationReport, Metrics, StepReport
from posttrain.runs.run_folder import RunFolder


class Watcher:
    """Is called as a run goes on; override what you want to see.

    Watchers see a step one after the other, those of a user last.  What one raises ends the run.
    """

    stage: str | None = None
    """The stage of the step's time that `on_step` counts as, if it is one."""

    def on_step(self, report: StepReport) -> Metrics | None:
        """A step has finished.  What this returns is added to the step's metrics for the watchers after it."""
        return None

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Held-out data has been measured."""

    def on_save(self, report: CheckpointReport) -> None:
        """A checkpoint is on the disk."""

    def on_end(self, report: EndReport) -> None:
        """The run has ended, by itself or because it was interrupted; not called after an error."""


def require_watchers(candidates: Iterable[object]) -> None:
    """Raise UserError where one of a user's watchers is none."""
    for each in candidates:
        if isinstance(each, type):
            raise UserError(f"watchers: {each.__name__} is a class; give an object of it")
        if not isinstance(each, Watcher):
            raise UserError(
                f"watchers: {each!r:.60} ({type(each).__name__}) is no Watcher; inherit from posttrain.Watcher, which"
                " says what each of its methods is called for."
            )


class RolloutFiles(Watcher):
    """Writes every completion of a finished step to rollouts/."""

    stage = "save"

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def on_step(self, report: StepReport) -> None:
        """Those trained on and those set aside."""
        if report.grades is not None:
            self.folder.write_rollouts(report.step, *report.all_rollouts())


class Alarms(Watcher):
    """Tells of what looks wrong in a step, once in a while; its metric is how many alarms that were."""

    def __init__(self, folder: RunFolder, progress: Progress) -> None:
        self.folder, self.progress = folder, progress
        self.history: list[Line] | None = None
        """The lines of metrics.jsonl, that of step 0 too, which is written when watchers watch already."""
        self.raised: dict[str, int] = {}

    def on_step(self, report: StepReport) -> Metrics | None:
        """Compare the step with those before it."""
        if report.grades is None:
            return None
        if self.history is None:
            self.history, self.raised = list(self.folder.metrics()), self.folder.raised()
        numbers = {name: value if math.isfinite(value) else None for name, value in report.metrics.items()}
        self.history.append({"step": report.step, **numbers})
        found = alarms(self.history, self.raised)
        for alarm in found:
            shown = transcript(alarm, report.groups, report.grades)
            self.raised[alarm.name] = report.step
            self.folder.append_alarm(report.step, alarm.name, alarm.says, shown)
            indented = shown.replace("\n", "\n    ")
            self.progress.note(f"ALARM, step {report.step}, {alarm.name}: {alarm.says}.  For instance:\n    {indented}")
        return {"num_alarms": float(len(found))}


class UnscoredSteps(Watcher):
    """Ends a run whose completions are given no reward at all, for so many steps in a row."""

    def __init__(self, folder: RunFolder, most: int) -> None:
        """`most` steps end it; 0 lets it go on."""
        self.folder, self.most = folder, most

    def on_step(self, report: StepReport) -> None:
        """Count back from the step in metrics.jsonl, where it is the last line."""
        if not self.most or report.metrics.get("frac_unscored") != 1:
            return
        steps = list(takewhile(lambda line: line.get("frac_unscored") == 1, reversed(self.folder.metrics())))
        if len(steps) >= self.most:
            raise RunError(
                f"no completion of {len(steps)} steps in a row was given a reward, so that nothing is learned.  See"
                " what the reward functions return with `posttrain check-task FILE.py:FUNCTION --rows FILE`, mend them"
                f" and resume the run; grading.max_unscored_steps = {self.most} is how many such steps end it, 0 none."
            )


class StepTimes(Watcher):
    """Adds what the clock says of a step to its metrics, and to the time of the run."""

    def __init__(self, add_seconds: Callable[[Metrics], None], *, by_stage: bool) -> None:
        self.add_seconds, self.by_stage = add_seconds, by_stage

    def on_step(self, report: StepReport) -> Metrics:
        """Seconds in all and by stage, and tokens per second."""
        self.add_seconds(report.seconds)
        total = sum(report.seconds.values())
        stages = {f"seconds/{stage}": value for stage, value in report.seconds.items()} if self.by_stage else {}
        return {"step_time": total, "tokens_per_second": report.num_tokens / total, **stages}


class MetricsJournal(Watcher):
    """Keeps a step's metrics as a line of metrics.jsonl."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def on_step(self, report: StepReport) -> None:
        """On the disk before the next step begins."""
        self.folder.append_metrics(report.step, report.metrics)


class StepDisplay(Watcher):
    """Shows a step on the screen."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_step(self, report: StepReport) -> None:
        """The numbers that matter."""
        self.progress.step(report.step, report.metrics)


class CheckpointWriter(Watcher):
    """Saves a step where that is due: every so many steps, at the last one, and where the run stops."""

    def __init__(
        self,
        options: CheckpointOptions,
        *,
        last_step: int,
        stopping: Callable[[], bool],
        save: Callable[[StepReport], None],
    ) -> None:
        self.options, self.last_step, self.stopping, self.save = options, last_step, stopping, save

    def on_step(self, report: StepReport) -> None:
        """After everything else of the step is on the disk."""
        every = self.options.every_steps
        stops = self.stopping()
        if stops or (every and report.step % every == 0) or report.step == self.last_step:
            self.save(report)
