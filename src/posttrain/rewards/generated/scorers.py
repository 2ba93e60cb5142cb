"""Which way an answer to a generated problem is scored.

reasoning-gym's own scorers evaluate some answers as Python, pay for an answer that the text merely contains, and take
any four numbers for those of a puzzle.  So what can be compared as text, number or arithmetic is compared here; what
has many right answers goes to its scorer, inside the sandbox alone, and where that evaluates, behind a grammar.
"""

from enum import StrEnum


class Scorer(StrEnum):
    """A way of scoring."""

    SAME = "same"
    """The answer is the row's own: the same text, or the same number exactly."""
    TEXT = "text"
    """The answer is the row's own text: an equal number may be the question."""
    LISTED = "listed"
    """One of the answers that the problem lists."""
    ARITHMETIC = "arithmetic"
    """Arithmetic over the problem's numbers, each exactly once, that comes to its target."""
    EXPRESSION = "expression"
    """reasoning-gym's scorer in the sandbox, behind a grammar of expressions: it evaluates them."""
    GYM = "gym"
    """reasoning-gym's scorer in the sandbox."""


OURS = {
    # Those that evaluate what they score: `eval`, sympy's `parse_expr`.
    "countdown": Scorer.ARITHMETIC,
    "puzzle24": Scorer.ARITHMETIC,
    "n_queens": Scorer.LISTED,
    "string_insertion": Scorer.SAME,
    "spiral_matrix": Scorer.SAME,
    "binary_matrix": Scorer.SAME,
    "number_sorting": Scorer.SAME,
    "polynomial_multiplication": Scorer.EXPRESSION,
    "simple_integration": Scorer.EXPRESSION,
    "intermediate_integration": Scorer.EXPRESSION,
    # Those that pay in full for other texts than the one right answer: any text where it is False, the answer twice or
    # among others, one root of two (benchmarks/gym_scoring.py).
    "fraction_simplification": Scorer.TEXT,
    "game_of_life_halting": Scorer.SAME,
    "gsm_symbolic": Scorer.SAME,
    "letter_jumble": Scorer.SAME,
    "polynomial_equations": Scorer.SAME,
    "spell_backward": Scorer.SAME,
    "time_intervals": Scorer.SAME,
}
"""Generators whose own scorer is not asked, or behind a grammar alone, and what is done in its place."""


def scorer_of(generator: str, *, one_answer: bool) -> Scorer:
    """How a generator's answers are scored; `one_answer` where the library itself knows but one right answer."""
    return OURS.get(generator, Scorer.SAME if one_answer else Scorer.GYM)
