"""What becomes of a field of TRL's configs: an option of ours, a line about it, or an error.

A config declares each field once: `temperature: Annotated[float, above(0), sets("rollout.temperature")] = 1.0`.
`rules_of` reads these rules.  Checks, messages and the page of all fields are made of them.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from inspect import get_annotations
from numbers import Real
from types import NoneType
from typing import Any, get_args


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The numbers that a field may be; NaN is never one of them."""

    least: float = -math.inf
    most: float = math.inf
    above: bool = False
    """Whether `least` itself is too small."""
    below: bool = False
    """Whether `most` itself is too large."""
    integer: bool = False
    integer_from_one: bool = False
    """Below 1 a share of the run; from 1 on a count, which is an integer."""
    infinite: bool = False
    or_none: bool = False
    """Set where the field's type has None, unless the field is `required`."""
    required: bool = False

    def allow(self, value: object) -> bool:
        if value is None:
            return self.or_none
        if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(float(value)):
            return False
        number = float(value)
        if math.isinf(number) and not self.infinite:
            return False
        too_low = number <= self.least if self.above else number < self.least
        too_high = number >= self.most if self.below else number > self.most
        counts = self.integer or (self.integer_from_one and number >= 1)
        return not too_low and not too_high and not (counts and not number.is_integer())

    def __str__(self) -> str:
        parts = ["a whole number" if self.integer else "a number"]
        lowest = [f"{'>' if self.above else '>='} {self.least:g}"] if self.least > -math.inf else []
        highest = [f"{'<' if self.below else '<='} {self.most:g}"] if self.most < math.inf else []
        parts += [" and ".join(lowest + highest)] if lowest + highest else []
        parts += ["(below 1 a share of the run, from 1 on whole)"] if self.integer_from_one else []
        return " ".join(parts + (["or None"] if self.or_none else []))


def ints(least: float, *, required: bool = False) -> Numbers:
    return Numbers(least=least, integer=True, required=required)


def above(least: float) -> Numbers:
    return Numbers(least=least, above=True)


def at_least(least: float, *, infinite: bool = False) -> Numbers:
    return Numbers(least=least, infinite=infinite)


def between(least: float, most: float, *, above: bool = False, below: bool = False) -> Numbers:
    """Numbers from one to the other; `above` and `below` exclude the ends."""
    return Numbers(least=least, most=most, above=above, below=below)


def frequency(least: float, *, above: bool = False) -> Numbers:
    """Updates between two events, or a share of all updates."""
    return Numbers(least=least, above=above, integer_from_one=True)


@dataclass(frozen=True, slots=True)
class Choices:
    """The texts that a field may be."""

    known: tuple[str, ...]
    flags: bool = False
    """Whether True and False are allowed, as in older versions."""

    def allow(self, value: object) -> bool:
        return value in self.known or (self.flags and isinstance(value, bool))

    def __str__(self) -> str:
        return f"{', '.join(self.known[:-1])} or {self.known[-1]}"


def any_of(*known: str, flags: bool = False) -> Choices:
    return Choices(known, flags)


class Treatment(StrEnum):
    """What a field of TRL's is here."""

    SUPPORTED = "supported"
    """It does what it does in TRL, by one or more options of ours."""
    RENAMED = "renamed"
    """An old name, read as the new one, with a line about it."""
    IDLE = "nothing to set"
    """What it tunes does not exist here and changes no number; a value other than the default gets a line."""
    REFUSED = "refused"
    """Any value but the default and `honours` is an error that names the alternative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRule:
    """What becomes of one field."""

    treatment: Treatment
    ours: str = ""
    """Options of ours that it sets, as recipes name them.  A leading dot stands for the config's section."""
    says: str = ""
    """How, or why not and what to do instead.  `{rows}` is what the trainer learns."""
    honours: tuple[object, ...] = ()
    """Values besides the default that mean what happens here anyway, and need no line."""
    reads: Mapping[object, str] = field(default_factory=dict)
    """Values of a refused field that are accepted, each with the line that says what is used instead."""
    keys: Mapping[str, "FieldRule"] = field(default_factory=dict)
    """What becomes of each key of a field that is a mapping, treated as a field."""
    detail: Callable[[Any], str] | None = None
    """Ends the line about a field with numbers of the config."""
    values: Numbers | Choices | None = None
    """What the field may be, or each of its list; None for any value of its type."""


def sets(ours: str, says: str = "") -> FieldRule:
    return FieldRule(treatment=Treatment.SUPPORTED, ours=ours, says=says)


def renamed(ours: str, says: str) -> FieldRule:
    return FieldRule(treatment=Treatment.RENAMED, ours=ours, says=says)


def idle(says: str, *honours: object, detail: Callable[[Any], str] | None = None) -> FieldRule:
    return FieldRule(treatment=Treatment.IDLE, says=says, honours=honours, detail=detail)


def refused(says: str, *honours: object, **more: Any) -> FieldRule:
    """`more` are the values that it `reads`, and the `keys` of a mapping."""
    return FieldRule(treatment=Treatment.REFUSED, says=says, honours=honours, **more)


FieldRules = Mapping[str, FieldRule]


def rules_of(config: type) -> FieldRules:
    """What becomes of each field of a config.

    A script's subclass may declare a field again, with another default; the rule remains.  Fields that it adds have
    no rule, and only the script reads them.
    """
    section, rows = getattr(config, "recipe_section", ""), getattr(config, "row_kind", "")
    found: dict[str, FieldRule] = {}
    for kind in (each for each in reversed(config.__mro__) if each.__module__.startswith("posttrain.trl.")):
        for name, hint in get_annotations(kind).items():
            parts = getattr(hint, "__metadata__", ())
            for rule in (each for each in parts if isinstance(each, FieldRule)):
                values = next((each for each in parts if isinstance(each, Numbers | Choices)), None)
                if isinstance(values, Numbers) and NoneType in get_args(get_args(hint)[0]):
                    values = replace(values, or_none=not values.required)
                ours = re.sub(r"(^| )\.", rf"\1{section}.", rule.ours).replace("{rows}", rows)
                found[name] = replace(rule, ours=ours, says=rule.says.replace("{rows}", rows), values=values)
    return found
