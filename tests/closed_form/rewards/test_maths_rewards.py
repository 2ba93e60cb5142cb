"""The reward for mathematical answers: where the answer is, what is exact or refused, what a gold answer may be."""

import sys
import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from posttrain.options.reward import RewardOptions
from posttrain.rewards import math_reward as maths_slowly
from posttrain.rewards.exact_match import AnswerOutcome, gold_answer
from posttrain.rewards.grading.answers import Graded
from posttrain.rewards.math_reward import (
    MathsReward,
    Question,
    as_asked,
    is_refused,
    other_letters,
    tower,
    without_dollars,
)
from posttrain.rewards.parsing.tags import answer_in, last_boxed
from posttrain.rewards.reward_registry import load_reward
from posttrain.sandbox.sandboxes import Sandboxes
from tests.support.refusals import refused, warned
from tests.support.timing import LINEAR, time_ratio

CORRECT, WRONG, REFUSED = AnswerOutcome.CORRECT, AnswerOutcome.WRONG, AnswerOutcome.REFUSED
QUICK = MathsReward(symbolic=False)


def outcome(text: str, gold: object, *, finish: str = "stop", reward: MathsReward = QUICK) -> Any:
    (graded,) = reward(completions=[text], finish_reasons=[finish], answer=[gold])
    return graded


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"<think>\boxed{1}</think> so \boxed{2} and \boxed{3}", "3"),
        (r"\boxed{\frac{1}{2}} <answer>5</answer>", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed {7}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a\}b}", r"a\}b"),
        ("<answer>4</answer> <answer>5</answer> 6", "5"),
        ("it is 3, or rather -4.5", "-4.5"),
        ("about 1,234 of them", "1,234"),
        ("half: 1/2", "1/2"),
        ("<think>9</think>", None),
        (r"<think>so \boxed{5} and", None),
        ("4 <think>or 5", "4"),
        ("no number", None),
        ("", None),
    ],
)
def test_where_the_answer_is(text: str, expected: str | None) -> None:
    assert answer_in(text) == expected


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("5", "5", CORRECT),
        ("5.0", "5", CORRECT),
        ("x = 5", "5", CORRECT),
        ("5", "x=5", CORRECT),
        (r"\frac{3}{4}", "0.75", CORRECT),
        ("0.3333", "1/3", WRONG),
        ("0.50000049", "0.5", WRONG),
        (r"100\%", "100", WRONG),
        (r"100\%", "1", CORRECT),
        ("9=5", "5", REFUSED),
        ("1=2=5", "5", REFUSED),
        ("x=4=5", "5", REFUSED),
        ("5 = x", "5", REFUSED),
        ("x > 5", "5", REFUSED),
        ("5, 6", "5", WRONG),
        (r"5 \text{ or } 6", "5", REFUSED),
        (r"\pm 5", "5", REFUSED),
        ("9^{9^{9^{9}}}", "5", REFUSED),
        ("2^{99999}", "5", REFUSED),
        ("99999!", "5", REFUSED),
        ("5" * 2000, "5", REFUSED),
    ],
)
def test_what_an_answer_earns(answer: str, gold: str, expected: AnswerOutcome) -> None:
    assert outcome(rf"\boxed{{{answer}}}", gold) == (float(expected is CORRECT), expected)


