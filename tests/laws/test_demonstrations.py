"""Demonstrations keep their own rules: right arithmetic, no try twice, an answer that is the last try."""

from fractions import Fraction
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from posttrain.options.task import Demonstrator
from posttrain.rewards.countdown.grader import Countdown, Outcome, countdown_outcome
from posttrain.rewards.countdown.step_rewards import HIT, MISS, STEP, read_try
from posttrain.rewards.parsing.arithmetic import literals, postfix, value
from posttrain.tasks.countdown.demonstrator import demonstrate
from posttrain.tasks.countdown.problems import Difficulty, training_problem
from posttrain.tasks.countdown_task import search

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
    exact = [tuple(line.split(",")) for line in tries]
    assert len(set(exact)) == len(exact)
    swapped = {tuple(sorted(canonical(step) for step in line.split(","))) for line in tries}
    assert len(swapped) == len(tries)


def canonical(step: str) -> str:
    a, operator, b, _ = STEP.fullmatch(step).groups()
    return operator.join(sorted((a, b), key=int)) if operator in "+*" else a + operator + b


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
