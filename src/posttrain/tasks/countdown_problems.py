"""Endless Countdown problems: drawn by (seed, index), solvable by construction, with a separate held-out set.

A problem's numbers are drawn from a pool, with replacement.  Its target is the value of a random arithmetic tree over
them whose steps all stay in the non-negative integers; if the target is unwanted, the problem is drawn again.  One
multiset of numbers in ten, chosen by a hash, is held out: no training problem ever has it, whatever its target.

The course's variant draws four numbers and makes the target from three of them, so that it is solvable under
`subset`; under `all` the solver leaves out what is not.  Its fourth operator is |a - b|.

**The solver** is an exact search.  It splits a multiset of numbers in two parts, finds each part's values, and joins
two values by one operation.  Only values ≥ 0 are kept, such as |a - b| of a difference: for numbers ≥ 0 no value is
lost, since exchanging the sides of a subtraction gives the same magnitude.  A negative target is as reachable as its
magnitude: the grader allows a sign in front.  For each value of the smaller part the solver looks up what the other
would have to be.  Under `all`, 4, 5 and 6 numbers took 0.4, 4 and 42 ms.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, combinations_with_replacement, islice
from math import comb, gcd
from random import Random

from posttrain.errors import UserError
from posttrain.options.task import NumbersRule
from posttrain.rewards.countdown import Countdown
from posttrain.rewards.parsing.arithmetic import apply

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
    """Every way to split a multiset in two non-empty parts, the larger first; each way once, ignoring order."""
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


HELD_OUT_SHARE = 10
"""One number multiset in this many is held out."""

MAX_DRAWS = 20_000
"""Draws in a row without a new problem after which drawing stops: no new one exists, or it is rarer than this."""

MAX_LISTING = 25_000_000
"""Largest number of multisets, times 8 ** num_numbers as the time for each goes, for which all problems are listed."""


@dataclass(frozen=True, kw_only=True)
class Difficulty:
    """How hard a problem is: its numbers, the arithmetic of its target, and the allowed targets."""

    num_numbers: int = 3
    num_spare: int = 0
    """Given numbers that the target is made without."""
    pool: tuple[int, ...] = tuple(range(1, 31))
    """Numbers are drawn from these, with replacement."""
    operators: str = "+-*/"
    """What targets are made with, out of `+-*/|`; `|` is |a - b|."""
    targets: tuple[int, int] = (1, 99)
    """Smallest and largest target."""
    given_targets: bool = True
    """Whether a target may be one of the given numbers."""


COURSE_POOL = (1, 2, 5, 10, 25, 50, 75, 100)

COURSE = Difficulty(
    num_numbers=4,
    num_spare=1,
    pool=COURSE_POOL,
    operators="+-*|",
    targets=(1, max(COURSE_POOL) ** 3),
    given_targets=False,
)
"""The course's own variant: any positive target that is not given away."""


