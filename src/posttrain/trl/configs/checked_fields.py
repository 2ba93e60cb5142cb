"""The checks of all configs, made of the rules of their fields."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from enum import Enum
from typing import Any, ClassVar, TypeVar, get_type_hints

from posttrain.errors import UserError
from posttrain.schemas import did_you_mean
from posttrain.trl.configs.field_rules import FieldRule, FieldRules, Numbers, Treatment, rules_of

FORMER_NAMES = {"rloo_k": "num_generations", "kl_coef": "beta"}
"""Fields by their names in older releases of TRL."""


class CheckedFields:
    """What configs share: an unknown name is refused with the nearest field, and enums are read as their values."""

    recipe_section: ClassVar[str] = ""
    """The section of a recipe that a leading dot in a rule stands for."""
    row_kind: ClassVar[str] = "rows"
    """What the trainer learns, in the words of rules."""
    field_rules: ClassVar[FieldRules]

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        cls.field_rules = rules_of(cls)

    def __new__(cls, *args: object, **given: object) -> "CheckedFields":
        """Refuse a keyword that is not a field before the dataclass does, whose message has no remedy."""
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
                object.__setattr__(self, name, read_mapping(f"{type(self).__name__}: {name}", value))


Config = TypeVar("Config", bound=CheckedFields)


def mappings(config: type[CheckedFields]) -> frozenset[str]:
    """Fields that may be a mapping.  Read from hints, because transformers' parser replaces the types of fields."""
    return frozenset(name for name, kind in get_type_hints(config).items() if "dict[" in str(kind))


def read_mapping(where: str, text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{where} = {text!r:.80} is not JSON ({error}); write it as '{{\"name\": value}}'.") from error


def mapping_of(config: CheckedFields, name: str) -> dict[str, Any]:
    """The keys and values of a field; empty for None."""
    value = vars(config)[name]
    if value is not None and not isinstance(value, Mapping):
        kind = type(config).__name__
        raise UserError(f"{kind}: {name} = {value!r:.80} is not a mapping; give a dict, or JSON on a command line.")
    return dict(value or {})


def require_values(config: CheckedFields) -> None:
    """Refuse a number, or a choice, that a field cannot be."""
    for name, rule in config.field_rules.items():
        value, values = vars(config)[name], rule.values
        for each in value if isinstance(values, Numbers) and isinstance(value, list | tuple) else [value]:
            if values is not None and not values.allow(each):
                raise UserError(f"{type(config).__name__}: {name} = {each!r:.40}: use {values}.")


def lines_about(config: CheckedFields) -> Iterator[str]:
    """A line for each field that is renamed or has nothing to set.  Raises UserError at the first that is refused."""
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
    """The line about one field that is not its default, if there is one."""
    given = f"{name} = {value!r:.80}"
    match rule.treatment:
        case Treatment.REFUSED:
            read = next((line for each, line in rule.reads.items() if equal_values(value, each)), None)
            if read is None:
                raise UserError(f"{type(config).__name__}: {given}: {rule.says}")
            yield f"{given} {read}"
        case Treatment.RENAMED:
            yield f"{given} {rule.says}"
        case Treatment.IDLE:
            detail = f"  {rule.detail(config)}" if rule.detail is not None else ""
            yield f"{given} sets nothing here: {rule.says}{detail}"


def equal_values(value: object, other: object) -> bool:
    """Equality that tells 1 from True."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def default_values(config: type) -> dict[str, Any]:
    return {
        each.name: each.default_factory() if callable(each.default_factory) else each.default for each in fields(config)
    }


def trl_defaults(config: type) -> dict[str, Any]:
    """The defaults of the config of ours that a script's subclass extends: another default is a value it sets."""
    return default_values(next(kind for kind in config.__mro__ if kind.__module__.startswith("posttrain.trl.")))


@contextmanager
def errors_by_field(config: CheckedFields) -> Iterator[None]:
    """Begin a message that names options of ours with the fields that set them."""
    try:
        yield
    except UserError as error:
        names = fields_named(str(error), config)
        if not names:
            raise
        raise type(error)(f"{type(config).__name__}: {', '.join(names)}: {error}") from error


def fields_named(message: str, config: CheckedFields) -> list[str]:
    """The fields that set the options which a message names; none if it begins with the name of a field already."""
    if message.startswith(f"{type(config).__name__}: "):
        return []
    by_option: dict[str, list[str]] = {}
    for name, rule in config.field_rules.items():
        for option in rule.ours.split(","):
            by_option.setdefault(option.strip(), []).append(name)
    defaults = trl_defaults(type(config))
    found: dict[str, None] = {}
    for option, names in by_option.items():
        if names_option(message, option):
            changed = [name for name in names if not equal_values(vars(config)[name], defaults[name])]
            found |= dict.fromkeys(changed or names[:1])
    return [*found]


def names_option(message: str, option: str) -> bool:
    """Whether a message names an option by its path, or begins with "name = ", as messages of a section do."""
    section, _, name = option.rpartition(".")
    named = re.search(rf"(?<![\w.]){re.escape(option)}(?![\w.]*\w)", message) or message.startswith(f"{name} = ")
    return bool(section and name != "*" and named)


def config_from(given: object, kind: type[Config]) -> tuple[Config, list[str]]:
    """A config of ours as it is; or one made of transformers' or TRL's arguments, with a line about it.

    As in TRL, a field that a script leaves out has the default of the class that it gives: a rate of 5e-5.
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
