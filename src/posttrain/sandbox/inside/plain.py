"""Plain values as JSON that keeps their types, and nothing but plain values.

None, bool, str and numbers, and lists, tuples, sets, dicts, ranges and fractions of these.  Values that are read have
exactly these types, since a subclass may compare equal to everything.  A value of a subclass is written as its base, by
methods of the base only, and numpy's as Python's.  The reader checks everything again, as its input may be forged.
"""

import importlib
import json
import math
import sys
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes longer to import than a small program to run
    from typing import Any

MAX_DEPTH = 32
MAX_ITEMS = 200_000
"""Values inside values, all counted."""
MAX_BITS = 1 << 16
"""Longest integer."""
MAX_FRACTION_BITS = 1 << 12
"""Longest integer of a fraction: to find its common divisor takes time that grows with its square."""
MAX_SAME_HASH = 64
"""Keys of a set or dict that may share a hash."""


class NotPlainError(Exception):
    """A value that must not cross; the text says why."""


def dump(value: object) -> bytes:
    return json.dumps(_Writer().write(value, 0), separators=(",", ":"), allow_nan=False).encode(
        "utf-8", "surrogatepass"
    )


def load(payload: bytes) -> object:
    """The value in some bytes.  Raises NotPlainError if they hold none."""
    try:
        written = json.loads(payload.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise NotPlainError("not in the format") from error
    return _Reader().read(written, 0)


class _Counter:
    def __init__(self) -> None:
        self.items = 0

    def count(self, depth: int) -> None:
        self.items += 1
        if self.items > MAX_ITEMS:
            raise NotPlainError(f"more than {MAX_ITEMS:,} values")
        if depth > MAX_DEPTH:
            raise NotPlainError(f"nested deeper than {MAX_DEPTH}")


class _Writer(_Counter):
    def write(self, value: "Any", depth: int) -> object:
        self.count(depth)
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            if value.bit_length() > MAX_BITS:
                raise NotPlainError(f"an integer of {value.bit_length():,} bits")
            return ["i", hex(value)]
        if kind is float:
            return ["f", value.hex()]
        if kind is bytes:
            return ["b", value.hex()]
        if kind in (list, tuple, set, frozenset):
            return [NAMES[kind], *(self.write(item, depth + 1) for item in value)]
        if kind is dict:
            return ["d", *([self.write(k, depth + 1), self.write(v, depth + 1)] for k, v in value.items())]
        if kind is complex:
            return ["c", value.real.hex(), value.imag.hex()]
        if kind is range:
            return ["r", *(self.write(part, depth + 1) for part in (value.start, value.stop, value.step))]
        if kind is imported_class("fractions", "Fraction"):
            return ["q", *(self.write(part, depth + 1) for part in (value.numerator, value.denominator))]
        return self.write(base_value(value, kind), depth + 1)


def imported_class(module: str, name: str) -> object:
    """A class of a module, if the module is imported; else no value can be of it."""
    return getattr(sys.modules.get(module), name, None)


def base_value(value: "Any", kind: type) -> object:
    """A value as its base class, or NotPlainError; nothing that its own class defines is called."""
    for base, write in BASES.items():
        if issubclass(kind, base):
            return write(value)
    array, scalar = imported_class("numpy", "ndarray"), imported_class("numpy", "generic")
    if isinstance(array, type) and issubclass(kind, array):
        if array.size.__get__(value) > MAX_ITEMS:  # type: ignore[attr-defined]  # numpy's own
            raise NotPlainError(f"more than {MAX_ITEMS:,} values")
        return array.tolist(value)  # type: ignore[attr-defined]  # numpy's own
    if isinstance(scalar, type) and issubclass(kind, scalar):
        return scalar.item(value)  # type: ignore[attr-defined]  # numpy's own
    raise NotPlainError(f"a value of type {kind.__name__}"[:100])


BASES: "dict[type, Any]" = {
    int: int.__index__,
    float: float.__float__,
    str: str.__str__,
    bytes: lambda value: bytes.fromhex(bytes.hex(value)),
    complex: lambda value: complex(complex.real.__get__(value), complex.imag.__get__(value)),
    list: lambda value: list(list.__iter__(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    deque: lambda value: list(deque.__iter__(value)),
    dict: lambda value: dict(dict.items(value)),
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
}
"""How a value of a subclass is read as one of the base: Counter and namedtuple, IntEnum and numpy.float64 are such."""
NAMES: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "z"}
KINDS = {name: kind for kind, name in NAMES.items()}
UNORDERED = {"s", "z"}


class _Reader(_Counter):
    def read(self, written: "Any", depth: int) -> object:
        self.count(depth)
        if written is None or isinstance(written, bool | str):
            return written
        if not isinstance(written, list) or not written or not isinstance(written[0], str):
            raise NotPlainError("not in the format")
        name, *parts = written
        try:
            if name in KINDS:
                items = [self.read(part, depth + 1) for part in parts]
                return KINDS[name](spread(items) if name in UNORDERED else items)
            if name == "d":
                pairs = [(self.read(key, depth + 1), self.read(value, depth + 1)) for key, value in parts]
                spread([key for key, _ in pairs])
                return dict(pairs)
            if name == "c":
                real, imaginary = parts
                return complex(float.fromhex(real), float.fromhex(imaginary))
            if name in ("r", "q"):
                whole: list[Any] = [self.read(part, depth + 1) for part in parts]
                if [type(part) for part in whole] != [int] * {"r": 3, "q": 2}[name]:
                    raise NotPlainError("not in the format")
                if name == "q" and any(part.bit_length() > MAX_FRACTION_BITS for part in whole):
                    raise NotPlainError("too long a fraction")
                return range(*whole) if name == "r" else importlib.import_module("fractions").Fraction(*whole)
            (text,) = parts
            return scalar(name, text)
        except (TypeError, ValueError, ArithmeticError) as error:  # unhashable keys, wrong counts, wrong digits
            raise NotPlainError("not in the format") from error


def spread(keys: "list[Any]") -> "list[Any]":
    """The keys, if few of them share a hash: the time to look up equal hashes grows with their square."""
    seen: dict[int, int] = {}
    for key in keys:
        value = hash(key)
        seen[value] = seen.get(value, 0) + 1
        if seen[value] > MAX_SAME_HASH:
            raise NotPlainError("too many keys of the same hash")
    return keys


def scalar(name: str, text: str) -> object:
    """A number or bytes."""
    if name == "i" and len(text) <= MAX_BITS // 4 + 3:
        number = int(text, 16)
        if number.bit_length() > MAX_BITS:
            raise NotPlainError("too long an integer")
        return number
    if name == "f":
        value = float.fromhex(text)
        return value if math.isfinite(value) else float(value)
    if name == "b":
        return bytes.fromhex(text)
    raise NotPlainError("not in the format")
