"""Additions in a recipe: which questions are trained on, which are measured, and in what form answers are expected."""

from dataclasses import dataclass
from typing import Literal

from posttrain.options.bounds import Bounded, PositiveInt
from posttrain.options.rules import Rule

SYSTEM = (
    "You are a helpful assistant. Think first, then answer. Reply in this form alone:\n"
    "<think>\n...\n</think>\n<answer>\n...\n</answer>"
)
NUM_ADDITIONS = 90 * 9
"""Different questions: a from 10 to 99, b from 1 to 9."""


@dataclass(frozen=True, kw_only=True)
class ArithmeticOptions(Bounded):
    """Additions of a two-digit and a one-digit number, answered in tags on separate lines."""

    name: Literal["arithmetic"] = "arithmetic"
    num_questions: PositiveInt = 64
    """Training questions, the same for every seed; 64 are those of a well-known course."""
    repeats: PositiveInt = 1
    """Groups of each question in a step: with 8, 32 prompts per step are 4 questions."""
    held_out_size: PositiveInt = 32
    """Questions of evaluations."""
    measured_on: Literal["held_out", "training"] = "held_out"
    """Which questions evaluations ask: some that are never trained on, or, as in that course, the first training
    questions."""
    system: str = SYSTEM
    """System message before every question; it describes the form that is rewarded."""

    rules = (
        Rule(
            "held_out_size",
            lambda o: o.measured_on == "held_out" or o.held_out_size <= o.num_questions,
            "with measured_on = training is more than num_questions = {o.num_questions}.  Use at most as many.",
        ),
        Rule(
            "num_questions",
            lambda o: o.num_questions + o.held_out_size <= NUM_ADDITIONS,
            f"and held_out_size = {{o.held_out_size}} are more than the {NUM_ADDITIONS} that exist.  Use fewer.",
        ),
    )
