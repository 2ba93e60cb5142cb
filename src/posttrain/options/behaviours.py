"""What completions are read for, beside what they earn: an option of runs by reward."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from posttrain.errors import require
from posttrain.options.bounds import Bounded, PositiveInt

Within = Literal["completion", "thinking"]
"""Which part of a completion is read."""


@dataclass(frozen=True, kw_only=True)
class PatternOptions(Bounded):
    """A behaviour of your own that words or marks betray."""

    any: tuple[str, ...]
    """Regular expressions, each match of one a sign; capitals make no difference, and every repeat has a bound."""
    at_least: PositiveInt = 1
    """Signs from which on a completion shows the behaviour."""
    within: Within = "completion"
    """`completion`: all of it.  `thinking`: what stands before `</think>`."""
    says: str = ""
    """What it is called where numbers are shown; its name, if nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.any) > 0, self, "any", "names no pattern; give at least one")


@dataclass(frozen=True, kw_only=True)
class BehaviourOptions:
    """Which signs of verification, backtracking, several attempts and the like are counted in completions."""

    measure: tuple[str, ...] = ()
    """Rows of the table of behaviours, each by its name or all of a kind: `prose` for words, `search` for the bundled
    model's notation.  None, and no pattern of your own, measures nothing."""
    patterns: Mapping[str, object] = field(default_factory=dict)
    """Behaviours of your own: a name to `{any: [regular expressions], at_least: 1, within: completion, says: ""}`."""
    file: str = ""
    """A YAML file of more of them, written as `patterns` are."""

    def __post_init__(self) -> None:
        require(len(set(self.measure)) == len(self.measure), self, "measure", "names one of them twice")
