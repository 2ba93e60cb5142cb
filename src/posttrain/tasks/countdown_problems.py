"""Countdown problems without end: drawn by (seed, index), solvable by construction, with a held-out set apart."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from posttrain.rewards.countdown import Countdown, NumbersRule

HELD_OUT_SHARE = 10
"""One number multiset in this many is held out."""


@dataclass(frozen=True, kw_only=True)
class Difficulty:
    """How hard a problem is: the numbers it gives, the arithmetic behind it, and the targets it allows."""

    num_numbers: int = 3
    pool: tuple[int, ...] = tuple(range(1, 31))
    """Numbers are drawn from these, with replacement."""
    operators: str = "+-*/"
    targets: tuple[int, int] = (1, 99)
    """Smallest and largest target."""


def held_out(numbers: tuple[int, ...]) -> bool:
    """Whether a multiset of numbers is set apart for evaluation, whatever the seed, target or rule."""
    digest = hashlib.blake2b(repr(sorted(numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


def apply(operator: str, a: int, b: int) -> int | None:
    """The result of `a operator b` where it is a non-negative integer, else None."""
    match operator:
        case "+":
            return a + b
        case "-":
            return a - b if a >= b else None
        case "*":
            return a * b
        case _:
            return a // b if b and a % b == 0 else None


def make_target(numbers: tuple[int, ...], operators: str, rng: Random) -> int | None:
    """The value of a random arithmetic tree over all the numbers, or None where a step leaves the integers."""
    values = list(numbers)
    while len(values) > 1:
        a = values.pop(rng.randrange(len(values)))
        b = values.pop(rng.randrange(len(values)))
        result = apply(operators[rng.randrange(len(operators))], a, b)
        if result is None:
            return None
        values.append(result)
    return values[0]


def problems(difficulty: Difficulty, rule: NumbersRule, rng: Random) -> Iterator[Countdown]:
    """Random solvable problems, endlessly; targets outside the range are drawn again."""
    low, high = difficulty.targets
    while True:
        numbers = tuple(difficulty.pool[rng.randrange(len(difficulty.pool))] for _ in range(difficulty.num_numbers))
        target = make_target(numbers, difficulty.operators, rng)
        if target is not None and low <= target <= high:
            yield Countdown(numbers, target, rule)


def training_problem(difficulty: Difficulty, rule: NumbersRule, *, seed: int, index: int) -> Countdown:
    """The training problem with this index: a function of (seed, index), never from the held-out multisets."""
    rng = Random(f"countdown {seed} {index}")
    return next(problem for problem in problems(difficulty, rule, rng) if not held_out(problem.numbers))
