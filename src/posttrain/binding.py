"""Binds plain data from a recipe to a function or dataclass whose signature says what it takes.

An algorithm is a function and its signature is its config schema: {"clip_high": 0.3} becomes dapo(clip_high=0.3).
Every mistake is a `UserError` that says where, what was given and what would be right.
"""

import difflib
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from posttrain.errors import UserError

Built = TypeVar("Built")


def bind(target: Callable[..., Built], options: Mapping[str, object], *, where: str) -> Built:
    """Call `target` with `options`, having checked their names and types against its signature."""
    parameters = inspect.signature(target).parameters
    hints = get_type_hints(target)
    for name in options:
        if name not in parameters:
            raise UserError(f"{where}.{name}: {unknown('option', name, parameters)}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in options:
            raise UserError(f"{where}.{name} is missing; it has no default.")
    values = {name: _value(hints[name], value, f"{where}.{name}") for name, value in options.items()}
    try:
        return target(**values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """The end of an error message about a name that does not exist: the nearest one that does, or all of them."""
    closeness = {choice: difflib.SequenceMatcher(None, str(name), choice).ratio() for choice in known}
    best = max(closeness.values(), default=0)
    nearest = [f"`{choice}`" for choice, close in closeness.items() if close == best]
    if best >= 0.6:
        return f"no such {kind}. Did you mean {' or '.join(nearest)}?"
    return f"no such {kind}. Choose from {', '.join(closeness) or 'none'}."


def _value(hint: Any, value: object, where: str) -> object:
    """`value` as an instance of the annotation `hint`, mappings turned into dataclasses."""
    if get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        (hint,) = (choice for choice in get_args(hint) if choice is not types.NoneType)
    if is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if not isinstance(value, Mapping):
            fields = ", ".join(inspect.signature(hint).parameters)
            raise UserError(f"{where} = {value!r}: this is a section with the fields {fields}.")
        return bind(hint, value, where=where)
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise UserError(f"{where} = {value!r}: {unknown('choice', value, get_args(hint))}")
        return value
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise UserError(f"{where} = {value!r}: this takes a list.")
        return tuple(_value(get_args(hint)[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:  # not isinstance: True is no whole number
        names = {float: "a number (1e-3 is text in YAML: write 1.0e-3)", int: "a whole number", bool: "true or false"}
        raise UserError(f"{where} = {value!r}: this takes {names.get(hint, hint.__name__)}.")
    return value
