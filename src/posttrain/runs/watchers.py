"""Who watches a run: journals, alarms, the display, what ends a run that learns nothing, and a user's watchers."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import takewhile

from posttrain.errors import RunError, UserError
from posttrain.options.training import CheckpointOptions
from posttrain.runs.alarms import GAP, Line, alarms, is_notice, judged_gap, same_reward, transcript
from posttrain.runs.progress import Progress
from posttrain.runs.reports import (
    BeginReport,
    CheckpointReport,
    EndReport,
    EvaluationReport,
    Metrics,
    StepReport,
    as_number,
)
from posttrain.runs.run_folder import RunFolder


class Watcher:
    """Is called as a run goes on; override what you want to see.

    Watchers see a step one after the other: those of a user before the metrics are written and shown, and before the
    step is saved.  What one raises ends the run.
    """

    stage: str | None = None
    """The stage of the step's time that `on_step` counts as, if it is one; a user's counts as `watchers` else."""
    stopping: bool = False
    """Set it to True and the run ends after the step that is going on, as it would after the last."""
    saving: bool = False
    """Set it to True in `on_step` and that step is saved, whatever checkpoint.every_steps says."""

    def on_begin(self, report: BeginReport) -> None:
        """Training is about to begin, or to continue from a checkpoint."""

    def on_step_begin(self, step: int) -> None:
        """A step is about to be taken."""

    def on_step(self, report: StepReport) -> Metrics | None:
        """A step has finished.  What this returns is added to its metrics: numbers by names that are not taken."""
        return None

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Held-out data has been measured."""

    def on_save(self, report: CheckpointReport) -> None:
        """A checkpoint is on the disk."""

    def on_end(self, report: EndReport) -> None:
        """The run has ended, by itself or because it was interrupted; not called after an error."""


def require_watchers(candidates: object) -> tuple[Watcher, ...]:
    """A user's watchers; UserError where they are no list of such."""
    if not isinstance(candidates, Iterable):
        raise UserError(f"watchers: {candidates!r:.60} ({type(candidates).__name__}) should be a list of watchers")
    watchers = tuple(candidates)
    for each in watchers:
        if isinstance(each, type):
            raise UserError(f"watchers: {each.__name__} is a class; give an object of it")
        if not isinstance(each, Watcher):
            raise UserError(
                f"watchers: {each!r:.60} ({type(each).__name__}) is no Watcher; inherit from posttrain.Watcher, which"
                " says what each of its methods is called for."
            )
    return watchers


OURS = frozenset({"step", "step_time", "tokens_per_second", "num_non_finite"})
"""Metrics that a step gets after a user's watchers have seen it."""
OUR_GROUPS = ("eval", "seconds", "logged")
"""What comes before the / in metrics that some steps have and others do not."""


class OwnWatcher(Watcher):
    """One of a user's watchers, with a look at what it returns."""

    def __init__(self, watcher: Watcher, own: dict[str, None]) -> None:
        """`own` is given the name of each metric that it brings."""
        self.watcher, self.own = watcher, own
        self.stage = watcher.stage or "watchers"
        self.name = type(watcher).__name__

    def on_step(self, report: StepReport) -> Metrics:
        """What it returns, as finite or other numbers under names of its own."""
        returned = self.watcher.on_step(report)
        if returned is None:
            return {}
        if not isinstance(returned, Mapping):
            raise RunError(
                f"watcher {self.name}: on_step returned {returned!r:.60} ({type(returned).__name__}); return None, or a"
                ' mapping of metrics to numbers such as {"my/metric": 0.5}.'
            )
        return {self.own_name(name, report): self.number(name, value) for name, value in returned.items()}

    def own_name(self, name: object, report: StepReport) -> str:
        """The name of a metric, which no other of the run has."""
        if not isinstance(name, str) or not name:
            raise RunError(f"watcher {self.name}: on_step returned a metric called {name!r:.60}; its name is a text.")
        if name in OURS or name in report.metrics or name.partition("/")[0] in OUR_GROUPS:
            raise RunError(
                f"watcher {self.name}: on_step returned `{name}`, a name that the metrics of a run have already; choose"
                f" another, such as own/{name.replace('/', '_')}."
            )
        self.own[name] = None
        return name

    def number(self, name: object, value: object) -> float:
        """A metric's value."""
        number = as_number(value)
        if number is None:
            raise RunError(
                f"watcher {self.name}: on_step returned {name} = {value!r:.60} ({type(value).__name__}), which is no"
                " number."
            )
        return number

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Passed on."""
        self.watcher.on_evaluation(report)

    def on_save(self, report: CheckpointReport) -> None:
        """Passed on."""
        self.watcher.on_save(report)

    def on_end(self, report: EndReport) -> None:
        """Passed on."""
        self.watcher.on_end(report)


class RolloutFiles(Watcher):
    """Writes every completion with its scores: of a finished step to rollouts/, of an evaluation to evaluations/."""

    stage = "save"

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def on_step(self, report: StepReport) -> None:
        """Those trained on and those set aside; and what each update computed for their tokens, if it was kept."""
        if report.grades is not None:
            self.folder.write_rollouts(report.step, *report.all_rollouts(), token_columns=report.token_columns())
        if report.updates:
            self.folder.write_token_columns(report.step, report.updates)

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Those of held-out prompts, where there are any."""
        if report.completions:
            self.folder.write_evaluation(report.step, report.evaluation, report.completions)


