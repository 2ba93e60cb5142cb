"""Whom a student learns from by distillation, and what the teacher is shown: part of the `algorithm` section."""

from dataclasses import dataclass
from typing import Literal

from posttrain.errors import UserError, require

PLACES = ("{prompt}", "{shown}")
"""What a template says where the problem stands, and where what only the teacher sees."""


@dataclass(frozen=True, kw_only=True)
class TeacherOptions:
    """The policy whose next-token distributions are learned, on completions that the student sampled."""

    model: str = ""
    """A folder, a run, or a name on the hub, as `model.path` has it, of a model with the student's vocabulary; empty is
    the student itself, which `sees` more then."""
    weights: Literal["now", "start"] = "now"
    """Of the student itself: its weights as they are in each step, or as training started from."""
    sees: Literal["prompt", "answer", "sibling"] = "prompt"
    """What it goes on from: the student's prompt; the prompt and the answer in `answer_column`; or the prompt and a
    right completion by a sibling, the shortest one other than the completion itself.  Where there is none, or no room
    for it, it sees the prompt."""
    answer_column: str = "answer"
    """The column of a row that holds its answer; with `sees: answer`."""
    correct_from: float = 1.0
    """The least reward of a sibling that counts as right; with `sees: sibling`."""
    template: str = "{prompt}\n{shown}\n\n{prompt}"
    """The teacher's prompt, or in a conversation its last message by the user: `{prompt}` stands for the student's, as
    often as it is there, and `{shown}` for the answer or the sibling's completion."""

    def __post_init__(self) -> None:
        if not self.model and self.sees == "prompt":
            raise UserError(
                "teacher: the student itself, seeing what the student sees, has nothing to teach.  Name another by"
                " `model`, or show it more by sees = answer or sibling."
            )
        if self.model and self.weights != "now":
            raise UserError(f"weights = {self.weights} is of the student itself, and model = {self.model} is another.")
        missing = [place for place in PLACES if place not in self.template]
        require(not missing, self, "template", f"has no {' and no '.join(missing)}; write where each stands")
        self._require_use("answer_column", "answer")
        self._require_use("correct_from", "sibling")
        if self.sees == "prompt":
            self._require_use("template", "answer or sibling")

    def _require_use(self, name: str, sees: str) -> None:
        """Refuse an option that has no effect."""
        value = getattr(self, name)
        if self.sees not in sees.split(" or ") and value != type(self).__dataclass_fields__[name].default:
            raise UserError(f"{name} = {value!r} is for sees = {sees}, and sees = {self.sees}.  Leave it out.")
