"""Bounds of options: declared in their annotations, checked when a section is made, with one wording."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import cache, wraps
from math import inf
from typing import Annotated, Any, ClassVar, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from annotated_types import BaseMetadata, Ge, Gt, Le, Lt, MinLen

from posttrain.errors import UserError
from posttrain.options.rules import Rules, require_rules

NonNegativeInt = Annotated[int, Ge(0)]
PositiveInt = Annotated[int, Ge(1)]
NonNegativeFloat = Annotated[float, Ge(0), Lt(inf)]
PositiveFloat = Annotated[float, Gt(0), Lt(inf)]
FiniteFloat = Annotated[float, Gt(-inf), Lt(inf)]
Share = Annotated[float, Ge(0), Le(1)]
NonEmptyStr = Annotated[str, MinLen(1)]
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Bounded:
    """Options that obey the bounds of their annotations, and `rules`; raises UserError with the first that does not."""

    __slots__ = ()
    rules: ClassVar[Rules] = ()
    """Those of the class; those of the classes above it hold as well."""

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


def obeys(value: Any, bound: BaseMetadata) -> bool:
    """Whether a value is within a bound; NaN is within none."""
    match bound:
        case Ge(ge=least):
            return bool(value >= least)
        case Gt(gt=above):
            return bool(value > above)
        case Le(le=most):
            return bool(value <= most)
        case Lt(lt=below):
            return bool(value < below)
        case MinLen(min_length=least):
            return len(value) >= least
    raise TypeError(f"{bound} is not a bound of an option")


def in_words(bounds: tuple[BaseMetadata, ...]) -> str:
    """What a value must be, such as "at least 0 and less than 1" or "a finite number greater than 0"."""
    finite = "a finite number " if any(bound in (Lt(inf), Gt(-inf)) for bound in bounds) else ""
    words = []
    for bound in bounds:
        match bound:
            case Ge(ge=least):
                words.append(f"at least {least}")
            case Gt(gt=above) if above != -inf:
                words.append(f"greater than {above}")
            case Le(le=most):
                words.append(f"at most {most}")
            case Lt(lt=below) if below != inf:
                words.append(f"less than {below}")
            case MinLen():
                words.append("non-empty")
    return f"{finite}{' and '.join(words)}".strip()
