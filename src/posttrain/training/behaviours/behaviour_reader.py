"""Signs of behaviours in completions, and what they come to over the completions of a step or an evaluation.

Two numbers of each row: the share of completions that show it, and its signs per 1000 completion tokens.  Longer
completions show more of everything, so that a share which rises with the length while the signs per token do not is a
matter of length alone.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.records import Group
from posttrain.rewards.countdown.grader import puzzle
from posttrain.rewards.parsing.tags import END_THINK
from posttrain.tasks.base import Probe, Reading
from posttrain.training.behaviours.behaviour_table import PatternRow, Row, SearchRow
from posttrain.training.behaviours.bounded_patterns import MOST_CHARACTERS, bounded_pattern
from posttrain.training.behaviours.search_signs import Signs, read_search

SHARE, SIGNS = "behaviour", "behaviour_signs"
"""What metrics begin with: `behaviour/<name>`, a share, and `behaviour_signs/<name>`, per 1000 tokens."""


@dataclass(slots=True)
class Tally:
    """What some completions show of one behaviour."""

    num_shown: int = 0
    num_signs: int = 0
    num_completions: int = 0
    num_tokens: int = 0

    def add(self, signs: Signs, num_tokens: int) -> None:
        """Count one completion of so many tokens."""
        self.num_shown += signs.shown
        self.num_signs += signs.count
        self.num_completions += 1
        self.num_tokens += num_tokens

    @property
    def share(self) -> float:
        """Share of completions that show it."""
        return self.num_shown / self.num_completions

    @property
    def per_1000_tokens(self) -> float:
        """Signs per 1000 completion tokens."""
        return 1000 * self.num_signs / self.num_tokens


@dataclass(frozen=True, slots=True)
class BehaviourReader:
    """Finds the signs of the chosen rows in completions."""

    rows: Mapping[str, Row]
    patterns: Mapping[str, tuple[re.Pattern[str], ...]] = field(init=False)

    def __post_init__(self) -> None:
        compiled = {
            name: tuple(bounded_pattern(each, where=f"behaviours: {name}") for each in row.patterns)
            for name, row in self.rows.items()
            if isinstance(row, PatternRow)
        }
        object.__setattr__(self, "patterns", compiled)

    def read(self, text: str, columns: Mapping[str, object]) -> dict[str, Signs]:
        """The signs of each row in a completion, the first `MOST_CHARACTERS` of it.

        Rows that read a Countdown search have none where the problem has no columns `numbers` and `target`.
        """
        text = text[:MOST_CHARACTERS]
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
                count = num_signs(self.patterns[name], within)
                found[name] = Signs(count, count >= row.at_least)
        return {name: found[name] for name in self.rows if name in found}

    def tallies(self, completions: Iterable[tuple[str, Mapping[str, object], int]]) -> dict[str, Tally]:
        """What completions, each a text with its problem's columns and its tokens, show of each row."""
        tallies: dict[str, Tally] = {}
        for text, columns, num_tokens in completions:
            for name, signs in self.read(text, columns).items():
                tallies.setdefault(name, Tally()).add(signs, num_tokens)
        return tallies

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Share and signs per 1000 tokens of each row, over what was sampled: the prefill is the prompt's."""
        sampled = ((each.text, group.prompt.columns, len(each.tokens)) for group in groups for each in group.rollouts)
        tallies = self.tallies(sampled)
        return {f"{SHARE}/{name}": tally.share for name, tally in tallies.items()} | {
            f"{SIGNS}/{name}": tally.per_1000_tokens for name, tally in tallies.items()
        }

    def probes(self) -> Mapping[str, Probe]:
        """The same of held-out completions, in full evaluations; nothing where no row is chosen."""
        if not self.rows:
            return {}
        readings = {f"{SHARE}/{name}": Reading(row.says) for name, row in self.rows.items()}
        per_token = {
            f"{SIGNS}/{name}": Reading(f"{row.says}, signs per 1000 tokens", digits=2)
            for name, row in self.rows.items()
        }
        return {"behaviours": Probe(readings={**readings, **per_token}, measure=self.metrics)}


def num_signs(patterns: Iterable[re.Pattern[str]], text: str) -> int:
    """How many stretches of a text some of the patterns match: matches that overlap are one sign, not several.

    "let me try another way" is one attempt, whichever of its words several patterns know.
    """
    count, end = 0, 0
    for first, last in sorted(match.span() for pattern in patterns for match in pattern.finditer(text)):
        count += first >= end
        end = max(end, last)
    return count
