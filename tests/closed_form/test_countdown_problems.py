"""Countdown's problems: what each difficulty draws, what is held out, and what happens when there is too little."""

import hashlib
from itertools import combinations, combinations_with_replacement, permutations

import pytest

from posttrain.rewards.countdown import Countdown
from posttrain.rewards.parsing.arithmetic import apply
from posttrain.tasks.countdown_problems import (
    COURSE,
    Difficulty,
    held_out,
    held_out_problems,
    solvable,
    training_problem,
)
from tests.support.refusals import refused

DEFAULT = Difficulty()


def drawn(difficulty: Difficulty, rule: str, number: int, seed: int = 0) -> list[Countdown]:
    return [training_problem(difficulty, rule, seed=seed, index=index) for index in range(number)]


def values(numbers: tuple[int, ...], operators: str) -> set[int]:
    """What numbers make in this order, two neighbours at a time, through steps that `apply` allows."""
    if len(numbers) == 1:
        return {numbers[0]}
    found: set[int] = set()
    for i in range(len(numbers) - 1):
        for operator in operators:
            made = apply(operator, numbers[i], numbers[i + 1])
            if made is not None:
                found |= values((*numbers[:i], made, *numbers[i + 2 :]), operators)
    return found


def makeable(numbers: tuple[int, ...], operators: str) -> set[int]:
    return set().union(*(values(order, operators) for order in permutations(numbers)))


def test_the_problems_that_the_bundled_model_was_trained_on_are_still_those() -> None:
    # The only pasted value here: the bundled weights and every recorded run depend on these very problems.
    problems = [problem for seed in (0, 1, 7) for problem in drawn(DEFAULT, "all", 2000, seed)]
    digest = hashlib.sha256(b"".join(repr((problem.numbers, problem.target)).encode() for problem in problems))
    assert digest.hexdigest() == "6f77ad6ca29cf1c5d4f5e1c0c81f0b3b6bf7eedfe1a1728e94eeb698304e0fa0"


def test_the_held_out_multisets_are_still_those() -> None:
    apart = [each for each in combinations_with_replacement(range(1, 31), 3) if held_out(each)]
    assert hashlib.sha256(repr(apart).encode()).hexdigest() == (
        "f4c95bbe495b0a684d94a6504e1e3049e886783bb0a2d1cc50bb0136659c9c66"
    )
    # 4960 multisets: 496 expected, with a standard deviation of √(4960 · 0.1 · 0.9) = 21.
    assert abs(len(apart) - 496) < 3 * 21
    for numbers in combinations(range(1, 12), 3):  # in any order
        assert len({held_out(order) for order in permutations(numbers)}) == 1


def test_default_problems_keep_to_their_ranges_and_can_be_solved() -> None:
    problems = drawn(DEFAULT, "all", 300)
    assert {len(problem.numbers) for problem in problems} == {3}
    given_numbers = {number for problem in problems for number in problem.numbers}
    assert given_numbers == set(range(1, 31))  # 900 draws: each of the 30 is missed with probability 1e-13
    assert all(1 <= problem.target <= 99 for problem in problems)
    assert all(problem.target in makeable(problem.numbers, "+-*/") for problem in problems)
    assert any(len(set(problem.numbers)) < 3 for problem in problems)  # with replacement


def test_a_problem_depends_on_seed_and_index_alone() -> None:
    backwards = [training_problem(DEFAULT, "all", seed=3, index=index) for index in reversed(range(20))]
    assert drawn(DEFAULT, "all", 20, seed=3) == backwards[::-1]
    assert drawn(DEFAULT, "all", 20, seed=3) != drawn(DEFAULT, "all", 20, seed=4)
    assert len(set(drawn(DEFAULT, "all", 20, seed=3))) > 15


def test_difficulty_is_graded() -> None:
    hard = Difficulty(num_numbers=4, pool=(2, 7, 50), operators="+*", targets=(100, 400))
    for problem in drawn(hard, "all", 10):
        assert len(problem.numbers) == 4
        assert set(problem.numbers) <= {2, 7, 50}
        assert 100 <= problem.target <= 400
        assert problem.target in makeable(problem.numbers, "+*")


