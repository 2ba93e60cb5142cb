"""Shapes in annotations are checked where there are any."""

from collections.abc import Callable
from typing import Any, get_args

from jaxtyping import AbstractArray

Decorator = Callable[[Any], Any]


def where_stated(checked: Callable[..., Any]) -> Callable[..., Decorator]:
    """jaxtyping's decorator, for functions and dataclasses with a shape among their annotations."""

    def decorator(*, typechecker: Any) -> Decorator:
        return lambda made: checked(made, typechecker=typechecker) if states_a_shape(made) else made

    return decorator


def states_a_shape(made: Any) -> bool:
    function = made.__init__ if isinstance(made, type) else getattr(made, "__func__", getattr(made, "fget", made))
    return any(map(is_shape, getattr(function, "__annotations__", {}).values()))


def is_shape(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, AbstractArray):
        return True
    return any(map(is_shape, get_args(annotation)))
