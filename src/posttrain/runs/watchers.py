"""Watchers of a run: journals, alarms, the display, guards that end a run that cannot learn, and the user's."""

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile

from posttrain.errors import RunError, UserError
from posttrain.options.reward import GradingOptions
from posttrain.records import Grades
from posttrain.runs import reports
from posttrain.runs.alarms import (
    GAP,
    Alarm,
    Illustration,
    Line,
    alarms,
    illustrations,
    is_notice,
    judged_gap,
    same_reward,
    transcript,
)
from posttrain.runs.progress import Progress
from posttrain.runs.run_folder import RunFolder


class Watcher:
    """Called during a run; override the methods that you need.

    Watchers see each step in turn.  The user's come first: before the metrics are written and shown, and before the
    step is saved.  An exception in a watcher ends the run.
    """

    stage: str | None = None
    """The stage to which the time of `on_step` is added, if any; for a user's watcher, the default is `watchers`."""
    stopping: bool = False
    """Set to True to end the run after the current step, as after the last one."""
    saving: bool = False
    """Set to True in `on_step` to save this step, independent of checkpoint.every_steps."""

    def on_begin(self, report: reports.BeginReport) -> None:
        """Called before training starts, or continues from a checkpoint."""

    def on_step_begin(self, step: int) -> None:
        """Called before a step."""

    def on_step(self, report: reports.StepReport) -> reports.Metrics | None:
        """Called after a step.  Returns metrics to add: numbers, under new names."""
        return None

    def on_evaluation(self, report: reports.EvaluationReport) -> None:
        """Called after an evaluation on held-out data."""

    def on_save(self, report: reports.CheckpointReport) -> None:
        """Called when a checkpoint is on disk."""

    def on_end(self, report: reports.EndReport) -> None:
        """Called when the run has ended or was interrupted; not after an error."""


def require_watchers(candidates: object) -> tuple[Watcher, ...]:
    """A user's watchers.  Raises UserError if they are not a list of watchers."""
    watchers = tuple(candidates) if isinstance(candidates, Iterable) else (candidates,)
    wrong = [each for each in watchers if not isinstance(each, Watcher)]
    if wrong or not isinstance(candidates, Iterable):
        each = wrong[0] if wrong else candidates
        raise UserError(
            f"watchers: {each!r:.60} ({type(each).__name__}).  Give a list of objects whose classes inherit from"
            " posttrain.Watcher."
        )
    return watchers


OURS = frozenset({"step", "step_time", "tokens_per_second", "num_non_finite"})
"""Metrics added to a step after the user's watchers have seen it."""
OUR_GROUPS = ("eval", "seconds", "logged")
"""Prefixes of metrics that only some steps have."""


class OwnWatcher(Watcher):
    """One of the user's watchers, whose returned metrics are checked."""

    def __init__(self, watcher: Watcher, own: dict[str, None]) -> None:
        """Adds the name of each of its metrics to `own`."""
        self.watcher, self.own = watcher, own
        self.stage = watcher.stage or "watchers"
        self.on_evaluation, self.on_save, self.on_end = watcher.on_evaluation, watcher.on_save, watcher.on_end  # type: ignore[method-assign]

    def on_step(self, report: reports.StepReport) -> reports.Metrics:
        returned: object = self.watcher.on_step(report)
        says = f"watcher {type(self.watcher).__name__}: on_step returned"
        if returned is None:
            return {}
        if not isinstance(returned, Mapping):
            example = 'a mapping of metrics to numbers such as {"my/metric": 0.5}'
            raise RunError(f"{says} {returned!r:.60} ({type(returned).__name__}).  Return None, or {example}.")
        numbers: dict[str, float] = {}
        for name, value in returned.items():
            taken = name in OURS or name in report.metrics or str(name).partition("/")[0] in OUR_GROUPS
            number = reports.as_number(value)
            if taken or number is None or not (isinstance(name, str) and name):
                free = f"own/{str(name).replace('/', '_')}"
                rule = f"Use a name that the run does not use, such as {free}, and a number as its value."
                raise RunError(f"{says} {name!r:.60} = {value!r:.60} ({type(value).__name__}).  {rule}")
            numbers[name] = number
        self.own |= dict.fromkeys(numbers)
        return numbers


class RolloutFiles(Watcher):
    """Writes every completion with its scores: to rollouts/ for a step, to evaluations/ for an evaluation."""

    stage = "save"

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def on_step(self, report: reports.StepReport) -> None:
        """Including groups that were set aside, and token columns if they are kept."""
        if report.grades is not None:
            self.folder.write_rollouts(report.step, *report.all_rollouts(), token_columns=report.token_columns())
        if report.updates:
            self.folder.write_token_columns(report.step, report.updates, report.updated)

    def on_evaluation(self, report: reports.EvaluationReport) -> None:
        if report.completions:
            self.folder.write_evaluation(report.step, report.evaluation, report.completions)


