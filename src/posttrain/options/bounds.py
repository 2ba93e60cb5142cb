"""Bounds of options: declared in their annotations, checked when a section is made, with one wording."""

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, reduce, wraps
from math import inf
from typing import Annotated, Any, ClassVar, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from annotated_types import BaseMetadata, Ge, Gt, Le, Lt, MinLen

from posttrain.errors import UserError
from posttrain.schemas import default_of

GIVEN = object()
"""Any value that is not empty, 0 or null."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that options must obey; `{o.NAME}` in its text is the value of an option."""

    option: str
    """The option that the message names; in a config by its path, such as `run.num_steps`."""
    holds: Callable[[Any], object]
    says: str
    """What is wrong, after the option and its value, and the remedy."""

    def complaint(self, options: Any) -> str | None:
        if self.holds(options):
            return None
        return f"{with_value(options, self.option)} " + self.says.format(o=options)


@dataclass(frozen=True, slots=True)
class Unused:
    """Options that are only read if others have certain values; otherwise they have no effect and are rejected."""

    options: str
    """Their names, separated by spaces; in a config, paths of options or of whole sections."""
    unless: Mapping[str, object] | str
    """Other options and their values: one, one of a tuple, or GIVEN.  Or, in words, what else reads the options."""
    remedy: str = "Leave it out."

    def complaint(self, options: Any) -> str | None:
        used_by = self.used_by(options)
        for path in self.options.split() if used_by else ():
            section, _, name = path.rpartition(".")
            known = getattr(value_at(options, section) if section else options, "__dataclass_fields__", {})
            if value_at(options, path) != (default_of(known[name]) if name in known else None):
                return f"{with_value(options, path)} is only for {used_by}.  {self.remedy.format(o=options)}"
        return None

    def used_by(self, options: Any) -> str | None:
        """What reads the options, and why it does not apply; None if it applies."""
        if isinstance(self.unless, str):
            return self.unless
        for other, wanted in self.unless.items():
            value, choices = value_at(options, other), wanted if isinstance(wanted, tuple) else (wanted,)
            if not (value if wanted is GIVEN else value in choices):
                need = other if wanted is GIVEN else f"{other} = {' or '.join(map(value_shown, choices))}"
                return f"{need}, and {with_value(options, other)}"
        return None


Rules = tuple[Rule | Unused, ...]


def require_rules(options: Any, rules: Rules | None = None) -> None:
    """Reject the first option that breaks one of the given rules, or else a rule of its class or a parent class."""
    kinds = reversed(type(options).__mro__)
    for rule in rules or (each for kind in kinds for each in vars(kind).get("rules", ())):
        if (complaint := rule.complaint(options)) is not None:
            raise UserError(complaint)


def refuse_unread(used_by: str, given: Mapping[str, bool]) -> None:
    """Reject the first argument of a function that is given although nothing would read it."""
    if (name := next((name for name, is_given in given.items() if is_given), None)) is not None:
        raise UserError(f"{name} is only for {used_by}.  Leave it out.")


def value_at(options: Any, path: str) -> Any:
    """The value of an option; None if the section does not have it."""
    return reduce(lambda section, name: getattr(section, name, None), path.split("."), options)


def with_value(options: Any, path: str) -> str:
    """`option = value`; for a section, or a list of sections, its name."""
    value = value_at(options, path)
    items = value if isinstance(value, tuple) else [value]
    return path if any(map(is_dataclass, items)) else f"{path} = {value_shown(value)}"


def value_shown(value: object) -> str:
    """A value as a recipe writes it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(value_shown, value))}]"
    words: dict[object, str] = {"": "''", "None": "null", "True": "true", "False": "false"}
    return words.get(str(value), f"{value!s:.80}")


NonNegativeInt = Annotated[int, Ge(0)]
PositiveInt = Annotated[int, Ge(1)]
NonNegativeFloat = Annotated[float, Ge(0), Lt(inf)]
PositiveFloat = Annotated[float, Gt(0), Lt(inf)]
FiniteFloat = Annotated[float, Gt(-inf), Lt(inf)]
Share = Annotated[float, Ge(0), Le(1)]
NonEmptyStr = Annotated[str, MinLen(1)]
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def by_name(kinds: Any) -> dict[str, Any]:
    """The option classes of a union, by the name that each has in recipes."""
    return {each.name: each for each in get_args(kinds)}


class Bounded:
    """Options that obey the bounds of their annotations, and `rules`.  Raises UserError for the first violation."""

    __slots__ = ()
    rules: ClassVar[Rules] = ()
    """The rules of this class; those of its parent classes apply too."""

    def __post_init__(self) -> None:
        require_bounds(type(self), {each.name: getattr(self, each.name) for each in fields(self)})  # type: ignore[arg-type]
        require_rules(self)


def within_bounds(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function; its keyword arguments must obey the bounds of their annotations."""

    @wraps(function)
    def checked(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        require_bounds(function, options)
        return function(*arguments, **options)

    return checked


def require_bounds(target: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise UserError with the first option that is outside the bounds of its annotation."""
    for name, (bounds, may_be_null) in bounds_of(target).items():
        value = options.get(name)
        if name in options and not (value is None and may_be_null) and not all(obeys(value, each) for each in bounds):
            null = ", or null" if may_be_null else ""
            raise UserError(f"{name} = {value!r}: must be {in_words(bounds)}{null}")


@cache
def bounds_of(target: Callable[..., Any]) -> dict[str, tuple[tuple[BaseMetadata, ...], bool]]:
    hints = get_type_hints(target, include_extras=True)
    found = {name: tuple(bounds_in(hint)) for name, hint in hints.items()}
    return {name: (bounds, type(None) in get_args(hints[name])) for name, bounds in found.items() if bounds}


def bounds_in(annotation: Any) -> Iterator[BaseMetadata]:
    if get_origin(annotation) is Annotated:
        yield from (each for each in annotation.__metadata__ if isinstance(each, BaseMetadata))
    elif type(None) in get_args(annotation):
        yield from (bound for each in get_args(annotation) for bound in bounds_in(each))


LIMITS: dict[type, tuple[str, Callable[[Any, Any], bool], str]] = {
    Ge: ("ge", operator.ge, "at least {}"),
    Gt: ("gt", operator.gt, "greater than {}"),
    Le: ("le", operator.le, "at most {}"),
    Lt: ("lt", operator.lt, "less than {}"),
    MinLen: ("min_length", lambda value, least: len(value) >= least, "non-empty"),
}
"""Kinds of bounds: the limit's attribute, the test (NaN fails every one), and the words."""


def obeys(value: Any, bound: BaseMetadata) -> bool:
    if type(bound) not in LIMITS:
        raise TypeError(f"{bound} is not a bound of an option")
    name, holds, _ = LIMITS[type(bound)]
    return bool(holds(value, getattr(bound, name)))


def in_words(bounds: tuple[BaseMetadata, ...]) -> str:
    """What a value must be, such as "at least 0 and less than 1" or "a finite number greater than 0"."""
    limits = [(getattr(bound, LIMITS[type(bound)][0]), LIMITS[type(bound)][2]) for bound in bounds]
    finite = "a finite number " if any(abs(limit) == inf for limit, _ in limits) else ""
    return f"{finite}{' and '.join(words.format(limit) for limit, words in limits if abs(limit) != inf)}".strip()
