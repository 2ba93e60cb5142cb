"""Where the parts of a completion are: `<think>…</think> <answer>…</answer>`, and the program that it gives.

**Tags** are exactly these four ASCII literals; anything else (`<Think>`, `<answer >`) is text.  White space is ASCII.

- `strict`: the whole text is one `<think>…</think>`, white space, one `<answer>…</answer>`, in white space.
- `lines`: `strict`, and each of the four is on its own line, with at least one line, perhaps empty, between those of a
  pair and none between `</think>` and `<answer>`.  Lines end in a line feed; the whole may be padded with anything that
  Python's `str.strip` removes.
- `last`: the last four tags of the text are those four in that order, with only white space (or nothing) between
  `</think>` and `<answer>`.  Text and tags before them are ignored, and text after them.

In every mode, an extra tag inside or after the four breaks the structure.

**A program** is the last closed Python fence, or `<code>…</code>`, outside of the thinking.  A fence opens with a line
of three or more backticks and `python`, `py` or `python3`, and closes with a line of at least as many backticks and
nothing else.  Without such a fence or `<code>`, the last closed fence that names no language may count
(`fences="any"`): next to a program it is more likely the program's output.  Text before a first `</think>` without a
`<think>`, which was part of the prompt, and after a `<think>` that is not closed is thinking.

Reading takes time linear in any text.
"""

import re
from collections.abc import Iterator
from typing import Literal

from posttrain.options.task import FormatMode

THINK, END_THINK, ANSWER, END_ANSWER = "<think>", "</think>", "<answer>", "</answer>"

WHITE_SPACE = " \t\n\r\f\v"

FIRST_LINE, LAST_LINE = f"{THINK}\n", f"\n{END_ANSWER}"
BETWEEN_LINES = f"\n{END_THINK}\n{ANSWER}\n"


def answer_text(text: str, mode: FormatMode) -> str | None:
    """The text between the answer tags; None without the structure."""
    start = text.rfind(THINK)
    if start < 0:
        return None
    end_think = text.find(END_THINK, start)
    answer = text.find(ANSWER, start)
    end = text.find(END_ANSWER, start)
    if not start < end_think < answer < end:
        return None
    # Each was the first of its kind after `start`; a second one anywhere behind breaks the structure.
    if (
        text.find(END_THINK, end_think + 1) >= 0
        or text.find(ANSWER, answer + 1) >= 0
        or text.find(END_ANSWER, end + 1) >= 0
        or text[end_think + len(END_THINK) : answer].strip(WHITE_SPACE)
    ):
        return None
    if mode == "strict" and (text[:start].strip(WHITE_SPACE) or text[end + len(END_ANSWER) :].strip(WHITE_SPACE)):
        return None
    return text[answer + len(ANSWER) : end]


def answer_lines(text: str) -> str | None:
    """The lines between those of the answer tags; None without the structure in mode `lines`.

    The structure is a full match of `<think>\\n…\\n</think>\\n<answer>\\n…\\n</answer>` without another tag.
    """
    stripped = text.strip()
    middle = stripped.find(BETWEEN_LINES)
    opened = stripped.startswith(FIRST_LINE) and middle >= len(FIRST_LINE)
    answer = middle + len(BETWEEN_LINES)
    closed = stripped.endswith(LAST_LINE) and len(stripped) - len(LAST_LINE) >= answer
    if not (opened and closed) or answer_text(stripped, "strict") is None:
        return None
    return stripped[answer : -len(LAST_LINE)]


def after_thinking(text: str) -> str:
    """The text after the last `</think>` and before a `<think>` that is not closed."""
    return text[text.rfind(END_THINK) + len(END_THINK) if END_THINK in text else 0 :].partition(THINK)[0]


def last_answer(text: str) -> str | None:
    end = text.rfind(END_ANSWER)
    start = text.rfind(ANSWER, 0, end) if end >= 0 else -1
    return text[start + len(ANSWER) : end] if start >= 0 else None


CODE, END_CODE = "<code>", "</code>"
THOUGHT = re.compile(f"{THINK}.*?{END_THINK}|{THINK}.*", re.DOTALL)
"""The second, of one that is not closed, keeps it linear: no later one is tried."""
FENCE = re.compile(r"^ {0,3}(`{3,}+)[ \t]*+([^\s`]*+)[^\n`]*+$", re.MULTILINE)
LANGUAGES = {"python", "py", "python3"}
MAX_CHARACTERS = 100_000
"""Longest program that is run."""

Fences = Literal["any", "python"]


def program_in(text: str, fences: Fences = "any") -> str | None:
    """The program's source, if any."""
    named: str | None = None
    nameless: str | None = None
    for part in outside_thinking(text):
        closed = list(closed_fences(part))
        programs = [*((end, held) for end, language, held in closed if language in LANGUAGES), *tagged(part)]
        if programs:
            named = max(programs)[1]  # the one that ends last
        nameless = next((held for _, language, held in reversed(closed) if not language), nameless)
    return nameless if named is None and fences == "any" else named


def outside_thinking(text: str) -> list[str]:
    """The parts of a text that are not thinking, in order."""
    start, end = text.find(THINK), text.find(END_THINK)
    if end >= 0 and (start < 0 or end < start):
        text = text[end + len(END_THINK) :]
    return THOUGHT.split(text)


def closed_fences(text: str) -> Iterator[tuple[int, str, str]]:
    opened: re.Match[str] | None = None
    for fence in FENCE.finditer(text):
        ticks, language = fence.groups()
        if opened is None:
            opened = fence
        elif not language and len(ticks) >= len(opened[1]) and fence[0].strip(" \t") == ticks:
            yield fence.end(), opened[2].lower(), text[opened.end() + 1 : fence.start()]
            opened = None


def tagged(text: str) -> Iterator[tuple[int, str]]:
    at = 0
    while True:
        start = text.find(CODE, at)
        end = text.find(END_CODE, start) if start >= 0 else -1
        if end < 0:
            return
        at = end + len(END_CODE)
        yield at, text[start + len(CODE) : end]
