"""Demonstrations keep their own rules: right arithmetic, no try twice, an answer that is the last try."""

from fractions import Fraction
from itertools import combinations, permutations
from random import Random

import pytest
from hypothesis import given, strategies as st

from posttrain.options.task import Demonstrator
from posttrain.rewards.countdown import HIT, MISS, STEP, Countdown, Outcome, countdown_outcome, read_try
from posttrain.rewards.parsing.arithmetic import literals, postfix, value
from posttrain.tasks.countdown_problems import Difficulty, reachable_values, solvable, training_problem
from posttrain.tasks.countdown_task import demonstrate, search

PATIENT = Demonstrator(give_up=0.0)


def problem(index: int, num_numbers: int = 3) -> Countdown:
    return training_problem(Difficulty(num_numbers=num_numbers), "all", seed=0, index=index)


def parts(completion: str) -> tuple[list[str], str]:
    """The tries, and the answer."""
    think, answer = completion.removeprefix("<think>").removesuffix("</answer>").split("\n</think>\n<answer>")
    lines = think.split("\n")
    assert all(line[-1] in HIT + MISS for line in lines)
    assert all(line[-1] == MISS for line in lines[:-1]), "the search stops at its first hit"
    return [line[:-1] for line in lines], answer


@given(index=st.integers(0, 10_000), num_numbers=st.integers(2, 4), seed=st.integers(0, 9))
def test_every_step_is_right_and_uses_what_is_on_the_table(index, num_numbers, seed):
    puzzle = problem(index, num_numbers)
    tries, _ = parts(demonstrate(puzzle, Random(seed), Demonstrator()))
    for line in tries:
        result = int(line.rsplit("=", 1)[1])
        # A try that reaches its own result solves the puzzle whose target that is.
        assert read_try(Countdown(puzzle.numbers, result), line).hits, line
        assert all(int(STEP.fullmatch(step)[4]) <= Demonstrator().largest_result for step in line.split(","))


@given(index=st.integers(0, 10_000), seed=st.integers(0, 9))
def test_the_answer_is_the_last_try_and_earns_what_that_try_found(index, seed):
    puzzle = problem(index)
    completion = demonstrate(puzzle, Random(seed), Demonstrator())
    tries, answer = parts(completion)
    tokens = postfix(answer)
    assert sorted(map(int, literals(tokens))) == sorted(puzzle.numbers)
    assert Fraction(*value(tokens)) == int(tries[-1].rsplit("=", 1)[1])
    found = search(puzzle, completion)
    assert completion[completion.index("\n</think>") - 1] == (HIT if found.successes else MISS)
    assert countdown_outcome(puzzle, completion) == (Outcome.CORRECT if found.successes else Outcome.WRONG_VALUE)


@given(index=st.integers(0, 10_000), seed=st.integers(0, 9))
def test_no_try_is_made_twice_not_even_with_its_operands_exchanged(index, seed):
    tries, _ = parts(demonstrate(problem(index), Random(seed), PATIENT))
    assert len(tries) <= PATIENT.max_tries
    assert len({tuple(line.split(",")) for line in tries}) == len(tries)

    def canonical(step: str) -> str:
        a, operator, b, _ = STEP.fullmatch(step).groups()
        return operator.join(sorted((a, b), key=int)) if operator in "+*" else a + operator + b

    assert len({tuple(sorted(map(canonical, line.split(",")))) for line in tries}) == len(tries)


def test_the_same_generator_writes_the_same_demonstration():
    puzzle = problem(3)
    assert demonstrate(puzzle, Random(5), PATIENT) == demonstrate(puzzle, Random(5), PATIENT)


def test_who_never_gives_up_finds_more_and_who_always_does_tries_once():
    problems = [problem(index) for index in range(300)]
    rng = Random(0)
    hasty = Demonstrator(give_up=1.0)
    once = [parts(demonstrate(puzzle, rng, hasty))[0] for puzzle in problems]
    assert all(len(tries) == 1 for tries in once)
    patient = [search(puzzle, demonstrate(puzzle, rng, PATIENT)).successes for puzzle in problems]
    hits = sum(read_try(puzzle, tries[0]).hits for puzzle, tries in zip(problems, once, strict=True))
    assert sum(patient) > 3 * hits


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


def test_nothing_is_made_by_dividing_by_zero() -> None:
    # 0 and 5 make 0 + 5 = 5 - 0 = 5 and 0 · 5 = 0 / 5 = 0; 5 / 0 has no value.
    assert reachable_values((0, 5)) == {(0, 1), (5, 1)}
    assert reachable_values((0, 0)) == {(0, 1)}
    # Where 0 · 5 = 0 is what 7 could be divided by.
    assert all(denominator > 0 for _, denominator in reachable_values((0, 5, 7)))
    assert not solvable(Countdown((0, 0), 1))
