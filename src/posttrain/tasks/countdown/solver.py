"""Whether a Countdown problem can be solved: an exact search over all ways to combine its numbers.

A multiset of numbers makes a value by being split in two parts, each of which makes a value, and one operation on
these.  Only values ≥ 0 are kept, and of a - b only the side that is: for numbers ≥ 0 this loses none, since whatever
a tree with negative values or signs makes, exchanging the sides of its subtractions makes the same magnitude without.
A negative target is therefore as reachable as its magnitude: the grader allows a sign in front.

A decision does not enumerate the whole set's values: for each value of the smaller part it looks up what the other
would have to be.  Under `all`, 4, 5 and 6 numbers took 0.4, 4 and 42 ms.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations
from math import gcd

from posttrain.rewards.countdown.grader import Countdown

Rational = tuple[int, int]
"""A value ≥ 0 as (numerator, denominator > 0) in lowest terms."""

Numbers = tuple[int, ...]
"""A multiset of numbers, in ascending order."""


def solvable(problem: Countdown) -> bool:
    """Whether some expression over the problem's numbers, under its rule, has exactly its target as value."""
    numbers = tuple(sorted(problem.numbers))
    sizes = [len(numbers)] if problem.rule == "all" else range(1, len(numbers) + 1)
    usable = sorted({part for size in sizes for part in combinations(numbers, size)})
    return any(makes(part, (abs(problem.target), 1)) for part in usable)


def splits(numbers: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
    """Every way to split a multiset in two non-empty parts, the larger first; order apart, each way once."""
    seen: set[tuple[Numbers, Numbers]] = set()
    for size in range(1, len(numbers) // 2 + 1):
        for chosen in combinations(range(len(numbers)), size):
            small = tuple(numbers[i] for i in chosen)
            large = tuple(number for i, number in enumerate(numbers) if i not in chosen)
            key = (large, small) if len(large) > size else (max(large, small), min(large, small))
            if key not in seen:
                seen.add(key)
                yield key


def ratio(numerator: int, denominator: int) -> Rational:
    common = gcd(numerator, denominator)
    return numerator // common, denominator // common


def results(x: Rational, y: Rational) -> Iterator[Rational]:
    """Everything that one operation makes of two values."""
    (a, b), (c, d) = x, y
    yield ratio(a * d + c * b, b * d)
    yield ratio(a * c, b * d)
    yield ratio(abs(a * d - c * b), b * d)
    if c:
        yield ratio(a * d, b * c)
    if a:
        yield ratio(c * b, d * a)


@lru_cache(maxsize=256)
def reachable_values(numbers: Numbers) -> frozenset[Rational]:
    """All values ≥ 0 that expressions over exactly these numbers have."""
    if len(numbers) == 1:
        return frozenset([(numbers[0], 1)])
    pairs = (
        (x, y) for large, small in splits(numbers) for x in reachable_values(large) for y in reachable_values(small)
    )
    return frozenset(result for x, y in pairs for result in results(x, y))


@lru_cache(maxsize=4096)
def makes(numbers: Numbers, target: Rational) -> bool:
    """Whether an expression over exactly these numbers has this value."""
    if len(numbers) == 1:
        return target == (numbers[0], 1)
    return any(
        (y[0] == target[0] == 0) or not reachable_values(large).isdisjoint(partners(y, target))
        for large, small in splits(numbers)
        for y in reachable_values(small)
    )


def partners(y: Rational, target: Rational) -> Iterator[Rational]:
    """All x for which one operation on x and y makes the target, except that 0 · x makes 0 of every x."""
    (c, d), (t, u) = y, target
    yield ratio(t * d + c * u, u * d)  # x - y
    yield ratio(abs(t * d - c * u), u * d)  # x + y or y - x
    if c:
        yield ratio(t * d, u * c)  # x · y
        yield ratio(t * c, u * d)  # x / y
        if t:
            yield ratio(c * u, d * t)  # y / x
