"""What a field of TRL's configs does here: set an option, print a note, or raise an error.

A config declares each field once: `temperature: Annotated[float, above(0), sets("rollout.temperature")] = 1.0`.
`rules_of` reads these rules.  Checks, messages and the page of all fields are made from them.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from enum import Enum, StrEnum
from functools import partial
from inspect import get_annotations
from numbers import Real
from types import NoneType
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

from posttrain.errors import UserError
from posttrain.schemas import did_you_mean


@dataclass(frozen=True, slots=True)
class Numbers:
    """The allowed numbers of a field; NaN is never allowed."""

    least: float = -math.inf
    most: float = math.inf
    _: KW_ONLY
    above: bool = False
    """Whether `least` itself is too small."""
    below: bool = False
    """Whether `most` itself is too large."""
    integer: bool = False
    shares: bool = False
    """Below 1, a share of the run; from 1 on, an integer count."""
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
        counts = self.integer or (self.shares and number >= 1)
        return not too_low and not too_high and not (counts and not number.is_integer())

    def __str__(self) -> str:
        parts = ["a whole number" if self.integer else "a number"]
        lowest = [f"{'>' if self.above else '>='} {self.least:g}"] if self.least > -math.inf else []
        highest = [f"{'<' if self.below else '<='} {self.most:g}"] if self.most < math.inf else []
        parts += [" and ".join(lowest + highest)] if lowest + highest else []
        parts += ["(below 1 a share of the run, from 1 on whole)"] if self.shares else []
        return " ".join(parts + (["or None"] if self.or_none else []))


ints, above = partial(Numbers, integer=True), partial(Numbers, above=True)


@dataclass(frozen=True, slots=True)
class Choices:
    """The allowed texts of a field."""

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
    """The kinds of rules for TRL's fields."""

    SUPPORTED = "supported"
    """Works as in TRL, through one or more of our options."""
    RENAMED = "renamed"
    """An old name, read as the new one, with a note."""
    IDLE = "nothing to set"
    """What it tunes does not exist here and does not change results; values other than the default get a note."""
    REFUSED = "refused"
    """Any value except the default and `honours` is an error that names the alternative."""


@dataclass(frozen=True, slots=True)
class FieldRule:
    """The rule for one field."""

    treatment: Treatment
    ours: str = ""
    """Our options that it sets, as recipes name them.  A leading dot stands for the config's section."""
    says: str = ""
    """How it works, or why not and what to do instead.  `{rows}` is what the trainer learns."""
    _: KW_ONLY
    honours: tuple[object, ...] = ()
    """Values besides the default that mean what happens here anyway, without a note."""
    reads: Mapping[str, str] = field(default_factory=dict)
    """Accepted values of a rejected field, each with the note that says what is used instead."""
    keys: Mapping[str, "FieldRule"] = field(default_factory=dict)
    """The rule of each key, for a field that is a mapping."""
    detail: Callable[[Any], str] | None = None
    """Adds numbers of the config to the note about a field."""
    values: Numbers | Choices | None = None
    """The allowed values of the field, or of each list item; None: any value of its type."""


sets, old_name = partial(FieldRule, Treatment.SUPPORTED), partial(FieldRule, Treatment.RENAMED)


def idle(says: str, *honours: object, detail: Callable[[Any], str] | None = None) -> FieldRule:
    return FieldRule(Treatment.IDLE, says=says, honours=honours, detail=detail)


def refused(says: str, *honours: object, **more: Any) -> FieldRule:
    """`more` are the values that it `reads`, and the `keys` of a mapping."""
    return FieldRule(Treatment.REFUSED, says=says, honours=honours, **more)


FieldRules = Mapping[str, FieldRule]


def rules_of(config: type) -> FieldRules:
    """The rule for each field of a config.

    A script's subclass may redeclare a field with another default; the rule stays.  Fields that it adds do not have a
    rule, and only the script reads them.
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


FORMER_NAMES = {"rloo_k": "num_generations", "kl_coef": "beta"}
"""Fields by their names in older releases of TRL."""


class CheckedFields:
    """Base of all configs: an error for an unknown name shows the nearest field; enums are read as their values."""

    recipe_section: ClassVar[str] = ""
    """The section of a recipe that a leading dot in a rule stands for."""
    row_kind: ClassVar[str] = "rows"
    """What the trainer learns, in the words of rules."""
    field_rules: ClassVar[FieldRules]

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        cls.field_rules = rules_of(cls)

    def __new__(cls, *args: object, **given: object) -> "CheckedFields":
        """Reject a keyword that is not a field before the dataclass does, since its message does not have a remedy."""
        known = [each.name for each in fields(cls)]  # type: ignore[arg-type]  # all that inherit are dataclasses
        for name in given.keys() - {*known}:
            now = FORMER_NAMES.get(name, "")
            remedy = f"TRL calls it `{now}` now." if now in known else did_you_mean(name, known)
            raise UserError(f"{cls.__name__}: there is no field {name!r}.  {remedy}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        known = mappings(type(self))
        for name, value in vars(self).items():
            if isinstance(value, Enum):
                object.__setattr__(self, name, value.value)
            elif isinstance(value, str) and value.startswith("{") and name in known:
                try:
                    object.__setattr__(self, name, json.loads(value))
                except ValueError as error:
                    given = f"{type(self).__name__}: {name} = {value!r:.80}"
                    raise UserError(f"{given} is not JSON ({error}); write it as '{{\"name\": value}}'.") from error


Config = TypeVar("Config", bound=CheckedFields)


def mappings(config: type[CheckedFields]) -> frozenset[str]:
    """Fields that may be a mapping.  Read from hints, because transformers' parser replaces the types of fields."""
    return frozenset(name for name, kind in get_type_hints(config).items() if "dict[" in str(kind))


