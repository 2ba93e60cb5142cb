"""Countdown with credit for coming near: an option, for tasks that are too hard to be solved by chance.

**What earns what.**  CORRECT is worth 1 as in posttrain.rewards.countdown.grader.  WRONG_VALUE, with the numbers used
as the rule says, is worth `credit · max(0, 1 - |value - target| / max(target, 1))`.  Everything else is 0.

**Known hacks.**  Near is cheaper than right: with a large credit a policy learns to add the numbers up, which is often
near, and stops searching as soon as a try is close.  Its reward rises while its accuracy does not: watch the held-out
accuracy, keep the credit small, or let its weight fall to 0 (`weight_to`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any

from annotated_types import Gt, Lt

from posttrain.options.bounds import Bounded
from posttrain.options.countdown import FormatMode
from posttrain.rewards.countdown.arithmetic import postfix, value
from posttrain.rewards.countdown.grader import Column, Outcome, countdown, countdown_last
from posttrain.rewards.grading.answers import Graded
from posttrain.rewards.tags import WHITE_SPACE, answer_text


@dataclass(frozen=True, kw_only=True)
class CountdownCredit(Bounded):
    """Reward function: 1 for a correct answer, and up to `credit` for one that is near."""

    credit: Annotated[float, Gt(0), Lt(1)] = 0.1
    """What an answer just beside the target approaches."""
    mode: FormatMode = "strict"
    """How much of a text has to keep to the structure."""

    def __call__(
        self, /, *, completions: Sequence[str], numbers: Column, target: Column, **columns: Any
    ) -> list[Graded]:
        grader = countdown if self.mode == "strict" else countdown_last
        verdicts = grader(completions=completions, numbers=numbers, target=target, **columns)
        return [self.credited(*row) for row in zip(verdicts, completions, target, strict=True)]

    def credited(self, graded: Graded, text: str, target: Any) -> Graded:
        """A verdict, with what its answer is worth where the value alone is wrong."""
        if graded.outcome is not Outcome.WRONG_VALUE:
            return graded
        return Graded(self.credit * nearness(target, text, self.mode), graded.outcome)


def nearness(target: int, text: str, mode: FormatMode) -> float:
    """max(0, 1 - |value - target| / max(target, 1)) of an answer whose numbers are right; 0 for a division by zero."""
    tokens = postfix((answer_text(text, mode) or "").strip(WHITE_SPACE))
    found = value(tokens) if tokens is not None else None
    if found is None:
        return 0.0
    off = abs(Fraction(*found) - target) / max(target, 1)
    return 1.0 - float(off) if off < 1 else 0.0
