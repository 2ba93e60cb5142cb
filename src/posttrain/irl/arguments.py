"""Converts callers' arguments into what the mathematics takes; an invalid one is rejected by its name.

Lists, whole numbers and flags become arrays of floats.  Numbers obey a `Law`.
"""

from collections.abc import Callable, Sequence
from numbers import Real
from operator import index
from reprlib import Repr
from typing import TypeVar

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from numpy.random import Generator
from scipy.sparse import issparse, sparray, spmatrix

from posttrain.errors import UserError

Numbers = ndarray | Sequence[object]
"""An array, or lists of numbers."""
Value = TypeVar("Value")
Fault = tuple[Bool[ndarray, " entry"], Callable[[int], str]]
"""A mask of bad entries, and the message about one of them."""
Law = tuple[str, Callable[[float], bool]]
"""What a number must be, in words and as a check that NaN does not pass."""

SHARE: Law = ("from 0 to 1", lambda number: 0 <= number <= 1)
PROBABILITY: Law = ("greater than 0 and less than 1", lambda number: 0 < number < 1)
POSITIVE: Law = ("a finite number greater than 0", lambda number: 0 < number < np.inf)
NON_NEGATIVE: Law = ("a finite number of at least 0", lambda number: 0 <= number < np.inf)

NOT_AN_ARRAY = (TypeError, ValueError, RuntimeError, OverflowError)
"""What numpy raises if it cannot make an array: lists of different lengths, tensors with a gradient."""
SIZE_LIMIT = 1e100
"""The squares and sums of larger numbers are infinite in double precision."""
LARGEST_INTEGER = 2**63 - 1


def brief_repr(given: object) -> str:
    if isinstance(given, ndarray):
        return f"an array of shape {given.shape} and type {given.dtype}"
    if isinstance(given, sparray | spmatrix):
        return f"a sparse matrix of shape {given.shape}"
    words = Repr()
    words.maxstring = words.maxother = 60
    return f"{words.repr(given)} ({type(given).__name__})"


def check_entries(bad: Bool[ndarray, " entry"], message: Callable[[int], str]) -> None:
    if bad.any():
        raise UserError(message(int(bad.argmax())))


def real_array(given: object, what: str) -> Float[ndarray, "..."]:
    """Real numbers as an array of floats."""
    if issparse(given):
        raise UserError(f"{what} is a sparse matrix: give an array, such as its .toarray()")
    check_unmasked(given, what)
    try:
        array = np.asarray(given)
    except NOT_AN_ARRAY as error:
        raise UserError(f"{what} is {brief_repr(given)}: give an array of real numbers ({error})") from None
    if array.dtype.kind not in "biuf":
        raise UserError(f"{what} is {brief_repr(given)}: give real numbers, in an array or in lists")
    return array.astype(np.float64, copy=False)


def check_unmasked(given: object, what: str) -> None:
    """Refuse masked entries, also in a list: numpy would use their values."""
    if np.ma.is_masked(given) or (isinstance(given, list | tuple) and any(np.ma.is_masked(part) for part in given)):
        raise UserError(f"{what} has masked entries: fill them, or leave them out")


def check_size(array: Float[ndarray, "..."], what: str) -> None:
    largest = float(np.abs(array).max(initial=0.0))
    if largest > SIZE_LIMIT:
        raise UserError(f"{what} reach {largest:.3g} in size: use numbers up to {SIZE_LIMIT:.0e}, in another unit")


def shaped_array(
    given: Numbers, what: str, *shapes: tuple[int, ...], finite: bool = False, rows: ndarray | None = None
) -> Float[ndarray, "..."]:
    """An array of one of the shapes, without NaN or, if `finite`, infinity; `rows` are the names of its rows."""
    array = real_array(given, what)
    if array.shape not in shapes:
        raise UserError(f"{what} has the shape {array.shape}; use {' or '.join(map(str, shapes))}")
    bad = np.argwhere(~np.isfinite(array) if finite else np.isnan(array))
    if bad.size:
        row, *others = map(int, bad[0])
        place = f"({', '.join(map(str, (row if rows is None else rows[row], *others)))})"
        raise UserError(f"{what} has {array[tuple(bad[0])]} at {place}; use {'finite ' if finite else ''}numbers")
    return array


def checked_number(given: object, what: str, law: Law) -> float:
    """One real number that obeys a law."""
    if isinstance(given, ndarray) and given.ndim == 0:
        given = given[()]
    if isinstance(given, bool) or not isinstance(given, Real):
        raise UserError(f"{what} = {brief_repr(given)}: give a number")
    rule, holds = law
    try:
        number = float(given)
    except OverflowError:
        number = np.inf
    if not holds(number):
        raise UserError(f"{what} = {number}: must be {rule}")
    return number


def check_numbers(options: object, **laws: Law) -> None:
    """Refuse options whose fields of these names do not obey their laws."""
    for name, law in laws.items():
        checked_number(getattr(options, name), name, law)


def checked_integer(given: object, what: str, *, least: int | None = None) -> int:
    """A whole number of 64 bits, not below `least`."""
    try:
        number = None if isinstance(given, bool | np.bool_) else index(given)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or abs(number) > LARGEST_INTEGER:
        raise UserError(f"{what} = {brief_repr(given)}: give a whole number of 64 bits")
    if least is not None and number < least:
        raise UserError(f"{what} = {number}: must be at least {least}")
    return number


def state_numbers(given: object, what: str, num_states: int) -> Int[ndarray, " given"]:
    array = real_array(given, what).ravel()
    bad = ~np.isin(array, np.arange(num_states))
    check_entries(bad, lambda i: f"{what} state {array[i]:g} does not exist: states are 0 to {num_states - 1}")
    return array.astype(np.int64)


def random_generator(given: object) -> Generator:
    if isinstance(given, Generator):
        return given
    if isinstance(given, np.random.RandomState):
        raise UserError("rng is a RandomState: give np.random.default_rng(seed), or the seed")
    return np.random.default_rng(checked_integer(given, "rng", least=0))


def require_kind(given: object, kind: type[Value], what: str) -> Value:
    if not isinstance(given, kind):
        raise UserError(f"{what} is {brief_repr(given)}: give a {kind.__name__} of posttrain.irl")
    return given


def require_callable(given: object, what: str, of: str) -> None:
    if not callable(given):
        raise UserError(f"{what} is {brief_repr(given)}: give a function of {of}")


def check_watch(watch: object) -> None:
    if watch is not None:
        require_callable(watch, "watch", "a mapping of numbers")


def require_word(given: object, what: str, words: Sequence[str]) -> None:
    if not isinstance(given, str) or given not in words:
        raise UserError(f"{what} = {given!r}: use {' or '.join(map(repr, words))}")