def mapping_of(config: CheckedFields, name: str) -> dict[str, Any]:
    """The keys and values of a field; empty for None."""
    value = vars(config)[name]
    if value is not None and not isinstance(value, Mapping):
        kind = type(config).__name__
        raise UserError(f"{kind}: {name} = {value!r:.80} is not a mapping; give a dict, or JSON on a command line.")
    return dict(value or {})


def require_values(config: CheckedFields) -> None:
    """Reject a number or a choice that a field does not allow."""
    for name, rule in config.field_rules.items():
        value, values = vars(config)[name], rule.values
        for each in value if isinstance(values, Numbers) and isinstance(value, list | tuple) else [value]:
            if values is not None and not values.allow(each):
                raise UserError(f"{type(config).__name__}: {name} = {each!r:.40}: use {values}.")


def lines_about(config: CheckedFields) -> Iterator[str]:
    """A note for each field that is renamed or has nothing to set.  Raises UserError at the first rejected field."""
    defaults = trl_defaults(type(config))
    for name, rule in config.field_rules.items():
        value = vars(config)[name]
        if any(equal_values(value, each) for each in (defaults[name], *rule.honours)):
            continue
        if rule.keys and isinstance(value, Mapping):
            for key, each in value.items():
                if key not in rule.keys:
                    raise UserError(f"{type(config).__name__}: {name}: {key} = {each!r:.80}: {rule.says}")
                yield from lines_about_value(config, f"{name}: {key}", each, rule.keys[key])
        else:
            yield from lines_about_value(config, name, value, rule)


def lines_about_value(config: CheckedFields, name: str, value: object, rule: FieldRule) -> Iterator[str]:
    """The note about a field that is not at its default, if any."""
    given = f"{name} = {value!r:.80}"
    match rule.treatment:
        case Treatment.REFUSED:
            if not isinstance(value, str) or value not in rule.reads:
                raise UserError(f"{type(config).__name__}: {given}: {rule.says}")
            yield f"{given} {rule.reads[value]}"
        case Treatment.RENAMED:
            yield f"{given} {rule.says}"
        case Treatment.IDLE:
            detail = f"  {rule.detail(config)}" if rule.detail is not None else ""
            yield f"{given} sets nothing here: {rule.says}{detail}"


def equal_values(value: object, other: object) -> bool:
    """Equality that distinguishes 1 from True."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def default_values(config: type) -> dict[str, Any]:
    return {one.name: one.default_factory() if callable(one.default_factory) else one.default for one in fields(config)}


def trl_defaults(config: type) -> dict[str, Any]:
    """The defaults of our config that a script's subclass extends: another default counts as a set value."""
    return default_values(next(kind for kind in config.__mro__ if kind.__module__.startswith("posttrain.trl.")))


@contextmanager
def errors_by_field(config: CheckedFields) -> Iterator[None]:
    """Start a message that names our options with the fields that set them."""
    try:
        yield
    except UserError as error:
        names = fields_named(str(error), config)
        if not names:
            raise
        raise type(error)(f"{type(config).__name__}: {', '.join(names)}: {error}") from error


def fields_named(message: str, config: CheckedFields) -> list[str]:
    """The fields that set the options in a message; none if it already begins with a field's name."""
    if message.startswith(f"{type(config).__name__}: "):
        return []
    by_option: dict[str, list[str]] = {}
    for name, rule in config.field_rules.items():
        for option in rule.ours.split(","):
            by_option.setdefault(option.strip(), []).append(name)
    defaults = trl_defaults(type(config))
    found: dict[str, None] = {}
    for option, names in by_option.items():
        section, _, last = option.rpartition(".")
        # By its path, or by "name = " at the beginning, as messages of a section do.
        named = re.search(rf"(?<![\w.]){re.escape(option)}(?![\w.]*\w)", message) or message.startswith(f"{last} = ")
        if section and last != "*" and named:
            changed = [name for name in names if not equal_values(vars(config)[name], defaults[name])]
            found |= dict.fromkeys(changed or names[:1])
    return [*found]


def config_from(given: object, kind: type[Config]) -> tuple[Config, list[str]]:
    """Our config, unchanged; or one made from transformers' or TRL's arguments, with a note.

    As in TRL, a field that a script leaves out has the default of the given class, such as a rate of 5e-5.
    """
    if isinstance(given, kind):
        return given, []
    from transformers import TrainingArguments

    if not isinstance(given, TrainingArguments):
        raise UserError(f"args: {type(given).__name__} is given.  Give {kind.__name__}.")
    ours, untouched = default_values(kind), TrainingArguments(output_dir=given.output_dir, use_cpu=given.use_cpu)
    values: dict[str, Any] = {}
    for each in fields(given):
        value = getattr(given, each.name)
        basis = each.default if each.name == "use_cpu" else getattr(untouched, each.name, each.default)
        left_out = equal_values(value, basis)
        if left_out and (each.name not in ours or equal_values(ours[each.name], each.default)):
            continue
        if each.name in ours or not equal_values(value, each.default):
            values[each.name] = value
    made = kind(**values | {"output_dir": given.output_dir})
    return made, [f"args: {type(given).__name__} is read as {kind.__name__}."]
