"""What becomes of a field of TRL's configs: an option of ours, a word about it, or an error.  None is ignored.

Each config has a table, name -> Rule, that its objects are checked by and that the page of all fields is made of.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum, StrEnum
from typing import Any, get_type_hints

from posttrain.errors import UserError
from posttrain.schemas import did_you_mean
from posttrain.trl.fields.number_rules import Numbers, require_number


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
    numbers: Numbers | None = None
    """Of a field that is a number, or a list of them: which ones."""


def supported(ours: str, says: str = "", *, numbers: Numbers | None = None) -> Rule:
    """Ours by another name."""
    return Rule(treatment=Treatment.SUPPORTED, ours=ours, says=says, numbers=numbers)


def translated(ours: str, says: str, *, numbers: Numbers | None = None) -> Rule:
    """An old name."""
    return Rule(treatment=Treatment.TRANSLATED, ours=ours, says=says, numbers=numbers)


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
        known = mappings(type(self))
        for name, value in vars(self).items():
            if isinstance(value, Enum):
                object.__setattr__(self, name, value.value)
            elif isinstance(value, str) and name in known:
                object.__setattr__(self, name, read_mapping(f"{type(self).__name__}: {name}", value))


def mappings(config: type[CheckedFields]) -> frozenset[str]:
    """Fields that may be a mapping; told from hints, as transformers' parser writes other types into the fields."""
    return frozenset(name for name, kind in get_type_hints(config).items() if "dict[" in str(kind))


def read_mapping(where: str, text: str) -> object:
    """A mapping, as a command line says it.  What does not begin as JSON does is the name of a file, or nothing."""
    if not text.startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{where} = {text!r:.80} is no JSON ({error}); write it as '{{\"name\": value}}'.") from error


def mapping_of(config: CheckedFields, name: str) -> dict[str, Any]:
    """What a field says by name; nothing where it is left out.  Raises UserError for what is no mapping."""
    value = vars(config)[name]
    if value is not None and not isinstance(value, Mapping):
        raise UserError(
            f"{type(config).__name__}: {name} = {value!r:.80} is no mapping; give a dict, or JSON on a command line."
        )
    return dict(value or {})


def require_numbers(config: CheckedFields, rules: Rules) -> None:
    """Refuse a number that a field cannot be, by the field's name."""
    for name, value in vars(config).items():
        numbers = rules[name].numbers
        if numbers is None:
            continue
        for each in value if isinstance(value, list | tuple) else [value]:
            require_number(type(config).__name__, name, each, numbers)


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
