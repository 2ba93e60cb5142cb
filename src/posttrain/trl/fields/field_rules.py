"""What becomes of a field of TRL's configs: an option of ours, a word about it, or an error.  None is ignored.

Each config has a table, name -> Rule, that its objects are checked by and that the page of all fields is made of.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
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
    """Values beside the default that mean what happens here anyway, and need no line."""
    reads: Mapping[object, str] = field(default_factory=dict)
    """Of a refused field: values that are accepted, each with a line that says what is used in their place."""
    keys: Mapping[str, "Rule"] = field(default_factory=dict)
    """Of a field that is a mapping: what becomes of each name in it, treated as a field."""
    detail: Callable[[Any], str] | None = None
    """Ends the line about a field with numbers of the config."""
    numbers: Numbers | None = None
    """Of a field that is a number, or a list of them: which ones."""


def supported(ours: str, says: str = "", *, numbers: Numbers | None = None) -> Rule:
    """Ours by another name."""
    return Rule(treatment=Treatment.SUPPORTED, ours=ours, says=says, numbers=numbers)


def translated(ours: str, says: str, *, numbers: Numbers | None = None) -> Rule:
    """An old name."""
    return Rule(treatment=Treatment.TRANSLATED, ours=ours, says=says, numbers=numbers)


def idle(says: str, *honours: object, detail: Callable[[Any], str] | None = None) -> Rule:
    """Nothing here is tuned by it."""
    return Rule(treatment=Treatment.IDLE, says=says, honours=honours, detail=detail)


def refused(says: str, *honours: object, reads: Mapping[object, str] | None = None) -> Rule:
    """Not here, but for the default and values that mean the same, silently or with a line."""
    return Rule(treatment=Treatment.REFUSED, says=says, honours=honours, reads=reads or {})


Rules = Mapping[str, Rule]


class CheckedFields:
    """What the configs share: names that are unknown are refused by name, and enums are read as their values."""

    def __new__(cls, *args: object, **given: object) -> "CheckedFields":
        """Refuse a keyword that is not a field, before the dataclass does it without a remedy."""
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
        raise UserError(f"{where} = {text!r:.80} is not JSON ({error}); write it as '{{\"name\": value}}'.") from error


def mapping_of(config: CheckedFields, name: str) -> dict[str, Any]:
    """What a field says by name; nothing where it is left out.  Raises UserError for what is not a mapping."""
    value = vars(config)[name]
    if value is not None and not isinstance(value, Mapping):
        raise UserError(
            f"{type(config).__name__}: {name} = {value!r:.80} is not a mapping; give a dict, or JSON on a command line."
        )
    return dict(value or {})


def require_numbers(config: CheckedFields, rules: Rules) -> None:
    """Refuse a number that a field cannot be, by the field's name."""
    for name, value in given_fields(config, rules).items():
        numbers = rules[name].numbers
        if numbers is None:
            continue
        for each in value if isinstance(value, list | tuple) else [value]:
            require_number(type(config).__name__, name, each, numbers)


def lines_about(config: CheckedFields, rules: Rules) -> Iterator[str]:
    """A line for each field that is renamed or has nothing to set.  Raises UserError at the first that is refused."""
    defaults = default_values(type(config))
    for name, value in given_fields(config, rules).items():
        rule = rules[name]
        if any(same(value, each) for each in (defaults[name], *rule.honours)):
            continue
        if rule.keys and isinstance(value, Mapping):
            for key, each in value.items():
                if key not in rule.keys:
                    raise UserError(f"{type(config).__name__}: {name}: {key} = {each!r:.80}: {rule.says}")
                yield from lines_about_value(config, f"{name}: {key}", each, rule.keys[key])
        else:
            yield from lines_about_value(config, name, value, rule)


def lines_about_value(config: CheckedFields, name: str, value: object, rule: Rule) -> Iterator[str]:
    """The line of one field that is not its default, if there is one."""
    told = f"{name} = {value!r:.80}"
    if rule.treatment is Treatment.REFUSED:
        read = next((line for each, line in rule.reads.items() if same(value, each)), None)
        if read is None:
            raise UserError(f"{type(config).__name__}: {told}: {rule.says}")
        yield f"{told} {read}"
    if rule.treatment is Treatment.TRANSLATED:
        yield f"{told} {rule.says}"
    if rule.treatment is Treatment.IDLE:
        detail = f"  {rule.detail(config)}" if rule.detail is not None else ""
        yield f"{told} sets nothing here: {rule.says}{detail}"


def given_fields(config: CheckedFields, rules: Rules) -> dict[str, Any]:
    """The fields that have a rule.  A script's subclass may add fields, which only the script reads."""
    return {name: value for name, value in vars(config).items() if name in rules}


def same(value: object, other: object) -> bool:
    """Equality that tells 1 from True."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def default_values(config: type[CheckedFields]) -> dict[str, Any]:
    """The value of each field where a script leaves it out."""
    return {
        each.name: each.default_factory() if callable(each.default_factory) else each.default
        for each in fields(config)  # type: ignore[arg-type]  # a dataclass, as all that inherit are
    }
