"""What the column of gold answers may hold: numbers in digits, missing ones unscored, mistakes unscored and named."""

import sys
import warnings
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from posttrain.options.reward import RewardOptions
from posttrain.rewards.gold_answers import AnswerOutcome, gold_answer
from posttrain.rewards.grading.answers import Graded
from posttrain.rewards.math_reward import MathsReward
from posttrain.rewards.reward_registry import load_reward
from tests.support.refusals import refused

QUICK = MathsReward(symbolic=False)


def graded(answer: str, gold: object) -> Graded:
    (found,) = QUICK(completions=[rf"\boxed{{{answer}}}"], finish_reasons=["stop"], answer=[gold])
    assert isinstance(found, Graded)
    return found


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (5, "5"),
        (1e-05, "0.00001"),
        (1e22, "10000000000000000000000"),
        (-2.5e-7, "-0.00000025"),
        ("1e-05", "0.00001"),
        ("1e+22", "10000000000000000000000"),
        ("1e5", "100000"),
        ("2e10", "20000000000"),
        ("1e-5", "0.00001"),
        ("-12.5E3", "-12500"),
        (0.1, "0.1"),
        (np.float32(0.1), "0.1"),
        (np.float64(1e-05), "0.00001"),
        (np.int64(7), "7"),
        (np.array([7]), "7"),
        (Decimal("2.50"), "2.5"),
        (Fraction(2, 3), r"\frac{2}{3}"),
        (r"so it is \boxed{5}", "5"),
        ("Paris", r"\text{Paris}"),
    ],
)
def test_a_number_is_written_out_and_its_right_answer_is_paid(gold: object, answer: str) -> None:
    assert graded(answer, gold) == (1.0, AnswerOutcome.CORRECT)
    for other in ("e-5", "e-05", "e+22", "1e-05", "n^2a", "nan"):
        assert graded(other, gold).score == 0.0


@pytest.mark.parametrize(
    "gold", [None, float("nan"), np.float64("nan"), np.float32("nan"), Decimal("nan"), "nan", "NaN", "", "  ", "<NA>"]
)
def test_a_missing_answer_is_not_scored_and_nobody_is_warned(gold: object) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for answer in ("5", "n^2a", "nan", ""):
            assert graded(answer, gold) == (None, AnswerOutcome.NO_GOLD)


@pytest.mark.parametrize(
    ("gold", "named"),
    [
        (b"5", "b'5' is a bytes"),
        ({"value": 5}, "is a dict"),
        ([5], "is a list"),
        ((1, 2), "is a tuple"),
        (5 + 0j, "is a complex"),
        (float("inf"), "Infinity"),
        (10**4000, "more than 300 digits"),
        (1e-308 / 7, "more than 300 digits"),
        ("The answer is 5", "'The answer is 5' is a sentence"),
        ("Answer: 5", "is a sentence"),
        ("N/A", "'N/A' means that there is none"),
        (r"\boxed{None}", "'None' means that there is none"),
        ("1e400", "more than 300 digits"),
        ("She has 5 apples left over today", "is a sentence"),
        ("so 3 + 4 = 7\n#### 7", "#### 7' is a sentence"),
    ],
)
def test_what_is_neither_text_nor_a_number_is_not_scored_and_named_once(gold: object, named: str) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        reward = MathsReward(symbolic=False, cpu_seconds=float(len(named)))  # another one remembers what it named
        texts = ["5", "", r"\boxed{5}", r"\boxed{7}"]
        found = reward(completions=texts, finish_reasons=["stop"] * len(texts), answer=[gold] * len(texts))
    assert {each.score for each in found if isinstance(each, Graded)} == {None}
    assert [each for each in told if named in str(each.message)] == told
    assert len(told) == 1


def test_functions_units_and_products_in_a_gold_answer_are_no_prose() -> None:
    golds = (
        *["sin 2x + abc", "5 cm", "60 km/h", "5 widgets", "x = 5 or x = 6", "2xyz + abc", r"5 \text{ red apples}"],
        *["5 cm^2"],
    )
    assert [gold for gold in golds if gold_answer(gold).text is None] == []


@pytest.mark.parametrize("name", ["math", "maths"])
def test_without_its_extra_the_reward_is_refused_when_it_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with refused("math-verify", "posttrain[math]", "symbolic: false"):
        load_reward(RewardOptions(name=name))
    with refused("math-verify"):
        MathsReward()
    assert load_reward(RewardOptions(name=name, options={"symbolic": False})).name == name


def test_without_its_extra_a_judge_is_refused_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with refused("httpx", "posttrain[judge]"):
        load_reward(RewardOptions(name="judge", options={"endpoint": "http://127.0.0.1/v1", "model": "m"}))
