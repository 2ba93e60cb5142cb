"""What ends a run that learns nothing or the wrong thing: watchers that see each step before it is saved."""

import math
from itertools import takewhile

from posttrain.errors import RunError
from posttrain.runs.alarms import GAP, judged_gap, same_reward
from posttrain.runs.reports import StepReport
from posttrain.runs.run_folder import RunFolder
from posttrain.runs.watchers import Watcher

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
