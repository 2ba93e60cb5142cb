"""The options of a function or class in a recipe: its signature, read once into a record class.

A record has the names, types, defaults and meanings of the options, without rules.  pydantic checks recipes against it,
and flags are made from it.  Rules between options are checked when the function or class is called, after all sources
are read.
"""

import ast
import difflib
import inspect
import json
import re
import textwrap
import threading
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, make_dataclass
from enum import Enum
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from posttrain.errors import UserError

PARSING = threading.Lock()
"""Held while Python parses a source: when two threads parse at once, Python 3.11 loses count and raises."""

REQUIRED = inspect.Parameter.empty
"""Marks an option without a default."""


@dataclass(frozen=True)
class Option:
    """One option of a function or class."""

    name: str
    annotation: Any
    default: Any = REQUIRED
    meaning: str = ""
    """The docstring under the field, or the `Doc` of a parameter, on one line."""


@dataclass(frozen=True)
class Schema:
    """The options of a function or class in a recipe."""

    target: Callable[..., Any]
    leading: tuple[Option, ...] = ()
    """How the target was chosen: an option `name` or `path`, which comes first and replaces the target's own."""
    left_out: frozenset[str] = frozenset()
    """Parameters that no recipe gives."""

    @property
    def is_own(self) -> bool:
        return any(option.name == "path" for option in self.leading)

    @property
    def options(self) -> list[Option]:
        leading = {option.name: option for option in self.leading if option.name not in self.left_out}
        return [*({**leading, **self.own, **leading}).values()]

    @property
    def own(self) -> dict[str, Option]:
        return {option.name: option for option in options_of(self.target) if option.name not in self.left_out}


@dataclass(frozen=True)
class Mistake:
    """A value that a schema does not allow."""

    path: tuple[str, ...]
    says: str
    """The message after the path."""
    names: tuple[str, ...] = ()
    """The names that exist there, if the mistake is an unknown one."""

    def line(self, where: str) -> str:
        remedy = f".  {did_you_mean(self.path[-1], self.names)}" if self.names else ""
        return f"{'.'.join((where, *self.path))}{self.says}{remedy}"


def options_of(target: Any) -> list[Option]:
    """The options of a dataclass are its fields; those of a function or other class, its parameters by keyword.

    A parameter whose default cannot be written in a recipe, such as a function, is left to its default.  One without
    annotation takes any plain value; `Annotated[float, Doc("...")]` says what it means.
    """
    if isinstance(target, type) and is_dataclass(target):
        hints, docs, own = get_type_hints(target), field_docs(target), [each for each in fields(target) if each.init]
        return [Option(each.name, hints[each.name], default_of(each), docs.get(each.name, "")) for each in own]
    options = []
    for each in inspect.signature(target, eval_str=True).parameters.values():
        by_keyword = each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        if by_keyword and (each.default is REQUIRED or is_plain(each.default)):
            said = [part.documentation for part in get_args(each.annotation) if hasattr(part, "documentation")]
            annotation = Any if each.annotation is each.empty else each.annotation
            options.append(Option(each.name, annotation, each.default, " ".join(said)))
    return options


def default_of(option: Any) -> Any:
    if option.default_factory is not MISSING:
        return option.default_factory()
    return REQUIRED if option.default is MISSING else option.default


def require_no_password(address: str, name: str, remedy: str) -> None:
    """Refuse an address that may hold a secret, without repeating it: recipes are saved with a run, and shown."""
    parts = urlsplit(address)
    if "@" in parts.netloc or parts.query:
        raise UserError(f"{name}: has a user name or a query (`?…`), which is saved with the run and shown.  {remedy}")


def is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(is_plain(item) for item in value)
    return value is None or isinstance(value, str | int | float | Enum | Mapping) or is_instance(value)


def is_instance(value: object) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def is_record(value: object) -> bool:
    return is_instance(value) and hasattr(type(value), "schema")


@cache
def record_class(schema: Schema) -> Any:
    """A frozen dataclass of the schema's options without their rules; an option without a default begins as None.

    An option that is a dataclass, or None, or a list of dataclasses, becomes a record or a list of records.
    """
    from pydantic import BeforeValidator, ConfigDict, WrapValidator
    from typing_extensions import Doc

    # Below what may be null pydantic sees Python's lists and no longer JSON's.
    as_tuple = BeforeValidator(lists_as_tuples)
    made: list[Any] = []
    for option in schema.options:
        annotation, default, inner = option.annotation, option.default, unwrapped(option.annotation)
        if isinstance(inner, type) and is_dataclass(inner) and get_origin(annotation) is tuple:
            annotation = tuple[record_class(Schema(inner)), ...]  # type: ignore[misc]
        elif isinstance(inner, type) and is_dataclass(inner):
            within = record_class(Schema(inner))
            null = WrapValidator(lambda value, check: None if value is None else check(value))
            annotation = within if inner is annotation else Annotated[within, null]
            default = as_record(within, default) if is_instance(default) else default
        if get_origin(annotation) is tuple:
            annotation = Annotated[annotation, as_tuple]
        if default is REQUIRED:
            annotation, default = annotation | None, None
        # By a factory, because a dataclass refuses a mapping as a default.
        factory = field(default_factory=partial(lambda value: value, default))
        annotation = Annotated[annotation, Doc(option.meaning)] if option.meaning else annotation
        made.append((option.name, annotation, factory))
    target = schema.target
    namespace = {"__doc__": target.__doc__, "__pydantic_config__": ConfigDict(extra="forbid"), "schema": schema}
    return make_dataclass(target.__name__, made, frozen=True, kw_only=True, namespace=namespace)


