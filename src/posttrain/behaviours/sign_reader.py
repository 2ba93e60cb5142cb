"""Signs of behaviours in texts: which there are in a completion, and counts over some.  Torch-free.

Completions are hostile: `(a|aa)+c` tries 2^n ways on n times `a`.  Each pattern has a time limit per completion.
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import regex

from posttrain.behaviours import behaviour_table
from posttrain.rewards.countdown import puzzle
from posttrain.rewards.parsing.tags import END_THINK

MAX_CHARACTERS = 20_000
"""Characters of a completion that are searched; 400 tokens of the bundled model are about 600."""
TIMEOUT_SECONDS = 0.5
"""Processor time of one pattern on one completion."""


class PatternTimeout(RuntimeWarning):
    """A pattern that took too long on a completion, which is then left out of its row."""


@dataclass(slots=True)
class Tally:
    """Counts of one behaviour over some completions."""

    num_shown: int = 0
    num_signs: int = 0
    num_completions: int = 0
    num_tokens: int = 0

    def add(self, signs: behaviour_table.Signs, num_tokens: int) -> None:
        self.num_shown += signs.shown
        self.num_signs += signs.count
        self.num_completions += 1
        self.num_tokens += num_tokens

    @property
    def share(self) -> float:
        return self.num_shown / self.num_completions

    @property
    def per_1000_tokens(self) -> float:
        return 1000 * self.num_signs / self.num_tokens


@dataclass(frozen=True)
class SignReader:
    """Finds the signs of the chosen rows in completions."""

    rows: Mapping[str, behaviour_table.Row]
    timeout_seconds: float = TIMEOUT_SECONDS

    @cached_property
    def patterns(self) -> Mapping[str, tuple[regex.Pattern[str], ...]]:
        return {
            name: tuple(regex.compile(each, regex.IGNORECASE) for each in row.patterns)
            for name, row in self.rows.items()
            if isinstance(row, behaviour_table.PatternRow)
        }

    def read(self, text: str, columns: Mapping[str, object]) -> dict[str, behaviour_table.Signs]:
        """The signs of each row in the first `MAX_CHARACTERS` of a completion.

        A row is missing if it reads a Countdown search and the problem has no columns `numbers` and `target`, or if
        one of its patterns timed out, which is a warning.
        """
        text = text[:MAX_CHARACTERS]
        thinking = text.partition(END_THINK)[0]
        found, search = dict[str, behaviour_table.Signs](), None
        if (
            any(isinstance(row, behaviour_table.SearchRow) for row in self.rows.values())
            and {"numbers", "target"} <= columns.keys()
        ):
            search = behaviour_table.read_search(
                puzzle(columns["numbers"], columns["target"], columns.get("rule", "all")), text
            )
        for name, row in self.rows.items():
            if isinstance(row, behaviour_table.SearchRow):
                found |= {} if search is None else {name: row.read(search)}
                continue
            within = thinking if row.within == "thinking" else text
            try:
                count = num_signs(self.patterns[name], within, timeout_seconds=self.timeout_seconds)
                found[name] = behaviour_table.Signs(count, count >= row.at_least)
            except TimeoutError:
                slow = f"took more than {self.timeout_seconds} s on a completion of {len(within)} characters"
                remedy = "Bound its repeats, such as \\w{1,20} for \\w+."
                told = f"behaviours: {name}: a pattern {slow}, now left out. {remedy}"
                warnings.warn(told, PatternTimeout, stacklevel=2)
        return found


def tallies(completions: Iterable[tuple[Mapping[str, behaviour_table.Signs], int]]) -> dict[str, Tally]:
    """The tally of each row over completions, each its signs and its number of tokens."""
    found: dict[str, Tally] = {}
    for signs, num_tokens in completions:
        for name, each in signs.items():
            found.setdefault(name, Tally()).add(each, num_tokens)
    return found


def num_signs(patterns: Iterable[regex.Pattern[str]], text: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> int:
    """The stretches of a text that some pattern matches; overlapping matches are one.  Raises TimeoutError."""
    spans = [match.span() for pattern in patterns for match in pattern.finditer(text, timeout=timeout_seconds)]
    count, end = 0, 0
    for first, last in sorted(spans):
        count += first >= end
        end = max(end, last)
    return count
