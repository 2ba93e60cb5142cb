"""Additions in a recipe: which questions are trained on, which are measured, and in what form answers are asked for."""

from dataclasses import dataclass
from typing import Literal

from posttrain.errors import UserError, require

SYSTEM = (
    "You are a helpful assistant. Think first, then answer. Reply in this form alone:\n"
    "<think>\n...\n</think>\n<answer>\n...\n</answer>"
)
NUM_ADDITIONS = 90 * 9
"""Different questions: a from 10 to 99, b from 1 to 9."""


@dataclass(frozen=True, kw_only=True)
class ArithmeticOptions:
    """Additions of a number of two digits and one of one digit, asked for in tags on lines of their own."""

    name: Literal["arithmetic"] = "arithmetic"
    """Which task this is."""
    num_questions: int = 64
    """Training questions, the same for every seed; 64 are those of a well-known course."""
    repeats: int = 1
    """Groups of each question in a step: with 8, 32 prompts per step are 4 questions."""
    held_out_size: int = 32
    """Questions of evaluations."""
    measured_on: Literal["held_out", "training"] = "held_out"
    """Which questions evaluations ask: some that are never trained on, or the first of the training questions, as that
    course does."""
    system: str = SYSTEM
    """System message before every question; it asks for the form that is rewarded."""

    def __post_init__(self) -> None:
        require(self.num_questions >= 1, self, "num_questions", "leaves nothing to train on; use >= 1")
        require(self.repeats >= 1, self, "repeats", "asks nothing; use >= 1")
        require(self.held_out_size >= 1, self, "held_out_size", "leaves nothing to evaluate on; use >= 1")
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