def as_record(record: Any, value: Any) -> Any:
    return record(**{each.name: getattr(value, each.name) for each in fields(record)})


def unwrapped(annotation: Any) -> Any:
    """`X` of `X | None`, of `tuple[X, ...]` and of `Annotated[X, ...]`; other types unchanged."""
    if get_origin(annotation) is Annotated:
        return unwrapped(get_args(annotation)[0])
    arguments = [each for each in get_args(annotation) if each not in (types.NoneType, Ellipsis)]
    if get_origin(annotation) is not Literal and len(arguments) == 1:
        return unwrapped(arguments[0])
    return annotation


@cache
def field_docs(options: type) -> dict[str, str]:
    """The docstring under each field of a class, on one line."""
    docs: dict[str, str] = {}
    for each in reversed(options.__mro__[:-1]):
        try:
            with PARSING:
                body = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
        except OSError:  # made while running: it has no source, and no docstrings
            continue
        statements = body.body if isinstance(body, ast.ClassDef) else []
        for statement, after in pairwise(statements):
            match statement, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = " ".join(text.split())
    return docs


# Checking content against a record class


@cache
def checker(annotation: Any) -> Any:
    """pydantic's validator of a record class, or of a tuple of records."""
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

    try:
        return TypeAdapter(annotation)
    except PydanticUserError as error:
        says = str(error).partition(". ")[0]
        raise UserError(f"{annotation.__name__} has an option of a type that a recipe cannot express: {says}") from None


def checked(annotation: Any, content: object) -> tuple[Any, list[Mistake]]:
    """The content as a record, or a tuple of records, and its mistakes.

    Through JSON, where pydantic is strict and still makes tuples of lists: "8" and true are not numbers.
    """
    from pydantic import ValidationError

    try:
        return checker(annotation).validate_json(json.dumps(content, default=spoken), strict=True), []
    except ValidationError as errors:
        return None, [mistake(annotation, error) for error in errors.errors(include_url=False)]


def lists_as_tuples(value: object) -> object:
    """A list as a tuple, and the lists in it too."""
    return tuple(map(lists_as_tuples, value)) if isinstance(value, list) else value


def record_of(annotation: Any, content: object, *, where: str) -> Any:
    """The content as a record.  Raises UserError with all that is wrong with it, as options at `where`."""
    record, mistakes = checked(annotation, content)
    if mistakes:
        raise UserError("\n".join(mistake.line(where) for mistake in mistakes))
    return record


def spoken(value: Any) -> object:
    if is_instance(value):
        return asdict(value)
    if isinstance(value, Path):
        return str(value)
    raise UserError(f"{value!r} ({type(value).__name__}): an option is plain data: a number, text, a list, a mapping")


def mistake(annotation: Any, error: Any) -> Mistake:
    """What pydantic found, in our words."""
    path = tuple(str(part) for part in error["loc"])
    match error["type"]:
        case "unexpected_keyword_argument":
            return Mistake(path, ": no such field", names=(*names_at(annotation, path[:-1]),))
        case "dataclass_type":
            names = ", ".join(names_at(annotation, path))
            rule = f"should be a mapping of names to values: {names}"
        case "tuple_type":
            rule = "should be a list"
        case "literal_error":
            expected = error["ctx"]["expected"]
            near = difflib.get_close_matches(str(error["input"]), re.findall(r"'(.*?)'", expected), n=1)
            rule = f"should be {expected}" + (f".  Did you mean `{near[0]}`?" if near else "")
        case _:
            rule = error["msg"].replace("Input should", "should").replace("a valid integer", "a whole number")
    value = error["input"]
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    excerpt = text if len(text) <= 60 else f"{text[:57]}..."
    return Mistake(path, f" = {excerpt} {rule.replace('a valid ', 'a ')}")


def names_at(annotation: Any, path: tuple[str, ...]) -> list[str]:
    inner = unwrapped(annotation)
    for part in path:
        if is_dataclass(inner) and not part.isdigit():  # a digit is a place in a list
            inner = unwrapped(get_type_hints(inner).get(part))
    return [each.name for each in fields(inner)] if is_dataclass(inner) else []


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The remedy for an unknown name: the nearest known ones, or all."""
    closeness = {choice: difflib.SequenceMatcher(None, str(name), choice).ratio() for choice in known}
    best = max(closeness.values(), default=0)
    nearest = [f"`{choice}`" for choice, close in closeness.items() if close == best]
    return f"Did you mean {' or '.join(nearest)}?" if best >= 0.6 else f"There are: {', '.join(closeness) or 'none'}."
