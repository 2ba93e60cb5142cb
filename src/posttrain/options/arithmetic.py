"""Additions in a recipe: which questions are trained on, which are measured, and in what form answers are asked for."""

from dataclasses import dataclass
from typing import Literal

from posttrain.errors import UserError
from posttrain.options.bounds import Bounded, PositiveInt

SYSTEM = (
    "You are a helpful assistant. Think first, then answer. Reply in this form alone:\n"
    "<think>\n...\n</think>\n<answer>\n...\n</answer>"
)
NUM_ADDITIONS = 90 * 9
"""Different questions: a from 10 to 99, b from 1 to 9."""


@dataclass(frozen=True, kw_only=True)
class ArithmeticOptions(Bounded):
    """Additions of a number of two digits and one of one digit, asked for in tags on lines of their own."""

    name: Literal["arithmetic"] = "arithmetic"
    """Which task this is."""
    num_questions: PositiveInt = 64
    """Training questions, the same for every seed; 64 are those of a well-known course."""
    repeats: PositiveInt = 1
    """Groups of each question in a step: with 8, 32 prompts per step are 4 questions."""
    held_out_size: PositiveInt = 32
    """Questions of evaluations."""
    measured_on: Literal["held_out", "training"] = "held_out"
    """Which questions evaluations ask: some that are never trained on, or the first of the training questions, as that
    course does."""
    system: str = SYSTEM
    """System message before every question; it asks for the form that is rewarded."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.measured_on == "training" and self.held_out_size > self.num_questions:
            raise UserError(
                f"held_out_size = {self.held_out_size}: with measured_on = training these are training questions, of"
                f" which there are num_questions = {self.num_questions}.  Use at most as many."
            )
        if self.num_questions + self.held_out_size > NUM_ADDITIONS:
            raise UserError(
                f"num_questions = {self.num_questions} and held_out_size = {self.held_out_size}: there are"
                f" {NUM_ADDITIONS} questions, and none may be both.  Use fewer."
            )
