"""What callers give, as what the mathematics takes: one conversion of lists, numbers and arrays, at the boundary.

A list of numbers, an array of whole numbers or of flags is as good as an array of floats, and becomes one.  What is no
number, or was masked, is refused by the name of the argument.
"""

from collections.abc import Sequence
from numbers import Real
from operator import index
from reprlib import Repr
from typing import TypeVar

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from numpy.random import Generator
from scipy.sparse import issparse, sparray, spmatrix

from posttrain.errors import UserError

Numbers = ndarray | Sequence[object]
"""An array, or lists of numbers."""
Value = TypeVar("Value")

NO_ARRAY = (TypeError, ValueError, RuntimeError, OverflowError)
"""What numpy raises on making an array of what is none: lists of different lengths, tensors that have a gradient."""
SIZE_LIMIT = 1e100
"""The squares and sums of larger numbers are infinite in double precision."""

MOST = 2**63 - 1
"""The largest whole number of an array."""


def brief_repr(given: object) -> str:
    """How an error shows what was given: in one short line."""
    if isinstance(given, ndarray):
        return f"an array of shape {given.shape} and type {given.dtype}"
    if isinstance(given, sparray | spmatrix):
        return f"a sparse matrix of shape {given.shape}"
    words = Repr()
    words.maxstring = words.maxother = 60
    return f"{words.repr(given)} ({type(given).__name__})"


def real_array(given: object, what: str) -> Float[ndarray, "..."]:
    """The numbers as an array of floats; refuses, by name, what holds anything but real numbers."""
    if issparse(given):
        raise UserError(f"{what} is a sparse matrix: give an array, as its .toarray() is")
    refuse_masked(given, what)
    try:
        array = np.asarray(given)
    except NO_ARRAY as error:
        raise UserError(f"{what} is {brief_repr(given)}, and no array of numbers ({error})") from None
    if array.dtype.kind not in "biuf":
        raise UserError(f"{what} is {brief_repr(given)}: give real numbers, in an array or in lists")
    return array.astype(np.float64, copy=False)


def refuse_masked(given: object, what: str) -> None:
    """Refuse arrays some entries of which are masked, also in a list: numpy would bring back what was masked."""
    if np.ma.is_masked(given) or (isinstance(given, list | tuple) and any(np.ma.is_masked(part) for part in given)):
        raise UserError(f"{what} has masked entries, which stand for no number: fill them, or leave them out")


def check_size(array: Float[ndarray, "..."], what: str) -> None:
    """Refuse finite numbers whose squares are not."""
    largest = float(np.abs(array).max(initial=0.0))
    if largest > SIZE_LIMIT:
        raise UserError(f"{what} reach {largest:.3g} in size: use numbers up to {SIZE_LIMIT:.0e}, in another unit")


def real_number(given: object, what: str) -> float:
    """One real number."""
    if isinstance(given, ndarray) and given.ndim == 0:
        given = given[()]
    if isinstance(given, bool) or not isinstance(given, Real):
        raise UserError(f"{what} = {brief_repr(given)}: give a number")
    try:
        return float(given)
    except OverflowError:
        raise UserError(f"{what} = {brief_repr(given)}: it is beyond double precision") from None


def checked_integer(given: object, what: str, *, least: int | None = None) -> int:
    """One whole number, not below `least`."""
    try:
        number = None if isinstance(given, bool | np.bool_) else index(given)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or abs(number) > MOST:
        raise UserError(f"{what} = {brief_repr(given)}: give a whole number of 64 bits")
    if least is not None and number < least:
        raise UserError(f"{what} = {number}: use {least} or more")
    return number


def state_numbers(given: object, what: str, num_states: int) -> Int[ndarray, " given"]:
    """Numbers of states, from one of them or several; refuses what does not exist."""
    array = real_array(given, what).ravel()
    bad = np.flatnonzero(~np.isin(array, np.arange(num_states)))
    if bad.size:
        raise UserError(f"{what} state {array[bad[0]]:g} does not exist: states are 0 to {num_states - 1}")
    return array.astype(np.int64)


def random_generator(given: object) -> Generator:
    """A generator of numpy as it is, or one from a seed."""
    if isinstance(given, Generator):
        return given
    if isinstance(given, np.random.RandomState):
        raise UserError("rng is a RandomState: give np.random.default_rng(seed), or the seed")
    return np.random.default_rng(checked_integer(given, "rng", least=0))


def require_kind(given: object, kind: type[Value], what: str) -> Value:
    """The object, if it is of the class that an argument needs."""
    if not isinstance(given, kind):
        raise UserError(f"{what} is {brief_repr(given)}: give a {kind.__name__} of posttrain.irl")
    return given


def check_watch(watch: object) -> None:
    """Refuse what cannot be called with the numbers of an evaluation."""
    if watch is not None and not callable(watch):
        raise UserError(f"watch is {brief_repr(watch)}: give a function of a mapping of numbers")


def is_word(given: object, words: Sequence[str]) -> bool:
    """Whether a setting is one of the words that it may be."""
    return isinstance(given, str) and given in words


def require_numeric_options(options: object, *names: str) -> None:
    """Refuse settings that are no numbers, before their bounds are looked at."""
    for name in names:
        real_number(getattr(options, name), name)