@pytest.mark.parametrize("rule", ["all", "subset"])
def test_course_problems_are_made_from_three_of_four_numbers(rule: str) -> None:
    problems = drawn(COURSE, rule, 150)
    made_with = set()
    for problem in problems:
        assert len(problem.numbers) == 4
        assert set(problem.numbers) <= {1, 2, 5, 10, 25, 50, 75, 100}
        assert problem.target > 0
        assert problem.target not in problem.numbers
        ways = [i for i in range(4) if problem.target in makeable(without(problem.numbers, i), "+-*|")]
        assert ways
        assert solvable(problem)
        made_with |= {ways[0]} if len(ways) == 1 else set()
    assert made_with == {0, 1, 2, 3}  # the number that is not needed stands anywhere


def without(numbers: tuple[int, ...], index: int) -> tuple[int, ...]:
    return numbers[:index] + numbers[index + 1 :]


def test_the_course_has_an_operator_of_its_own_and_problems_that_only_a_subset_solves() -> None:
    admitted = drawn(COURSE, "subset", 150)
    assert not all(solvable(Countdown(problem.numbers, problem.target, "all")) for problem in admitted)
    given = [("|", 3, 8), ("|", 8, 3), ("-", 3, 8), ("-", 8, 3), ("/", 8, 3), ("/", 8, 4), ("/", 8, 0)]
    assert [apply(*each) for each in given] == [5, 5, None, 5, None, 2, None]


@pytest.mark.parametrize(
    ("difficulty", "rule", "size"), [(DEFAULT, "all", 512), (COURSE, "all", 200), (COURSE, "subset", 400)]
)
def test_held_out_problems_are_distinct_solvable_and_never_trained_on(difficulty, rule, size) -> None:
    problems = held_out_problems(difficulty, rule, size)
    keys = {(tuple(sorted(problem.numbers)), problem.target) for problem in problems}
    assert len(keys) == len(problems) == size
    assert all(held_out(problem.numbers) and solvable(problem) for problem in problems)
    trained = {tuple(sorted(problem.numbers)) for problem in drawn(difficulty, rule, 1000)}
    assert not trained & {numbers for numbers, _ in keys}
    assert held_out_problems(difficulty, rule, size) == problems
    assert held_out_problems(difficulty, rule, 100) == problems[:100]


TINY = Difficulty(num_numbers=2, pool=tuple(range(1, 11)))


def test_held_out_problems_run_out_exactly_where_there_are_no_more() -> None:
    multisets = [each for each in combinations_with_replacement(range(1, 11), 2) if held_out(each)]
    available = sum(len(makeable(each, "+-*/") & set(range(1, 100))) for each in multisets)
    assert len(held_out_problems(TINY, "all", available)) == available
    with refused(f"held_out_size = {available + 1}", f"only {available}"):
        held_out_problems(TINY, "all", available + 1)


def test_problems_too_rare_to_be_drawn_are_still_found() -> None:
    # One 4 among 199 3s: the hash holds out 3·3·3·3·3·3, 3·3·3·3·4·4 and 3·4·4·4·4·4, the last with a chance of
    # 6 / 200^5 = 2e-11 per draw.
    rare = Difficulty(num_numbers=6, pool=(3,) * 199 + (4,), operators="*", targets=(1, 10**6))
    assert [each for each in combinations_with_replacement((3, 4), 6) if held_out(each)] == [
        (3, 3, 3, 3, 3, 3),
        (3, 3, 3, 3, 4, 4),
        (3, 4, 4, 4, 4, 4),
    ]
    assert sorted(problem.target for problem in held_out_problems(rare, "all", 3)) == [729, 1296, 3072]


def test_no_problem_at_all_is_an_error_and_not_a_hang_or_a_search_of_minutes() -> None:
    with refused("3 numbers out of 30 from 1 to 30"):
        training_problem(Difficulty(targets=(30000, 40000)), "all", seed=0, index=0)
    with refused("only 0"):
        held_out_problems(Difficulty(num_numbers=5, pool=tuple(range(60)), targets=(10**9, 10**9)), "all", 1)
