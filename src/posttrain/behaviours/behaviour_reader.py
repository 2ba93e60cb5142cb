"""Counts signs of behaviours in completions, per step and per evaluation.

Each row has two numbers: the share of completions that show it, and its signs per 1000 completion tokens.  Longer
completions show more of everything.  If the share rises and the signs per token do not, only the length has grown.

Completions are hostile: `(a|aa)+c` tries 2^n ways on n times `a`.  Each pattern has a time limit per completion.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import regex

from posttrain.behaviours.behaviour_table import PatternRow, Row, SearchRow, Signs, read_search
from posttrain.errors import UserError
from posttrain.records import Group
from posttrain.rewards.countdown.grader import puzzle
from posttrain.rewards.parsing.tags import END_THINK
from posttrain.tasks.base import Probe, Reading

SHARE, SIGNS = "behaviour", "behaviour_signs"
"""Prefixes of metrics: `behaviour/<name>`, a share, and `behaviour_signs/<name>`, per 1000 tokens."""
MAX_CHARACTERS = 20_000
"""Characters of a completion that are searched; 400 tokens of the bundled model are about 600."""
TIMEOUT_SECONDS = 0.5
"""Processor time of one pattern on one completion."""
Pattern = regex.Pattern[str]


class PatternTimeout(RuntimeWarning):
    """A pattern that took too long on a completion, which is then left out of its row."""


@dataclass(slots=True)
class Tally:
    """Counts of one behaviour over some completions."""

    num_shown: int = 0
    num_signs: int = 0
    num_completions: int = 0
    num_tokens: int = 0

    def add(self, signs: Signs, num_tokens: int) -> None:
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
class BehaviourReader:
    """Finds the signs of the chosen rows in completions."""

    rows: Mapping[str, Row]
    timeout_seconds: float = TIMEOUT_SECONDS

    def __post_init__(self) -> None:
        assert self.patterns is not None  # a wrong pattern fails here, not in the first step

    @cached_property
    def patterns(self) -> Mapping[str, tuple[Pattern, ...]]:
        return {
            name: tuple(compiled_pattern(each, where=f"behaviours: {name}") for each in row.patterns)
            for name, row in self.rows.items()
            if isinstance(row, PatternRow)
        }

    def read(self, text: str, columns: Mapping[str, object]) -> dict[str, Signs]:
        """The signs of each row in the first `MAX_CHARACTERS` of a completion.

        A row is missing if it reads a Countdown search and the problem has no columns `numbers` and `target`, or if
        one of its patterns timed out, which is a warning.
        """
        text = text[:MAX_CHARACTERS]
        thinking = text.partition(END_THINK)[0]
        found = dict[str, Signs]()
        searching = {name: row for name, row in self.rows.items() if isinstance(row, SearchRow)}
        if searching and "numbers" in columns and "target" in columns:
            problem = puzzle(columns["numbers"], columns["target"], columns.get("rule", "all"))
            search = read_search(problem, text)
            found = {name: row.read(search) for name, row in searching.items()}
        for name, row in self.rows.items():
            if isinstance(row, PatternRow):
                within = thinking if row.within == "thinking" else text
                count = self.pattern_signs(name, within)
                if count is not None:
                    found[name] = Signs(count, count >= row.at_least)
        return {name: found[name] for name in self.rows if name in found}

    def pattern_signs(self, name: str, text: str) -> int | None:
        try:
            return num_signs(self.patterns[name], text, timeout_seconds=self.timeout_seconds)
        except TimeoutError:
            slow = f"took more than {self.timeout_seconds} s on a completion of {len(text)} characters, now left out"
            remedy = "Bound its repeats, such as \\w{1,20} for \\w+."
            warnings.warn(f"behaviours: {name}: a pattern {slow}. {remedy}", PatternTimeout, stacklevel=2)
            return None

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Share and signs per 1000 tokens of each row, over what was sampled: the prefill is the prompt's."""
        found = tallies(
            (self.read(each.text, group.prompt.columns), each.num_sampled)
            for group in groups
            for each in group.rollouts
        )
        return {f"{SHARE}/{name}": tally.share for name, tally in found.items()} | {
            f"{SIGNS}/{name}": tally.per_1000_tokens for name, tally in found.items()
        }

    def probes(self) -> Mapping[str, Probe]:
        """The same of held-out completions, in full evaluations; nothing if no row is chosen."""
        if not self.rows:
            return {}
        readings = {f"{SHARE}/{name}": Reading(row.says) for name, row in self.rows.items()}
        per_token = {
            f"{SIGNS}/{name}": Reading(f"{row.says}, signs per 1000 tokens", digits=2)
            for name, row in self.rows.items()
        }
        return {"behaviours": Probe(readings={**readings, **per_token}, measure=self.metrics)}


def tallies(completions: Iterable[tuple[Mapping[str, Signs], int]]) -> dict[str, Tally]:
    """The tally of each row over completions, each its signs and its number of tokens."""
    found: dict[str, Tally] = {}
    for signs, num_tokens in completions:
        for name, each in signs.items():
            found.setdefault(name, Tally()).add(each, num_tokens)
    return found


def num_signs(patterns: Iterable[Pattern], text: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> int:
    """The stretches of a text that some pattern matches; overlapping matches are one.  Raises TimeoutError."""
    spans = [match.span() for pattern in patterns for match in pattern.finditer(text, timeout=timeout_seconds)]
    count, end = 0, 0
    for first, last in sorted(spans):
        count += first >= end
        end = max(end, last)
    return count


def compiled_pattern(text: str, *, where: str) -> Pattern:
    """The compiled pattern, which ignores case.  Raises UserError if it is not one or matches an empty text."""
    try:
        compiled = regex.compile(text, regex.IGNORECASE)
        if compiled.match("") is None:
            return compiled
    except (regex.error, OverflowError) as error:
        raise UserError(f"{where}: {text!r} is not a regular expression: {error}") from None
    raise UserError(f"{where}: {text!r} matches an empty text, so it matches everywhere.  Require a character.")
