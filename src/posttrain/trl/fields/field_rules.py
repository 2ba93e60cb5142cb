"""What becomes of a field of TRL's configs: an option of ours, a word about it, or an error.  None is ignored.

Each config has a table, name -> Rule, that its objects are checked by and that the page of all fields is made of.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum, StrEnum
from typing import Any

from posttrain.errors import UserError
from posttrain.schemas import did_you_mean


class Treatment(StrEnum):
    """What a field of TRL's is here."""

    SUPPORTED = "supported"
    """It does what it does in TRL, by one or more options of ours."""
    TRANSLATED = "renamed"
    """A name that TRL has dropped, or that says what another says: read as that, with a line that says so."""
    IDLE = "nothing to set"
    """What it tunes does not exist here and changes no number; another value than the default is told in a line."""
    REFUSED = "refused"
    """Any other value than those that are honoured is an error that names the alternative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What becomes of one field."""

    treatment: Treatment
    ours: str = ""
    """Options of ours that it sets, as recipes name them."""
    says: str = ""
    """How, where names do not say it; or why not, and what to do instead."""
    honours: tuple[object, ...] = ()
    """Of a refused field: values beside the default that mean what happens here anyway."""


def supported(ours: str, says: str = "") -> Rule:
    """Ours by another name."""
    return Rule(treatment=Treatment.SUPPORTED, ours=ours, says=says)


def translated(ours: str, says: str) -> Rule:
    """An old name."""
    return Rule(treatment=Treatment.TRANSLATED, ours=ours, says=says)


def idle(says: str) -> Rule:
    """Nothing here is tuned by it."""
    return Rule(treatment=Treatment.IDLE, says=says)


def refused(says: str, *honours: object) -> Rule:
    """Not here, but for the default and values that mean the same."""
    return Rule(treatment=Treatment.REFUSED, says=says, honours=honours)


Rules = Mapping[str, Rule]


class CheckedFields:
    """What the configs share: names that are unknown are refused by name, and enums are read as their values."""

    def __new__(cls, *args: object, **given: object) -> "CheckedFields":
        """Refuse a keyword that is no field, before the dataclass does it without a remedy."""
        known = [each.name for each in fields(cls)]  # type: ignore[arg-type]  # a dataclass, as all that inherit are
        for name in given:
            if name not in known:
                raise UserError(f"{cls.__name__}: there is no field {name!r}.  {did_you_mean(name, known)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, Enum):
                object.__setattr__(self, name, value.value)
            elif isinstance(value, str) and value.startswith("{"):  # a mapping, as a command line says it
                object.__setattr__(self, name, json.loads(value))


def lines_about(config: CheckedFields, rules: Rules) -> Iterator[str]:
    """A line for each field that is renamed or has nothing to set.  Raises UserError at the first that is refused."""
    defaults = default_values(type(config))
    for name, value in vars(config).items():
        rule = rules[name]
        if same(value, defaults[name]):
            continue
        if rule.treatment is Treatment.REFUSED and not any(same(value, each) for each in rule.honours):
            raise UserError(f"{type(config).__name__}: {name} = {value!r:.80}: {rule.says}")
        if rule.treatment is Treatment.TRANSLATED:
            yield f"{name} = {value!r:.80} {rule.says}"
        if rule.treatment is Treatment.IDLE:
            yield f"{name} = {value!r:.80} sets nothing here: {rule.says}"


def same(value: object, other: object) -> bool:
    """Equality that tells 1 from True."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def default_values(config: type[CheckedFields]) -> dict[str, Any]:
    """The value of each field where a script leaves it out."""
    return {
        each.name: each.default_factory() if callable(each.default_factory) else each.default
        for each in fields(config)  # type: ignore[arg-type]  # a dataclass, as all that inherit are
    }