def test_of_a_text_that_was_cut_off_no_last_number_is_read() -> None:
    for text in ("it is 12", r"it is \boxed{12"):  # the next token could have been a digit
        assert answer_in(text, cut_off=True) is None
    for text in (r"it is \boxed{12} which", "<answer>12</answer> 1"):
        assert answer_in(text, cut_off=True) == "12"


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"x ≈ \sqrt{2}", r"\sqrt{2}"),
        (r"\sqrt{2} \mod 3", r"\sqrt{2}"),
        (r"\sqrt{2} $ 3", r"\sqrt{2}"),
        (r"[\sqrt{2}, \sqrt{2}]", r"\sqrt{2}"),
        (r"\{\sqrt{2}\}", r"\sqrt{2}"),
        (r"\sqrt{2}", r"\{\sqrt{2}\}"),
        (r"0.3\ldots", "0.3"),
        (r"3 \boxed x+1", "x+1"),
        (r"\sqrt{2} e 3", r"\sqrt{2}"),
        (r"5 \text{ m}", r"5 \text{ cm}"),
        ("5 m", "5 cm"),
        (r"\sqrt{2} \text{vs} {\sqrt{3}}", r"\sqrt{2}"),
        (r"\sqrt{2} \text{maybe} {3}", r"\sqrt{2}"),
        (r"\sqrt{2} \text{3}", r"\sqrt{2}"),
        ("9^{9^{9}}", "x^2"),
        ("e^{x^{y^z}}", "e^{x^2}"),
        ("2^{9999}", r"\sqrt{2}"),
        ("(10^6)!", r"\sqrt{2}"),
        ("((9!)!)!", r"\sqrt{2}"),
        ("(" * 12 + r"\sqrt{2}" + ")" * 12, r"\sqrt{2}"),
    ],
)
def test_what_math_verify_would_take_or_not_come_back_from_is_refused(answer: str, gold: str) -> None:
    assert is_refused(answer, gold)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("y^3 x^2", "x^2 y^3"),
        ("e^{x^2}", "e^{x^{2}}"),
        ("4^{1012}", "2^{2024}"),
        (r"x_1 = \sqrt{2}", r"\sqrt{2}"),
        (r"\theta = \sqrt{2}", r"\sqrt{2}"),
        (r"1{,}234\sqrt{2}", r"1234\sqrt{2}"),
        (r"\sqrt{2} \text{ cm}^2", r"\sqrt{2}"),
        (r"5 \text{ hours}", r"5 \text{ hour}"),
        (r"3 \cdot 4", "12"),
        (r"\text{yes}", r"\text{yes}"),
        (r"(\sqrt{2}, 1)", r"(1, \sqrt{2})"),
        (r"1, 2, \ldots, n", r"1, 2, \ldots, n"),
        ("(n+1)!", "(n+1) n!"),
        ("(" * 11 + r"\sqrt{2}" + ")" * 11, r"\sqrt{2}"),
    ],
)
def test_what_may_be_right_is_asked_about(answer: str, gold: str) -> None:
    assert not is_refused(answer, gold)
    assert not other_letters(answer, gold)


def test_letters_that_the_gold_answer_lacks_are_no_units() -> None:
    for answer, gold in (("2x d", "2x"), (r"\text{yes} d", r"\text{yes}")):
        assert other_letters(answer, gold)
    days = (r"\sqrt{2} d", r"\sqrt{2}")  # a gold value may have been asked for in them
    for answer, gold in (("y = 2x", "2x"), days, (r"\mathbb{R}", r"(-\infty, \infty)")):
        assert not other_letters(answer, gold)


@pytest.mark.parametrize(
    ("text", "height"),
    [
        ("5", 0),
        ("x^2 y^3", 1),
        ("e^x e^y", 1),
        ("e^{x^2}", 2),
        ("9^9^9", 2),
        ("9^{9^{9^9}}", 3),
        (r"9^{\left(9^{9}\right)}", 2),
        (r"9^\left(9^9\right)", 2),
        ("9**9**9", 2),
        ("(9^9)^9", 1),
        ("9^(9^9)", 2),
    ],
)
def test_how_many_powers_stand_on_each_other(text: str, height: int) -> None:
    assert tower(text) == height


@pytest.mark.parametrize(
    ("asks", "text", "expected"),
    [
        (as_asked, "1.50x + .5", r"\frac{150}{100}x + \frac{5}{10}"),
        (as_asked, r"45\degree, 45^\degree, 45°", r"45^\circ, 45^\circ, 45^\circ"),
        (as_asked, "5.", "5."),
        (as_asked, "1.2.3", "1.2.3"),
        (without_dollars, r"$$\sqrt{2}$$", r"\sqrt{2}"),
        (without_dollars, r"\$5x", "5x"),
        (without_dollars, "$1$ and 2", "$1$ and 2"),
    ],
)
def test_how_math_verify_is_asked(asks: Callable[[str], str], text: str, expected: str) -> None:
    assert asks(text) == expected


def test_what_is_missing_has_a_name() -> None:
    assert outcome("", "5") == (0.0, AnswerOutcome.NO_ANSWER)
    assert outcome("well", "5", finish="length") == (0.0, AnswerOutcome.TRUNCATED)
    assert outcome("5", None) == (None, AnswerOutcome.NO_GOLD)
    assert outcome(r"\boxed{\sqrt{2}}", "2") == (0.0, AnswerOutcome.UNREADABLE)


