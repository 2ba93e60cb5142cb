"""Written-out Countdown searches that stop too soon, for supervised warm-up.

A demonstration is what a reasoning transcript looks like at its smallest: tries, one a line, each step an exact
equation, each try judged (`!` for a hit, `.` for a miss), then an answer in tags.

    <think>17+5=22,22-3=19.
    5*3=15,15+17=32.
    17-5=12,12*3=36!
    </think>
    <answer>(17-5)*3</answer>

The search is imperfect on purpose.  The demonstrator combines numbers and operators at random, makes no try twice, and
writes no number too large for mental arithmetic.  After each failed try it stops with a constant probability and
answers with its last try, which is wrong.  Reinforcement learning can improve a policy cloned from it in two ways: by
searching for longer and by trying better.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from posttrain.errors import UserError
from posttrain.options.task import Demonstrator
from posttrain.rewards.countdown.grader import Countdown
from posttrain.rewards.countdown.step_rewards import HIT, MISS
from posttrain.rewards.parsing.arithmetic import apply

MAX_DRAWS = 10_000
"""Random tries, most of them abandoned half-way, before a problem is found to have none that is allowed."""
IDEAS = 20
"""Tries that come to mind, one after the other, before a demonstrator finds nothing new."""


@dataclass(frozen=True, slots=True)
class TableNumber:
    """A number on the table: its value, and the expression that made it."""

    value: int
    expression: str


@dataclass(frozen=True, slots=True)
class Step:
    """One equation: as text, up to the order of operands, and the table after it."""

    text: str
    key: str
    table: list[TableNumber]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt: its steps as text, a key that identifies it, and its result."""

    steps: str
    key: frozenset[str]
    result: TableNumber


def demonstrate(problem: Countdown, rng: Random, who: Demonstrator) -> str:
    """One completion: tries until one hits the target or the demonstrator stops, then the last try as the answer."""
    tries: list[Attempt] = []
    while True:
        attempt = new_try(problem, rng, who.largest_result, {tried.key for tried in tries})
        if attempt is not None:
            tries.append(attempt)
        out_of_ideas = attempt is None or len(tries) == who.max_tries
        if out_of_ideas or tries[-1].result.value == problem.target or rng.random() < who.give_up:
            break
    lines = "\n".join(tried.steps + (HIT if tried.result.value == problem.target else MISS) for tried in tries)
    answer = tries[-1].result.expression
    answer = answer[1:-1] if answer.startswith("(") else answer  # without its outer parentheses
    return f"<think>{lines}\n</think>\n<answer>{answer}</answer>"


def new_try(problem: Countdown, rng: Random, largest: int, known: set[frozenset[str]]) -> Attempt | None:
    """A try unlike those known, if one is found in a few attempts."""
    for _ in range(IDEAS):
        attempt = one_try(problem, rng, largest)
        if attempt.key not in known:
            return attempt
    return None if known else attempt


def one_try(problem: Countdown, rng: Random, largest: int) -> Attempt:
    """Combine all the numbers, two at a time, by steps that stay in the non-negative integers up to `largest`."""
    for _ in range(MAX_DRAWS):
        table = [TableNumber(number, str(number)) for number in problem.numbers]
        steps: list[Step] = []
        while len(table) > 1:
            step = random_step(table, rng, largest)
            if step is None:
                break
            steps.append(step)
            table = step.table
        else:
            return Attempt(",".join(step.text for step in steps), frozenset(step.key for step in steps), table[0])
    raise UserError(
        f"demonstrator.largest_result = {largest}: {MAX_DRAWS} tries at {problem.numbers} all went beyond it."
        "  Raise it, or demonstrate smaller numbers."
    )


def random_step(table: Sequence[TableNumber], rng: Random, largest: int) -> Step | None:
    """Combine two random terms by a random operator; None where the result is not allowed."""
    rest = list(table)
    a = rest.pop(rng.randrange(len(rest)))
    b = rest.pop(rng.randrange(len(rest)))
    return combine(a, "+-*/"[rng.randrange(4)], b, rest, largest)


def combine(a: TableNumber, operator: str, b: TableNumber, rest: list[TableNumber], largest: int) -> Step | None:
    """The step `a operator b = c`, with c on the table in place of a and b; None where c is not allowed."""
    value = apply(operator, a.value, b.value)
    if value is None or value > largest:
        return None
    made = TableNumber(value, f"({a.expression}{operator}{b.expression})")
    sides = sorted((a.value, b.value)) if operator in "+*" else (a.value, b.value)
    return Step(f"{a.value}{operator}{b.value}={value}", f"{sides[0]}{operator}{sides[1]}", [*rest, made])
