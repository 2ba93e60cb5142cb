"""Rewards for keeping to `<think>…</think> <answer>…</answer>`, whatever the answer says.

`strict_format` and `last_format` give 1 where a text has the structure of posttrain.rewards.parsing.tags in that mode,
else 0.
`line_format` also asks for each tag on its own line, as templates for instruction-tuned models show it.
`graded_format` is the course's variant over the strict structure: 1 where the answer, stripped of ASCII white space,
holds arithmetic characters only (0-9, + - * / ( ) and space), 0.5 where it holds other text as well or nothing at
all, 0 without the structure.  Unlike the widely copied regular expressions for it, it admits any white space between
the tags and refuses a decimal point, as the Countdown grader does.

Known hack: the structure alone earns these, so as the only reward they are learned in place of the task.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum

from posttrain.options.countdown import FormatMode
from posttrain.rewards.grading.answers import Graded
from posttrain.rewards.parsing.arithmetic import ALPHABET
from posttrain.rewards.parsing.tags import WHITE_SPACE, answer_lines, answer_text


class FormatOutcome(StrEnum):
    """Whether the structure is there."""

    FORMATTED = "formatted"
    EXTRA_TEXT = "extra_text"
    """The structure is there, but the answer is not purely arithmetic."""
    UNFORMATTED = "unformatted"
    TRUNCATED = "truncated"
    """The structure is not there, and the length limit cut the completion off."""


SCORES = {
    FormatOutcome.FORMATTED: 1.0,
    FormatOutcome.EXTRA_TEXT: 0.5,
    FormatOutcome.UNFORMATTED: 0.0,
    FormatOutcome.TRUNCATED: 0.0,
}


def format_outcome(text: str, mode: FormatMode, *, cut_off: bool) -> FormatOutcome:
    """Whether the text has the structure; the answer may be anything without a tag."""
    if answer_text(text, mode) is not None:
        return FormatOutcome.FORMATTED
    return FormatOutcome.TRUNCATED if cut_off else FormatOutcome.UNFORMATTED


def line_outcome(text: str, *, cut_off: bool) -> FormatOutcome:
    if answer_lines(text) is not None:
        return FormatOutcome.FORMATTED
    return FormatOutcome.TRUNCATED if cut_off else FormatOutcome.UNFORMATTED


def arithmetic_structure(text: str, *, cut_off: bool) -> FormatOutcome:
    """Whether the text has the strict structure, around nothing but arithmetic characters."""
    answer = answer_text(text, "strict")
    if answer is None:
        return FormatOutcome.TRUNCATED if cut_off else FormatOutcome.UNFORMATTED
    arithmetic = ALPHABET.fullmatch(answer.strip(WHITE_SPACE))
    return FormatOutcome.FORMATTED if arithmetic else FormatOutcome.EXTRA_TEXT


def strict_format(*, completions: Sequence[str], finish_reasons: Sequence[str], **_columns: object) -> list[Graded]:
    """Reward function: 1 where the whole text has the structure."""
    rows = zip(completions, finish_reasons, strict=True)
    return format_grades(format_outcome(text, "strict", cut_off=finish == "length") for text, finish in rows)


def last_format(*, completions: Sequence[str], finish_reasons: Sequence[str], **_columns: object) -> list[Graded]:
    """Reward function: 1 where the text ends in the structure."""
    rows = zip(completions, finish_reasons, strict=True)
    return format_grades(format_outcome(text, "last", cut_off=finish == "length") for text, finish in rows)


def line_format(*, completions: Sequence[str], finish_reasons: Sequence[str], **_columns: object) -> list[Graded]:
    """Reward function: 1 where the whole text has the structure with each tag on a line of its own."""
    rows = zip(completions, finish_reasons, strict=True)
    return format_grades(line_outcome(text, cut_off=finish == "length") for text, finish in rows)


def graded_format(*, completions: Sequence[str], finish_reasons: Sequence[str], **_columns: object) -> list[Graded]:
    """Reward function: 1 for the structure around arithmetic, 0.5 around other text, else 0."""
    rows = zip(completions, finish_reasons, strict=True)
    return format_grades(arithmetic_structure(text, cut_off=finish == "length") for text, finish in rows)


def format_grades(outcomes: Iterable[FormatOutcome]) -> list[Graded]:
    return [Graded(SCORES[outcome], outcome) for outcome in outcomes]