def held_out(numbers: tuple[int, ...]) -> bool:
    """Whether a multiset of numbers is held out for evaluation, whatever the seed, target or rule."""
    digest = hashlib.blake2b(repr(sorted(numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


def make_target(numbers: tuple[int, ...], operators: str, rng: Random) -> int | None:
    """The value of a random arithmetic tree over all the numbers, or None if a step leaves the integers."""
    values = list(numbers)
    while len(values) > 1:
        a = values.pop(rng.randrange(len(values)))
        b = values.pop(rng.randrange(len(values)))
        result = apply(operators[rng.randrange(len(operators))], a, b)
        if result is None:
            return None
        values.append(result)
    return values[0]


def draws(difficulty: Difficulty, rule: NumbersRule, rng: Random) -> Iterator[Countdown | None]:
    """Random solvable problems, endlessly; None for each draw that made none."""
    while True:
        numbers = tuple(difficulty.pool[rng.randrange(len(difficulty.pool))] for _ in range(difficulty.num_numbers))
        used = numbers
        if difficulty.num_spare:
            used = tuple(rng.sample(numbers, difficulty.num_numbers - difficulty.num_spare))
        target = make_target(used, difficulty.operators, rng)
        yield None if target is None else allowed_problem(difficulty, Countdown(numbers, target, rule))


def allowed_problem(difficulty: Difficulty, problem: Countdown) -> Countdown | None:
    """The problem, if its target is one that the difficulty allows and its rule can reach."""
    low, high = difficulty.targets
    given_away = not difficulty.given_targets and problem.target in problem.numbers
    if given_away or not low <= problem.target <= high:
        return None
    return None if difficulty.num_spare and problem.rule == "all" and not solvable(problem) else problem


def training_problem(difficulty: Difficulty, rule: NumbersRule, *, seed: int, index: int) -> Countdown:
    """The training problem with this index: a function of (seed, index), never from the held-out multisets."""
    rng = Random(f"countdown {seed} {index}")
    for problem in islice(draws(difficulty, rule, rng), MAX_DRAWS):
        if problem is not None and not held_out(problem.numbers):
            return problem
    raise UserError(
        f"task: {MAX_DRAWS} draws gave no training problem of {difficulty_text(difficulty, rule)}."
        "  Widen the range of targets or of numbers, or allow more operators."
    )


def held_out_problems(difficulty: Difficulty, rule: NumbersRule, size: int) -> list[Countdown]:
    """This many held-out problems, no two with the same multiset and target: the same ones for every seed.

    They are drawn as training problems are, repetitions left out, so a common problem is likely to be among them.  When
    drawing finds no more, the remaining problems are listed: there are enough, or it is an error.  (A listing of
    minutes is skipped; the error then counts drawn problems.)
    """
    rng = Random("countdown held out")
    found: dict[tuple[Numbers, int], Countdown] = {}
    idle = 0
    for problem in draws(difficulty, rule, rng):
        if len(found) == size or idle == MAX_DRAWS:
            break
        idle += 1
        if problem is not None and held_out(problem.numbers):
            key = (tuple(sorted(problem.numbers)), problem.target)
            idle = 0 if key not in found else idle
            found.setdefault(key, problem)
    num_multisets = comb(len(set(difficulty.pool)) + difficulty.num_numbers - 1, difficulty.num_numbers)
    if len(found) < size and num_multisets * 8**difficulty.num_numbers <= MAX_LISTING:
        for numbers in combinations_with_replacement(sorted(set(difficulty.pool)), difficulty.num_numbers):
            parts = set(combinations(numbers, difficulty.num_numbers - difficulty.num_spare))
            made = (makeable(part, difficulty.operators) for part in parts)
            for target in sorted(frozenset().union(*made)) if held_out(numbers) else ():
                problem = allowed_problem(difficulty, Countdown(numbers, target, rule))
                if problem is not None:
                    found.setdefault((numbers, target), problem)
    if len(found) < size:
        raise UserError(
            f"task.held_out_size = {size}: found only {len(found)} held-out problems of"
            f" {difficulty_text(difficulty, rule)}.  Ask for fewer, or widen the range of numbers or targets."
        )
    return list(found.values())[:size]


def difficulty_text(difficulty: Difficulty, rule: NumbersRule) -> str:
    pool, (low, high) = sorted(set(difficulty.pool)), difficulty.targets
    return (
        f"{difficulty.num_numbers} numbers out of {len(pool)} from {pool[0]} to {pool[-1]},"
        f" targets {low} to {high} made with {difficulty.operators}, numbers = {rule}"
    )


@lru_cache(maxsize=4096)
def makeable(numbers: Numbers, operators: str) -> frozenset[int]:
    """Every value that `make_target` can have for these numbers."""
    if len(numbers) == 1:
        return frozenset(numbers)
    made: set[int] = set()
    for large, small in splits(numbers):
        for a in makeable(large, operators):
            for b in makeable(small, operators):
                results = (apply(operator, *sides) for operator in operators for sides in ((a, b), (b, a)))
                made.update(result for result in results if result is not None)
    return frozenset(made)
