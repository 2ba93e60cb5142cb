"""Behaviours that are counted in completions: an option of RL runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from posttrain.options.bounds import Bounded, PositiveInt, Rule

Within = Literal["completion", "thinking"]
"""Which part of a completion is read."""


@dataclass(frozen=True, kw_only=True)
class PatternOptions(Bounded):
    """A behaviour that the recipe defines by patterns."""

    any: tuple[str, ...]
    """Regular expressions; each match is a sign.  Case is ignored."""
    at_least: PositiveInt = 1
    """Signs that a completion needs to show the behaviour."""
    within: Within = "completion"
    """`completion`: all of it.  `thinking`: the part before `</think>`."""
    says: str = ""
    """Description where numbers are shown; empty uses the name."""

    rules = (Rule("any", lambda o: o.any, "must have at least one pattern.  Give one."),)


@dataclass(frozen=True, kw_only=True)
class BehaviourOptions(Bounded):
    """Which signs of verification, backtracking, several attempts and the like are counted in completions."""

    measure: tuple[str, ...] = ()
    """Rows of the table of behaviours, by name or by kind: `prose` for words, `search` for the bundled model's
    notation.  Empty measures only `patterns` and `file`."""
    patterns: Mapping[str, object] = field(default_factory=dict)
    """More behaviours: a name to `{any: [regular expressions], at_least: 1, within: completion, says: ""}`."""
    file: str = ""
    """A YAML file with more entries, written like `patterns`."""

    rules = (
        Rule("measure", lambda o: len({*o.measure}) == len(o.measure), "must not have duplicates.  Name each once."),
    )
