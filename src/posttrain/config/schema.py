"""What each section of a recipe may hold, and the one place where its content is checked against that.

A section is a frozen dataclass beside the code it configures.  Some have variants, chosen by their `name`, as `task`
does; the options of `algorithm` are the signature of the function so named.
"""

import inspect
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from posttrain.binding import unknown
from posttrain.errors import UserError
from posttrain.options.irl_method import FEATURE_OPTIONS, METHOD_OPTIONS
from posttrain.options.irl_world import DEMONSTRATION_OPTIONS, WORLD_OPTIONS
from posttrain.options.reward import RewardOptions
from posttrain.options.task import TASK_OPTIONS

STRICT = ConfigDict(extra="forbid")

CLASSES: dict[str, tuple[str, Mapping[str, type]]] = {
    "task": ("countdown", TASK_OPTIONS),
    "world": ("icy_grid", WORLD_OPTIONS),
    "demonstrations": ("sampled", DEMONSTRATION_OPTIONS),
    "features": ("states", FEATURE_OPTIONS),
    "method": ("causal", METHOD_OPTIONS),
}
"""Sections whose class is chosen by `name`: the default name, and every class by name."""


@dataclass(frozen=True)
class Mistake:
    """Something in a section that its schema does not allow."""

    path: tuple[str, ...]
    """From the section's name down."""
    says: str
    """How a message goes on after the path."""
    unknown: bool = False
    """No field of this name exists."""


def section_names(kind: type) -> list[str]:
    """The sections of a kind of recipe, in order."""
    return [each.name for each in fields(kind)]


def section_type(kind: type, section: str, content: object) -> Any:
    """The type of a section, which may depend on the `name` in it."""
    if section in CLASSES:
        default, classes = CLASSES[section]
        return classes[chosen(section, content, default, list(classes))]
    if section == "algorithm":
        return algorithm_type(chosen(section, content, "grpo", algorithm_names()))
    return get_type_hints(kind)[section]


def chosen(section: str, content: object, default: str, names: list[str]) -> str:
    """The variant that a section names."""
    name = content.get("name", default) if isinstance(content, Mapping) else default
    if name not in names:
        raise UserError(f"{section}.name = {name}: {unknown(section, name, names)}")
    return str(name)


def algorithm_names() -> list[str]:
    """The names in the algorithm table."""
    from posttrain.algorithms.table import ALGORITHMS

    return list(ALGORITHMS)


@cache
def algorithm_type(name: str) -> type:
    """An algorithm's signature as a dataclass: its name and its options."""
    from posttrain.algorithms.table import ALGORITHMS

    function = ALGORITHMS[name]
    hints = get_type_hints(function)
    options = [
        (parameter.name, hints[parameter.name], field(default=parameter.default))
        for parameter in inspect.signature(function).parameters.values()
    ]
    choices = Literal[tuple(ALGORITHMS)]  # type: ignore[valid-type]
    return make_dataclass(
        name,
        [("name", choices, field(default=name)), *options],
        frozen=True,
        kw_only=True,
        namespace={"__doc__": function.__doc__},
    )


@cache
def lenient(options: type) -> type:
    """A section's class without its rules between fields: those are for when every source has been heard.

    A field without a default is None until then.
    """
    hints, missing = get_type_hints(options), required(options)
    namespace = {
        "__module__": options.__module__,
        "__doc__": options.__doc__,
        "__annotations__": {name: hints[name] for name in missing},
        "__post_init__": lambda self: None,
        "__pydantic_config__": STRICT,
        **dict.fromkeys(missing),
    }
    return dataclass(frozen=True, kw_only=True)(type(options.__name__, (options,), namespace))


def required(options: Any) -> list[str]:
    """The fields of an options class that have no default."""
    return [each.name for each in fields(options) if each.default is MISSING and each.default_factory is MISSING]


def checked(section: str, options: Any, content: object) -> tuple[Any, list[Mistake]]:
    """The content of a section as (lenient) objects of its type, and what is wrong with it.

    Through JSON, because pydantic is strict there and still makes tuples of lists: "8" and true are no numbers.
    """
    target: Any = tuple[lenient(RewardOptions), ...] if section == "rewards" else lenient(options)  # type: ignore[misc]
    try:
        return TypeAdapter(target).validate_json(json.dumps(content, default=spoken), strict=True), []
    except ValidationError as errors:
        return None, [mistake(section, error) for error in errors.errors(include_url=False)]


def spoken(value: Any) -> object:
    """What Python code may write in a section and JSON has no word for."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def mistake(section: str, error: Any) -> Mistake:
    """What pydantic found, in our words."""
    path = (section, *(str(part) for part in error["loc"]))
    match error["type"]:
        case "unexpected_keyword_argument":
            return Mistake(path, ": no such field", unknown=True)
        case "missing":
            return Mistake(path, " is missing; it has no default")
        case "value_error":  # a rule between the fields of a section within a section
            return Mistake(path, f".{error['ctx']['error']}")
        case "dataclass_type":
            rule = "should be a mapping of names to values"
        case "tuple_type":
            rule = "should be a list"
        case _:
            rule = error["msg"].replace("Input should", "should").replace("a valid integer", "a whole number")
    return Mistake(path, f" = {shown(error['input'])} {rule.replace('a valid ', 'a ')}")


def shown(value: object) -> str:
    """A given value on one line; a long one cut."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def names_at(options: Any, path: tuple[str, ...]) -> list[str]:
    """The names that exist where a path leads, from a section's type down."""
    options = unwrapped(options)
    for part in path:
        if is_dataclass(options) and not part.isdigit():  # a digit is a place in a list
            options = unwrapped(get_type_hints(options).get(part))
    return [each.name for each in fields(options)] if is_dataclass(options) else []


def unwrapped(annotation: Any) -> Any:
    """`X` of `X | None` and of `tuple[X, ...]`; other types as they are."""
    arguments = [each for each in get_args(annotation) if each not in (NoneType, Ellipsis)]
    if get_origin(annotation) is not Literal and len(arguments) == 1:
        return unwrapped(arguments[0])
    return annotation
