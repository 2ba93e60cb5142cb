"""Rewards for the structure `<think>…</think> <answer>…</answer>`, whatever the answer says.

`strict_format` and `last_format` give 1 if a text has the structure of posttrain.rewards.parsing.tags in that mode,
else 0.
`line_format` also requires each tag on its own line, as templates for instruction-tuned models show it.
`graded_format` is the course's variant over the strict structure: 1 if the answer, stripped of ASCII white space,
has only arithmetic characters (0-9, + - * / ( ) and space), 0.5 if it has other text or is empty, 0 without the
structure.  Unlike the widely copied regular expressions for it, it allows any white space between the tags and rejects
a decimal point, as the Countdown grader does.

Known hack: the structure alone earns these, so without another reward it is learned in place of the task.
"""

from collections.abc import Callable
from enum import StrEnum

from posttrain.options.task import FormatMode
from posttrain.rewards.grading.answers import Graded, Texts
from posttrain.rewards.parsing.arithmetic import ALPHABET
from posttrain.rewards.parsing.tags import WHITE_SPACE, answer_lines, answer_text


class FormatOutcome(StrEnum):
    """Whether the structure is there."""

    FORMATTED = "formatted"
    EXTRA_TEXT = "extra_text"
    """The answer is not purely arithmetic."""
    UNFORMATTED = "unformatted"
    TRUNCATED = "truncated"
    """Unformatted, and the length limit cut the completion off."""


SCORES = dict.fromkeys(FormatOutcome, 0.0) | {FormatOutcome.FORMATTED: 1.0, FormatOutcome.EXTRA_TEXT: 0.5}


def format_outcome(text: str, mode: FormatMode, *, cut_off: bool) -> FormatOutcome:
    return structured(answer_text(text, mode), cut_off)


def arithmetic_structure(text: str, *, cut_off: bool) -> FormatOutcome:
    """Whether the text has the strict structure, around arithmetic characters only."""
    answer = answer_text(text, "strict")
    if answer is not None and not ALPHABET.fullmatch(answer.strip(WHITE_SPACE)):
        return FormatOutcome.EXTRA_TEXT
    return structured(answer, cut_off)


def structured(answer: str | None, cut_off: bool) -> FormatOutcome:
    if answer is not None:
        return FormatOutcome.FORMATTED
    return FormatOutcome.TRUNCATED if cut_off else FormatOutcome.UNFORMATTED


def format_grades(texts: Texts, finish_reasons: Texts, outcome: Callable[[str, bool], FormatOutcome]) -> list[Graded]:
    rows = zip(texts, finish_reasons, strict=True)
    outcomes = [outcome(text, finish == "length") for text, finish in rows]
    return [Graded(SCORES[each], each) for each in outcomes]


def strict_format(*, completions: Texts, finish_reasons: Texts, **_columns: object) -> list[Graded]:
    """Reward function: 1 if the whole text has the structure."""
    return format_grades(completions, finish_reasons, lambda text, cut: format_outcome(text, "strict", cut_off=cut))


def last_format(*, completions: Texts, finish_reasons: Texts, **_columns: object) -> list[Graded]:
    """Reward function: 1 if the text ends in the structure."""
    return format_grades(completions, finish_reasons, lambda text, cut: format_outcome(text, "last", cut_off=cut))


def line_format(*, completions: Texts, finish_reasons: Texts, **_columns: object) -> list[Graded]:
    """Reward function: 1 if the whole text has the structure with each tag on its own line."""
    return format_grades(completions, finish_reasons, lambda text, cut: structured(answer_lines(text), cut))


def graded_format(*, completions: Texts, finish_reasons: Texts, **_columns: object) -> list[Graded]:
    """Reward function: 1 for the structure around arithmetic, 0.5 around other text, else 0."""
    return format_grades(completions, finish_reasons, lambda text, cut: arithmetic_structure(text, cut_off=cut))