class Alarms(Watcher):
    """Tells of what looks wrong in a step, once in a while; its metric is how many alarms that were."""

    def __init__(self, folder: RunFolder, progress: Progress) -> None:
        self.folder, self.progress = folder, progress
        self.history: list[Line] | None = None
        """The lines of metrics.jsonl that tell of completions, that of step 0 too, which is written when watchers watch
        already."""
        self.raised: dict[str, int] = {}

    def on_step(self, report: StepReport) -> Metrics | None:
        """Compare the step with those before it."""
        if report.grades is None:
            return None
        if self.history is None:
            told = (line for line in self.folder.metrics() if line["step"] == 0 or "tokens/completion" in line)
            self.history, self.raised = [*told], self.folder.raised()
        numbers = {name: value if math.isfinite(value) else None for name, value in report.metrics.items()}
        self.history.append({"step": report.step, **numbers})
        count = 0
        for alarm in alarms(self.history, self.raised):
            shown, notice = transcript(alarm, report.groups, report.grades), is_notice(alarm, report.grades)
            self.raised[alarm.name] = report.step
            self.folder.append_alarm(report.step, alarm.name, alarm.says, shown, notice=notice)
            indented = shown.replace("\n", "\n    ")
            head = f"{'Notice' if notice else 'ALARM'}, step {report.step}, {alarm.name}: {alarm.says}"
            paid = ", and it is what the reward pays" if notice else ""
            self.progress.note(f"{head}{paid}.  For instance:\n    {indented}")
            count += not notice
        return {"num_alarms": float(count)}


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

    def __init__(self, progress: Progress, own: Collection[str] = ()) -> None:
        """`own` are the metrics that a user's watchers have brought so far."""
        self.progress, self.own = progress, own

    def on_step(self, report: StepReport) -> None:
        """The numbers that matter, and those that a user added."""
        self.progress.step(report.step, report.metrics, own=self.own)


class CheckpointWriter(Watcher):
    """Saves a step where that is due: every so many steps, at the last one, and where the run stops."""

    def __init__(
        self,
        options: CheckpointOptions,
        *,
        last_step: int,
        stopping: Callable[[], bool],
        asked: Callable[[], bool],
        save: Callable[[StepReport], None],
    ) -> None:
        """`stopping` says whether the run ends with the step, and `asked` whether a watcher wants it saved."""
        self.options, self.last_step, self.decide_to_stop, self.save = options, last_step, stopping, save
        self.asked = asked

    def on_step(self, report: StepReport) -> None:
        """After everything else of the step is on the disk."""
        every = self.options.every_steps
        stops, asked = self.decide_to_stop(), self.asked()
        if stops or asked or (every and report.step % every == 0) or report.step == self.last_step:
            self.save(report)


STEPS_APART = 3
"""Steps in a row beyond the limit that end a run."""


class SamplerGuard(Watcher):
    """Ends a run whose sampler and trainer have disagreed for too long: what it trains on is not what it sampled."""

    def __init__(self) -> None:
        self.steps_apart = 0
        """In a row; the steps before a resume are not counted."""

    def on_step(self, report: StepReport) -> None:
        """One step apart may be chance, and is an alarm."""
        if report.metrics.get(GAP) is None:  # nothing was trained on
            return
        name, gap, limit = judged_gap(report.metrics) or (GAP, 0.0, math.inf)
        self.steps_apart = self.steps_apart + 1 if gap > limit else 0
        if self.steps_apart >= STEPS_APART:
            raise RunError(
                f"for {STEPS_APART} steps in a row the sampler's log-probs and the trainer's differ by more than"
                f" {limit:g} nats under the same weights, now by {gap:.2g} ({name}): the update learns from ratios that"
                " mean nothing.  Set model.dtype to float32, or take another model.  An engine of your own must give"
                " log-probs after the temperature and before any cut, of the weights that were loaded last."
            )


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
                " and resume the run, accepting that they have changed (--accept-changes, in Python"
                " train(config, resume=True, accept_changes=True));"
                f" grading.max_unscored_steps = {self.most} is how many such steps end it, 0 none."
            )


class SameReward(Watcher):
    """Ends a run in which no completion has ever had another reward than the others, for so many steps."""

    def __init__(self, folder: RunFolder, most: int) -> None:
        """`most` steps end it; 0 lets it go on."""
        self.folder, self.most = folder, most

    def on_step(self, report: StepReport) -> None:
        """All lines of metrics.jsonl tell, of which the step's is the last."""
        if not self.most or report.step < self.most or report.metrics.get("frac_uninformative_groups") != 1:
            return
        alarm = same_reward(self.folder.metrics())
        if alarm is not None:
            raise RunError(
                f"{alarm.says}, so that nothing is learned.  If the task is too hard for this policy, take easier rows"
                " or give credit for coming near; else see what the reward functions read with"
                " `posttrain check-task FILE.py:FUNCTION --rows FILE`."
                f"  grading.max_same_reward_steps = {self.most} is how many such steps end a run, 0 none."
            )
