"""Credit for coming near the target, by hand."""

import pytest

from posttrain.errors import UserError
from posttrain.rewards.countdown.grader import CountdownCredit, Outcome


@pytest.mark.parametrize(
    ("answer", "score", "outcome"),
    [
        ("3 + 4 + 5", 1.0, Outcome.CORRECT),
        ("3 * 4 - 5", 0.2 * (1 - 5 / 12), Outcome.WRONG_VALUE),
        ("5 * 4 - 3", 0.2 * (1 - 5 / 12), Outcome.WRONG_VALUE),
        ("3 * 4 * 5", 0.0, Outcome.WRONG_VALUE),
        ("3 / 4 + 5", 0.2 * (5.75 / 12), Outcome.WRONG_VALUE),
        ("3 / (4 - 4) + 5", 0.0, Outcome.WRONG_NUMBERS),
        ("12", 0.0, Outcome.WRONG_NUMBERS),
        ("11 + 1", 0.0, Outcome.WRONG_NUMBERS),
        ("nearly 12", 0.0, Outcome.MALFORMED),
    ],
)
def test_what_an_answer_is_worth(answer: str, score: float, outcome: Outcome) -> None:
    (graded,) = CountdownCredit(credit=0.2)(
        completions=[f"<think></think><answer>{answer}</answer>"],
        finish_reasons=["stop"],
        numbers=[[3, 4, 5]],
        target=[12],
    )
    assert graded == (pytest.approx(score), outcome)


def test_a_division_by_zero_is_near_nothing() -> None:
    (graded,) = CountdownCredit()(
        completions=["<think></think><answer>5 / (4 - 4)</answer>"],
        finish_reasons=["stop"],
        numbers=[[5, 4, 4]],
        target=[5],
    )
    assert graded == (0.0, Outcome.WRONG_VALUE)


@pytest.mark.parametrize("credit", [0.0, 1.0, -0.1])
def test_near_is_worth_less_than_right(credit: float) -> None:
    with pytest.raises(UserError):
        CountdownCredit(credit=credit)
