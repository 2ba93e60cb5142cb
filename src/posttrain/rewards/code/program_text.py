"""The program that a completion gives: its last closed Python fence, or `<code>…</code>`, outside of its thinking.

A fence opens with a line of three or more backticks and `python`, `py` or `python3`, and closes with a line of at
least as many backticks and nothing else.  Where there is neither such a fence nor `<code>`, the last closed fence that
names no language may count (`fences="any"`): beside a program it is more likely what the program prints.  What lies
between `<think>` and `</think>` does not count, nor what precedes a first `</think>` without a `<think>` (its start was
part of the prompt), nor what follows a `<think>` that is not closed.  Every character is read a fixed number of times.
"""

import re
from collections.abc import Iterator
from typing import Literal

from posttrain.rewards.tags import END_THINK, THINK

CODE, END_CODE = "<code>", "</code>"
FENCE = re.compile(r"^ {0,3}(`{3,}+)[ \t]*+([^\s`]*+)[^\n`]*+$", re.MULTILINE)
LANGUAGES = {"python", "py", "python3"}
MAX_CHARACTERS = 100_000
"""Longest program that is run."""

Fences = Literal["any", "python"]


def program_in(text: str, fences: Fences = "any") -> str | None:
    """The program's source, or None where there is none."""
    named: str | None = None
    nameless: str | None = None
    for part in outside_thinking(text):
        closed = list(closed_fences(part))
        programs = [*((end, held) for end, language, held in closed if language in LANGUAGES), *tagged(part)]
        if programs:
            named = max(programs)[1]  # the one that ends last
        nameless = next((held for _, language, held in reversed(closed) if not language), nameless)
    return nameless if named is None and fences == "any" else named


def outside_thinking(text: str) -> Iterator[str]:
    """The parts of a text that are not thinking, in order."""
    start = text.find(THINK)
    end = text.find(END_THINK)
    at = end + len(END_THINK) if end >= 0 and (start < 0 or end < start) else 0
    while True:
        start = text.find(THINK, at)
        yield text[at:] if start < 0 else text[at:start]
        end = text.find(END_THINK, start) if start >= 0 else -1
        if end < 0:
            return
        at = end + len(END_THINK)


def closed_fences(text: str) -> Iterator[tuple[int, str, str]]:
    """Closed fences as (where they end, their language, what they hold)."""
    opened: re.Match[str] | None = None
    for fence in FENCE.finditer(text):
        ticks, language = fence.groups()
        if opened is None:
            opened = fence
        elif not language and len(ticks) >= len(opened[1]) and fence[0].strip(" \t") == ticks:
            yield fence.end(), opened[2].lower(), text[opened.end() + 1 : fence.start()]
            opened = None


def tagged(text: str) -> Iterator[tuple[int, str]]:
    """Closed `<code>` elements as (where they end, what they hold)."""
    at = 0
    while True:
        start = text.find(CODE, at)
        end = text.find(END_CODE, start) if start >= 0 else -1
        if end < 0:
            return
        at = end + len(END_CODE)
        yield at, text[start + len(CODE) : end]