def test_a_gold_answer_that_cannot_be_read_is_not_scored_and_named_once() -> None:
    gold = r"\sqrt{777}"
    with warned("sqrt{777}", "not scored"):
        assert outcome("5", gold) == (None, AnswerOutcome.NO_GOLD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outcome("5", gold)


def test_ground_truth_is_another_name_of_the_column() -> None:
    assert QUICK(completions=["5"], finish_reasons=["stop"], ground_truth=[5]) == [(1.0, CORRECT)]


@pytest.mark.parametrize("piece", [r"\boxed{", "{", "<answer>", "1,", "\\", "-"])
def test_hostile_text_takes_linear_time(piece: str) -> None:
    assert time_ratio(lambda text: outcome(text, "5"), piece) < LINEAR
    assert last_boxed(piece * 1000) is None


SLOW = MathsReward(cpu_seconds=1.0)


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        (r"\sqrt{8}", r"2\sqrt{2}", CORRECT),
        ("x^2+2x+1", "(x+1)^2", CORRECT),
        (r"\frac{\pi}{2}", r"\pi/2", CORRECT),
        (r"x+\sqrt{3}", r"\sqrt{3}+x", CORRECT),
        ("x", "y", WRONG),
        (r"\sqrt{7}", r"\sqrt{8}", WRONG),
        (r"(-\infty, 2)", r"(-\infty, 2]", WRONG),
        ("2^{10}", "1024", CORRECT),
        ("1.4142135623730951", r"\sqrt{2}", WRONG),
        (r"(1.41421356, 1)", r"(\sqrt{2}, 1)", WRONG),
        ("1.5x", r"\frac{3}{2}x", CORRECT),
        (r"45\degree", r"45^\circ", CORRECT),
        ("x^2y^3", "y^3x^2", CORRECT),
    ],
)
def test_what_is_no_plain_number_is_compared_in_the_sandbox(answer: str, gold: str, expected: AnswerOutcome) -> None:
    assert outcome(rf"\boxed{{{answer}}}", gold, reward=SLOW) == (float(expected is CORRECT), expected)


def test_a_comparison_that_does_not_end_is_killed_and_the_others_of_its_process_are_answered() -> None:
    endless = r"\boxed{x^{999}+(x+1)^{998}-(x-1)^{997}\cdot(x+2)^{996}}"  # expanding it takes longer than anybody waits
    texts = [r"\boxed{\sqrt{8}}", endless, r"\boxed{\sqrt{18}}"]
    golds = [r"2\sqrt{2}", r"(x^{333}+1)^{3}+(x+1)^{998}+1", r"3\sqrt{2}"]
    found = SLOW(completions=texts, finish_reasons=["stop"] * 3, answer=golds)
    assert [found[0], found[2]] == [(1.0, CORRECT)] * 2
    assert found[1] in [(0.0, AnswerOutcome.TIME_LIMIT), (0.0, WRONG)]


def test_of_questions_that_share_a_process_only_the_one_that_hangs_or_crashes_is_lost(monkeypatch) -> None:
    source = """
import os
def compare_answers(gold, answer):
    while answer == "hang":
        pass
    if answer == "crash":
        os.abort()
    return "same" if gold == answer else "different"
"""
    monkeypatch.setattr(maths_slowly, "SOURCE", source)
    asked = [Question("a", answer) for answer in ("a", "hang", "b", "crash", "a", "c")]
    with Sandboxes() as sandboxes:
        said = maths_slowly.compare_symbolically(asked, sandboxes, cpu_seconds=0.3)
    assert said == ["same", "time_limit", "different", "crashed", "same", "different"]


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
    assert outcome(rf"\boxed{{{answer}}}", gold) == (1.0, CORRECT)
    for other in ("e-5", "e-05", "e+22", "1e-05", "n^2a", "nan"):
        assert outcome(rf"\boxed{{{other}}}", gold).score == 0.0


@pytest.mark.parametrize(
    "gold", [None, float("nan"), np.float64("nan"), np.float32("nan"), Decimal("nan"), "nan", "NaN", "", "  ", "<NA>"]
)
def test_a_missing_answer_is_not_scored_and_nobody_is_warned(gold: object) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for answer in ("5", "n^2a", "nan", ""):
            assert outcome(rf"\boxed{{{answer}}}", gold) == (None, AnswerOutcome.NO_GOLD)


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
        ("N/A", "'N/A' means no answer"),
        (r"\boxed{None}", "'None' means no answer"),
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
    golds = ["sin 2x + abc", "5 cm", "60 km/h", "5 widgets", "x = 5 or x = 6", "2xyz + abc", r"5 \text{ red apples}"]
    golds += ["5 cm^2"]
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
