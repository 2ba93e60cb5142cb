"""Additions a + b with a from 10 to 99 and b from 1 to 9: the training questions, and others that are held out."""

from dataclasses import dataclass
from random import Random

COURSE_SEED = 42
"""Python's generator so seeded draws the course's questions: a, then b, one question after the other."""


@dataclass(frozen=True, slots=True)
class Addition:
    """A question."""

    a: int
    b: int

    @property
    def total(self) -> int:
        """The right answer."""
        return self.a + self.b

    @property
    def question(self) -> str:
        """As the user asks it."""
        return f"If you add {self.a} and {self.b}, what is the result?"


def training_additions(count: int) -> list[Addition]:
    """The first questions of the course's draw, in its order; some stand there twice."""
    rng = Random(COURSE_SEED)
    return [Addition(rng.randint(10, 99), rng.randint(1, 9)) for _ in range(count)]


def held_out_additions(count: int, *, num_training: int) -> list[Addition]:
    """Different questions, none of them among the training questions; the same ones for every seed."""
    return unseen(num_training)[:count]


def demonstrated_additions(*, num_training: int, num_held_out: int) -> list[Addition]:
    """Every question that is not held out: what a demonstrator may show."""
    apart = set(held_out_additions(num_held_out, num_training=num_training))
    return [each for each in every_addition() if each not in apart]


def unseen(num_training: int) -> list[Addition]:
    """All questions that are not trained on, shuffled."""
    trained = set(training_additions(num_training))
    others = [each for each in every_addition() if each not in trained]
    Random("held-out additions").shuffle(others)
    return others


def every_addition() -> list[Addition]:
    """All of them, in order."""
    return [Addition(a, b) for a in range(10, 100) for b in range(1, 10)]