class Alarms(Watcher):
    """Reports signs of trouble in a step, without repeating them too soon; its metric is their number."""

    def __init__(self, folder: RunFolder, progress: Progress) -> None:
        self.folder, self.progress = folder, progress
        self.history: list[Line] | None = None
        """The lines of metrics.jsonl with completions, and that of step 0."""
        self.raised: dict[str, int] = {}
        self.measured: reports.EvaluationReport | None = None
        """The evaluation of the step that is under way."""

    def on_evaluation(self, report: reports.EvaluationReport) -> None:
        self.measured = report

    def illustration(self, alarm: Alarm, report: reports.StepReport, grades: Grades) -> Illustration:
        """Completions of the step, or held-out ones for an alarm about those."""
        measured = self.measured if alarm.held_out else None
        sampled = [each for each in measured.completions if not each.greedy] if measured else []
        if measured is None or measured.step != report.step or not sampled:
            about = illustrations(alarm, report.groups, grades)
            return Illustration(transcript(*about[0]), about)
        about = illustrations(alarm, sampled[0].groups, sampled[0].grades)
        return Illustration(transcript(*about[0]), about, measured.evaluation)

    def on_step(self, report: reports.StepReport) -> reports.Metrics | None:
        if report.grades is None:
            return None
        if self.history is None:
            told = (line for line in self.folder.metrics() if line["step"] == 0 or "tokens/completion" in line)
            self.history, self.raised = [*told], self.folder.raised()
        numbers = {name: value if math.isfinite(value) else None for name, value in report.metrics.items()}
        self.history.append({"step": report.step, **numbers})
        count = 0
        for alarm in alarms(self.history, self.raised):
            shown, notice = self.illustration(alarm, report, report.grades), is_notice(alarm, report.grades)
            self.raised[alarm.name] = report.step
            self.folder.append_alarm(report.step, alarm, shown, notice=notice)
            indented = shown.transcript.replace("\n", "\n    ")
            head = f"{'Notice' if notice else 'ALARM'}, step {report.step}, {alarm.name}: {alarm.says}"
            paid = ", and it is what the reward pays" if notice else ""
            self.progress.note(f"{head}{paid}.  For example:\n    {indented}")
            count += not notice
        self.measured = None
        return {"num_alarms": float(count)}


class StepCall(Watcher):
    """Calls a function with each step."""

    def __init__(self, call: Callable[[reports.StepReport], reports.Metrics | None]) -> None:
        self.call = call

    def on_step(self, report: reports.StepReport) -> reports.Metrics | None:
        return self.call(report)


LOOK = "See what the reward functions return with `posttrain check-task FILE.py:FUNCTION`"
STEPS_APART = 3
"""Number of consecutive steps beyond the limit that ends a run."""


class SamplerGuard(Watcher):
    """Ends a run whose sampler and trainer disagree for too long: it would train on tokens from another policy."""

    def __init__(self) -> None:
        self.steps_apart = 0
        """Consecutive ones; steps before a resume do not count."""

    def on_step(self, report: reports.StepReport) -> None:
        if report.metrics.get(GAP) is None:  # nothing was trained on
            return
        name, gap, limit = judged_gap(report.metrics) or (GAP, 0.0, math.inf)
        self.steps_apart = self.steps_apart + 1 if gap > limit else 0
        if self.steps_apart >= STEPS_APART:
            raise RunError(
                f"sampler and trainer: log-probs differed by more than {limit:g} nats for {STEPS_APART} steps, now by"
                f" {gap:.2g} ({name}).  Set model.dtype = float32, or repair your engine (docs/guides/your_own.md)."
            )


class RewardGuard(Watcher):
    """Ends a run that cannot learn: for too many steps, no completion has a reward, or all have the same one."""

    def __init__(self, folder: RunFolder, options: GradingOptions) -> None:
        self.folder, self.options = folder, options

    def on_step(self, report: reports.StepReport) -> None:
        most = self.options.max_unscored_steps
        if most and report.metrics.get("frac_unscored") == 1:
            steps = list(takewhile(lambda line: line.get("frac_unscored") == 1, reversed(self.folder.metrics())))
            if len(steps) >= most:
                raise RunError(
                    f"no completion of {len(steps)} consecutive steps has a reward (grading.max_unscored_steps ="
                    f" {most}).  {LOOK}, fix them, and resume with --accept-changes (accept_changes=True)."
                )
        most = self.options.max_same_reward_steps
        is_silent = most and report.step >= most and report.metrics.get("frac_uninformative_groups") == 1
        if is_silent and (alarm := same_reward(self.folder.metrics())):
            raise RunError(
                f"{alarm.says} (grading.max_same_reward_steps = {most}).  Use easier rows, give partial credit, or"
                f" fix the reward.  {LOOK}."
            )
