"""The solver against plain enumeration of every expression tree, in Fractions."""

from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.rewards.countdown.grader import Countdown, Outcome, countdown_outcome
from posttrain.tasks.countdown.solver import reachable_values, solvable

PUZZLE_NUMBERS = st.lists(st.integers(0, 12), min_size=1, max_size=3).map(tuple)


def tree_values(numbers: tuple[int, ...]) -> set[Fraction]:
    """The values of all trees over the numbers in this order, negative intermediate results included."""
    if len(numbers) == 1:
        return {Fraction(numbers[0])}
    found = set()
    for cut in range(1, len(numbers)):
        for a in tree_values(numbers[:cut]):
            for b in tree_values(numbers[cut:]):
                found |= {a + b, a - b, a * b}
                if b:
                    found.add(a / b)
    return found


def reachable(numbers: tuple[int, ...]) -> set[Fraction]:
    """What all the numbers make in any order; magnitudes, because the grader allows a sign in front."""
    return {abs(value) for order in set(permutations(numbers)) for value in tree_values(order)}


def graded(problem: Countdown, expression: str) -> Outcome:
    return countdown_outcome(problem, f"<think></think><answer>{expression}</answer>")


@given(numbers=PUZZLE_NUMBERS)
def test_a_target_is_solvable_exactly_when_enumeration_reaches_it(numbers: tuple[int, ...]) -> None:
    values = reachable(numbers)
    for target in range(-60, 200):
        assert solvable(Countdown(numbers, target)) == (abs(target) in values), target


@pytest.mark.parametrize("numbers", [(1, 5, 5, 5), (3, 3, 8, 8), (2, 25, 75, 100), (0, 0, 4, 6), (7, 7, 7, 7)])
def test_four_numbers_are_decided_as_enumeration_does(numbers: tuple[int, ...]) -> None:
    values = reachable(numbers)
    for target in range(400):
        assert solvable(Countdown(numbers, target)) == (target in values), target


@given(numbers=PUZZLE_NUMBERS, target=st.integers(-5, 60))
def test_a_subset_problem_is_solvable_when_some_part_of_its_numbers_is(numbers: tuple[int, ...], target: int) -> None:
    parts = [part for size in range(1, len(numbers) + 1) for part in combinations(numbers, size)]
    expected = any(abs(target) in reachable(part) for part in parts)
    assert solvable(Countdown(numbers, target, "subset")) == expected


def written_trees(numbers: tuple[int, ...]) -> Iterator[str]:
    """Every tree over the numbers in this order, fully parenthesised."""
    if len(numbers) == 1:
        yield str(numbers[0])
    for cut in range(1, len(numbers)):
        for left in written_trees(numbers[:cut]):
            for right in written_trees(numbers[cut:]):
                yield from (f"({left}{operator}{right})" for operator in "+-*/")


def test_nothing_is_made_by_dividing_by_zero() -> None:
    # 0 and 5 make 0 + 5 = 5 - 0 = 5 and 0 · 5 = 0 / 5 = 0; 5 / 0 has no value.
    assert reachable_values((0, 5)) == {(0, 1), (5, 1)}
    assert reachable_values((0, 0)) == {(0, 1)}
    assert all(
        denominator > 0 for _, denominator in reachable_values((0, 5, 7))
    )  # where 0 · 5 = 0 is what 7 could be divided by
    assert not solvable(Countdown((0, 0), 1))
