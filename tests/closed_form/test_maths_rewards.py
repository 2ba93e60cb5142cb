"""The reward for mathematical answers: where the answer is, what is exact, what is refused."""

import warnings

import pytest

from posttrain.rewards import maths_slowly
from posttrain.rewards.maths import MathsOutcome, MathsReward, answer_in, last_boxed
from posttrain.rewards.maths_slowly import Question, Said

CORRECT, WRONG, REFUSED = MathsOutcome.CORRECT, MathsOutcome.WRONG, MathsOutcome.REFUSED
QUICK = MathsReward(symbolic=False)


def outcome(text: str, gold: object, *, finish: str = "stop") -> tuple[float | None, str]:
    (graded,) = QUICK(completions=[text], finish_reasons=[finish], answer=[gold])
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
def test_what_an_answer_earns(answer: str, gold: str, expected: MathsOutcome) -> None:
    assert outcome(rf"\boxed{{{answer}}}", gold) == (float(expected is CORRECT), expected)


def test_what_is_missing_has_a_name() -> None:
    assert outcome("", "5") == (0.0, MathsOutcome.NO_ANSWER)
    assert outcome("well", "5", finish="length") == (0.0, MathsOutcome.TRUNCATED)
    assert outcome("5", None) == (None, MathsOutcome.NO_GOLD)
    assert outcome(r"\boxed{\sqrt{2}}", "2") == (0.0, MathsOutcome.UNREADABLE)


def test_a_gold_answer_that_cannot_be_read_is_not_scored_and_named_once() -> None:
    gold = r"\sqrt{777}"
    with pytest.warns(UserWarning, match=r"sqrt\{777\}.*not scored"):
        assert outcome("5", gold) == (None, MathsOutcome.NO_GOLD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outcome("5", gold)


def test_ground_truth_is_another_name_of_the_column() -> None:
    (graded,) = QUICK(completions=["5"], finish_reasons=["stop"], ground_truth=[5])
    assert graded == (1.0, CORRECT)


def test_hostile_text_takes_linear_time() -> None:
    pieces = (r"\boxed{", "{", "<answer>", "1,", "\\", "-")
    for text in (piece * (1_000_000 // len(piece)) for piece in pieces):
        QUICK(completions=[text], finish_reasons=["stop"], answer=["5"])
        assert last_boxed(text) is None


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
    ],
)
def test_what_is_no_plain_number_is_compared_in_the_sandbox(answer: str, gold: str, expected: MathsOutcome) -> None:
    (found,) = SLOW(completions=[rf"\boxed{{{answer}}}"], finish_reasons=["stop"], answer=[gold])
    assert found == (float(expected is CORRECT), expected)


def test_a_comparison_that_does_not_end_is_killed_and_the_others_of_its_process_are_answered() -> None:
    endless = r"\boxed{x^{999}+(x+1)^{998}-(x-1)^{997}\cdot(x+2)^{996}}"  # expanding it takes longer than anybody waits
    texts = [r"\boxed{\sqrt{8}}", endless, r"\boxed{\sqrt{18}}"]
    golds = [r"2\sqrt{2}", r"(x^{333}+1)^{3}+(x+1)^{998}+1", r"3\sqrt{2}"]
    found = SLOW(completions=texts, finish_reasons=["stop"] * 3, answer=golds)
    assert [found[0], found[2]] == [(1.0, CORRECT)] * 2
    assert found[1] in [(0.0, MathsOutcome.TIME_LIMIT), (0.0, WRONG)]


def test_of_questions_that_share_a_process_only_the_one_that_hangs_or_crashes_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = """
import os
def compare(gold, answer):
    while answer == "hang":
        pass
    if answer == "crash":
        os.abort()
    return "same" if gold == answer else "different"
"""
    monkeypatch.setattr(maths_slowly, "SOURCE", source)
    asked = [Question("a", answer) for answer in ("a", "hang", "b", "crash", "a", "c")]
    said = maths_slowly.compare(asked, cpu_seconds=0.3)
    assert said == [Said.SAME, Said.TIME_LIMIT, Said.DIFFERENT, Said.UNREADABLE, Said.SAME, Said.DIFFERENT]
