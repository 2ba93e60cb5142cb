"""The teacher of distillation and what it sees: part of the `algorithm` section."""

from dataclasses import dataclass
from typing import Literal

from posttrain.options.bounds import Bounded
from posttrain.options.rules import Rule, Unused

PLACES = ("{prompt}", "{shown}")
"""Placeholders of a template: for the problem, and for what only the teacher sees."""


@dataclass(frozen=True, kw_only=True)
class TeacherOptions(Bounded):
    """The policy whose next-token distributions are learned, on completions that the student sampled."""

    model: str = ""
    """A folder, a run, or a name on the hub, as in `model.path`, of a model with the student's vocabulary; empty is the
    student itself, which then `sees` more."""
    weights: Literal["now", "start"] = "now"
    """If the teacher is the student: its present weights, or those at the start of training."""
    sees: Literal["prompt", "answer", "sibling"] = "prompt"
    """The teacher's prompt: the student's; with the answer in `answer_column`; or with the shortest right completion by
    a sibling.  Without one, or without room for it, the teacher sees the prompt."""
    answer_column: str = "answer"
    """The column of a row that holds its answer; with `sees: answer`."""
    correct_from: float = 1.0
    """The least reward of a sibling that counts as right; with `sees: sibling`."""
    template: str = "{prompt}\n{shown}\n\n{prompt}"
    """The teacher's prompt, or its last message by the user: `{prompt}` stands for the student's, each time it occurs,
    and `{shown}` for the answer or the sibling's completion."""

    rules = (
        Rule(
            "sees",
            lambda o: o.model or o.sees != "prompt",
            "makes the student its teacher, with nothing to teach.  Name a `model`, or see answer or sibling.",
        ),
        Unused("weights", {"model": ""}),
        Rule(
            "template",
            lambda o: all(each in o.template for each in PLACES),
            "needs {{prompt}} and {{shown}}.  Write where they go.",
        ),
        Unused("answer_column", {"sees": "answer"}),
        Unused("correct_from", {"sees": "sibling"}),
        Unused("template", {"sees": ("answer", "sibling")}),
    )
