"""Written-out Countdown searches, by demonstrators of unequal skill and patience, for supervised warm-up.

A demonstration is what a reasoning transcript looks like at its smallest: tries, one a line, each step an exact
equation, then an answer in tags.

    <think>17+5=22,22-3=19
    5*3=15,15+17=32
    17-5=12,12*3=36
    </think>
    <answer>(17-5)*3</answer>

The search is imperfect on purpose, as text found in the wild is.  A *random* demonstrator combines numbers and
operators blindly; a *closing* one chooses its last step so that the result lands nearest to the target.  After each
failed try a demonstrator gives up with its own probability and answers with what it tried last, which is wrong.  A
policy cloned from the mixture therefore knows better behaviour than it shows on average: the room that
reinforcement learning works in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from posttrain.rewards.countdown import Countdown
from posttrain.tasks.countdown_problems import apply


@dataclass(frozen=True, kw_only=True)
class Demonstrators:
    """Who writes the demonstrations: shares and probabilities in [0, 1], drawn afresh for each demonstration."""

    closing_share: float = 0.15
    """Share of demonstrators who choose the last step of every try to land nearest to the target."""
    patient_share: float = 0.15
    """Share of demonstrators who seldom give up; independent of skill."""
    give_up_impatient: float = 0.65
    """Chance that an impatient demonstrator stops after a failed try."""
    give_up_patient: float = 0.1
    """Chance that a patient one does."""
    max_tries: int = 18
    """Nobody tries more often than this."""


@dataclass(frozen=True, slots=True)
class Term:
    """A number on the table: its value, and the expression that made it."""

    value: int
    expression: str


@dataclass(frozen=True, slots=True)
class Try:
    """One attempt: its steps as text, and what it arrived at."""

    steps: str
    result: Term


def demonstrate(problem: Countdown, rng: Random, who: Demonstrators) -> str:
    """One completion: tries until one hits the target or the demonstrator gives up, then the last try as the answer."""
    closing = rng.random() < who.closing_share
    give_up = who.give_up_patient if rng.random() < who.patient_share else who.give_up_impatient
    lines: list[str] = []
    while True:
        attempt = one_try(problem, rng, closing)
        lines.append(attempt.steps)
        if attempt.result.value == problem.target or len(lines) == who.max_tries or rng.random() < give_up:
            break
    return "<think>" + "\n".join(lines) + f"\n</think>\n<answer>{bare(attempt.result.expression)}</answer>"


def one_try(problem: Countdown, rng: Random, closing: bool) -> Try:
    """Combine all the numbers, two at a time, by steps that stay in the non-negative integers."""
    while True:
        table = [Term(number, str(number)) for number in problem.numbers]
        steps: list[str] = []
        while len(table) > 1:
            move = nearest_move(table, problem.target) if closing and len(table) == 2 else random_move(table, rng)
            if move is None:
                break
            step, table = move
            steps.append(step)
        else:
            return Try(",".join(steps), table[0])


def random_move(table: Sequence[Term], rng: Random) -> tuple[str, list[Term]] | None:
    """Combine two random terms by a random operator; None where that leaves the non-negative integers."""
    rest = list(table)
    a = rest.pop(rng.randrange(len(rest)))
    b = rest.pop(rng.randrange(len(rest)))
    return combine(a, "+-*/"[rng.randrange(4)], b, rest)


def nearest_move(table: Sequence[Term], target: int) -> tuple[str, list[Term]]:
    """Combine the last two terms so that the result is as near to the target as it can be (first found on ties)."""
    one, other = table
    moves = [combine(a, operator, b, []) for a, b in ((one, other), (other, one)) for operator in "+-*/"]
    return min((move for move in moves if move is not None), key=lambda move: abs(move[1][0].value - target))


def combine(a: Term, operator: str, b: Term, rest: list[Term]) -> tuple[str, list[Term]] | None:
    """The step `a operator b = c` as text, and the table with c in place of a and b."""
    value = apply(operator, a.value, b.value)
    if value is None:
        return None
    made = Term(value, f"({a.expression}{operator}{b.expression})")
    return f"{a.value}{operator}{b.value}={value}", [*rest, made]


def bare(expression: str) -> str:
    """An expression without the parentheses around the whole of it."""
    return expression[1:-1] if expression.startswith("(") else expression
