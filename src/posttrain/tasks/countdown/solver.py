"""Whether a Countdown problem can be solved, and how: an exact search over all ways to combine its numbers.

A multiset of numbers makes a value by being split in two parts, each of which makes a value, and one operation on
these.  Only values ≥ 0 are kept, and of a - b only the side that is: for numbers ≥ 0 this loses none, since whatever
a tree with negative values or signs makes, exchanging the sides of its subtractions makes the same magnitude without.
A negative target is therefore as reachable as its magnitude: the grader allows a sign in front.

The parts' values are remembered per multiset.  A decision does not enumerate the whole set's values: for each value of
the smaller part it looks up what the other would have to be.  Under `all`, 4, 5 and 6 numbers took 0.4, 4 and 42 ms
here; listing all solutions takes up to ten times as long.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from math import gcd
from typing import Literal

from posttrain.rewards.countdown.grader import Countdown

Rational = tuple[int, int]
"""A value ≥ 0 as (numerator, denominator > 0) in lowest terms."""

Numbers = tuple[int, ...]
"""A multiset of numbers, in ascending order."""

Operator = Literal["+", "-", "*", "/"]


def solvable(problem: Countdown) -> bool:
    """Whether some expression over the problem's numbers, under its rule, has exactly its target as value."""
    target = (abs(problem.target), 1)
    return any(makes(numbers, target) for numbers in usable(problem))


def solutions(problem: Countdown) -> list[str]:
    """Every solution, shortest first, without signs (but one in front where the target is negative).

    Solutions that differ only in order or grouping within a sum or a product are one: `3+(2-1)` is `2+3-1`.
    Steps below zero are left out: the magnitudes that they pass through are those of a solution that is listed.
    """
    target = (abs(problem.target), 1)
    found: dict[str, Combination] = {}
    for numbers in usable(problem):
        found |= expressions_worth(numbers, target)
    texts = sorted(found, key=lambda text: (len(text), text))
    return texts if problem.target >= 0 else [f"-({text})" for text in texts]


def usable(problem: Countdown) -> list[Numbers]:
    """The multisets that a solution may use, each once."""
    numbers = tuple(sorted(problem.numbers))
    if problem.rule == "all":
        return [numbers]
    return sorted({part for size in range(1, len(numbers) + 1) for part in combinations(numbers, size)})


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


def operations(x: Rational, y: Rational) -> Iterator[tuple[Operator, bool, Rational]]:
    """Everything that one operation makes of two values: operator, whether y comes first, result."""
    (a, b), (c, d) = x, y
    yield "+", False, ratio(a * d + c * b, b * d)
    yield "*", False, ratio(a * c, b * d)
    difference = a * d - c * b
    if difference >= 0:
        yield "-", False, ratio(difference, b * d)
    if difference <= 0:
        yield "-", True, ratio(-difference, b * d)
    if c:
        yield "/", False, ratio(a * d, b * c)
    if a:
        yield "/", True, ratio(c * b, d * a)


@lru_cache(maxsize=256)
def reachable_values(numbers: Numbers) -> frozenset[Rational]:
    """All values ≥ 0 that expressions over exactly these numbers have."""
    if len(numbers) == 1:
        return frozenset([(numbers[0], 1)])
    pairs = (
        (x, y) for large, small in splits(numbers) for x in reachable_values(large) for y in reachable_values(small)
    )
    return frozenset(result for x, y in pairs for _, _, result in operations(x, y))


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


@dataclass(frozen=True, slots=True)
class Combination:
    """An expression; two with the same text are the same.

    A sum or product is one chain of all its parts, however it was grouped: `plus` are added (multiplied with), `minus`
    are taken away (divided by).
    """

    text: str
    chain: Literal["", "+", "*"] = field(default="", compare=False)
    """What it is a chain of; empty for a number."""
    plus: tuple["Combination", ...] = field(default=(), compare=False)
    minus: tuple["Combination", ...] = field(default=(), compare=False)


def join(first: Combination, operator: Operator, second: Combination) -> Combination:
    """The expression `first operator second` with its chain flattened and in a fixed order."""
    chain: Literal["+", "*"] = "+" if operator in "+-" else "*"
    plus, minus = parts(first, chain)
    more, less = parts(second, chain)
    if operator in "-/":
        more, less = less, more
    plus = tuple(sorted(plus + more, key=lambda term: term.text))
    minus = tuple(sorted(minus + less, key=lambda term: term.text))
    added, taken = ("+", "-") if chain == "+" else ("*", "/")
    text = added.join(within(term, chain) for term in plus) + "".join(taken + within(term, chain) for term in minus)
    return Combination(text, chain, plus, minus)


def parts(term: Combination, chain: Literal["+", "*"]) -> tuple[tuple[Combination, ...], tuple[Combination, ...]]:
    """The parts that a term adds to a chain, and those that it takes away."""
    return (term.plus, term.minus) if term.chain == chain else ((term,), ())


def within(term: Combination, chain: Literal["+", "*"]) -> str:
    """A part's text inside a chain: a sum in a product needs parentheses."""
    return f"({term.text})" if chain == "*" and term.chain == "+" else term.text


Texts = Mapping[str, Combination]
"""Expressions by their text, so that each is there once."""


@lru_cache(maxsize=64)
def expressions(numbers: Numbers) -> Mapping[Rational, Texts]:
    """All expressions over exactly these numbers, by value."""
    if len(numbers) == 1:
        return {(numbers[0], 1): {str(numbers[0]): Combination(str(numbers[0]))}}
    found: dict[Rational, dict[str, Combination]] = {}
    for result, operator, firsts, seconds in combinations_of_parts(numbers):
        found.setdefault(result, {}).update(join_pairs(operator, firsts, seconds))
    return found


def expressions_worth(numbers: Numbers, target: Rational) -> Texts:
    if len(numbers) == 1:
        return expressions(numbers).get(target, {})
    found: dict[str, Combination] = {}
    for result, operator, firsts, seconds in combinations_of_parts(numbers):
        if result == target:
            found.update(join_pairs(operator, firsts, seconds))
    return found


def combinations_of_parts(numbers: Numbers) -> Iterator[tuple[Rational, Operator, Texts, Texts]]:
    """Every operation on the values of two parts: result, operator, and the expressions of its two sides."""
    for large, small in splits(numbers):
        for x, of_x in expressions(large).items():
            for y, of_y in expressions(small).items():
                for operator, y_first, result in operations(x, y):
                    yield (result, operator, of_y, of_x) if y_first else (result, operator, of_x, of_y)


def join_pairs(operator: Operator, firsts: Texts, seconds: Texts) -> dict[str, Combination]:
    terms = (join(first, operator, second) for first in firsts.values() for second in seconds.values())
    return {term.text: term for term in terms}
