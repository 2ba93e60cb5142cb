"""Answers to generated problems and to choices: where they stand, and what is the same answer."""

import json
from typing import Any

import pytest

from posttrain.rewards.code.function_questions import Unanswered
from posttrain.rewards.exact_match import (
    Scorer,
    exact_match,
    final_text,
    is_expression,
    is_no_number,
    makes_target,
    same_answer,
    same_text,
    scorer_of,
)
from posttrain.rewards.generated_reward import GeneratedReward
from posttrain.rewards.grading.answers import Graded
from posttrain.rewards.grading.function import ScoringFailure
from posttrain.sandbox.inside import plain


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<think>a</think><answer> b </answer>", "b"),
        ("<answer>a</answer> or <answer>b</answer>", "b"),
        (r"so \boxed{a} and <answer>b</answer>", "b"),
        (r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("b\n", "b"),
        ("<think><answer>a</answer></think> b", "b"),
        ("<answer>a</answer><think>b", "a"),
        ("", None),
        ("<think>a", None),
    ],
)
def test_the_answer_is_behind_the_thinking_in_the_last_tags_or_the_last_box_or_all_there_is(text, found) -> None:
    assert final_text(text, cut_off=False) == found


def test_of_a_text_that_was_cut_off_only_what_is_marked_is_an_answer() -> None:
    assert final_text("the answer is 4", cut_off=True) is None
    assert final_text("<answer>4</answer> and so o", cut_off=True) == "4"


@pytest.mark.parametrize(
    ("answer", "gold", "is_same"),
    [
        ("yes", "Yes", True),
        (" 1 2\n3  4 \n", "1 2\n3 4", True),
        ("1 2 3 4", "1 2\n3 4", False),
        ("4.0", "4", True),
        ("1/2", "0.5", True),
        ("0.3333", "1/3", False),
        ("-4", "4", False),
        ("4 4", "4", False),
        ("THOSE FROM mars", "THOSE FROM MARS", False),  # only of a single word is letter case no matter
        ("nan", "4", False),
        ("٤", "4", False),
    ],
)
def test_the_same_answer_is_the_same_text_or_the_same_number(answer: str, gold: str, is_same: bool) -> None:
    assert same_answer(answer, gold) is is_same


def test_of_a_fraction_to_simplify_the_text_counts_and_not_its_value() -> None:
    assert same_answer("13524/57134", "138/583")  # the question itself, which an equal number would pay
    assert not same_text("13524/57134", "138/583")
    assert same_text(r"\frac{79}{173}", r"$\dfrac{79}{173}$")


@pytest.mark.parametrize(
    ("answer", "pays"),
    [
        ("10*(8 - 5) - 6", True),
        ("6*4*1*1", False),
        ("10*(8-5)-6+0", False),
        ("10*(8-5)-6 ", True),
        ("8/(10-5-5)", False),
        ("10**8", False),
        ("", False),
    ],
)
def test_arithmetic_uses_the_problem_s_numbers_each_once_and_makes_the_target(answer: str, pays: bool) -> None:
    assert makes_target(answer, {"metadata": {"numbers": [5, 6, 8, 10]}}) is pays  # 24 where no target is said
    assert makes_target(answer, {"metadata": {"numbers": [5, 6, 8, 10], "target": 25}}) is False


@pytest.mark.parametrize(
    "text", ["-4*(-2*x - 8)**(3/2)/3 + C", "3584*x**5 - 896*x**3", "exp(2*x)*sin(x)/3 + C", "1.5*X"]
)
def test_what_an_integral_may_look_like_is_an_expression(text: str) -> None:
    assert is_expression(text)


HOSTILE = """
__import__('os').system('true') | x.__class__ | ().__class__.__mro__ | [x for x in (1,)] | {} | lambda: 1
x if x else x | open(1) | exec(x) | eval(x) | S(x) | N(x) | sympify(x) | print(x) | x; y | x = 1 | x := 1
1 .real | 1.real | 1e5.x | f'{x}' | "x" | x # y | x @ y | π | ｘ．ｙ | 9999999999999
"""
ODD = ("x\\\n", "x" * 1001, "", " ")


@pytest.mark.parametrize("text", [*HOSTILE.strip().replace("\n", " | ").split(" | "), *ODD])
def test_what_python_could_look_up_or_call_is_none(text: str) -> None:
    assert not is_expression(text)


def test_no_number_is_an_answer_only_where_it_is_the_row_s_own() -> None:
    assert all(is_no_number(*each) for each in (("nan + 1i", "-15.0 + 3.0i"), ("-Infinity", "4")))
    assert not any(is_no_number(*each) for each in (("Nancy", "Amelia"), ("inf", "inf")))


def test_a_scorer_is_the_library_s_only_where_it_knows_more_than_one_answer_and_evaluates_none() -> None:
    assert scorer_of("leg_counting", one_answer=True) is Scorer.SAME
    assert scorer_of("zebra_puzzles", one_answer=False) is Scorer.GYM
    assert scorer_of("countdown", one_answer=False) is Scorer.ARITHMETIC
    assert scorer_of("simple_integration", one_answer=False) is Scorer.EXPRESSION


def row(scorer: str, answer: str | None, **metadata: object) -> dict[str, list[object]]:
    packed = plain.dump({"question": "q", "answer": answer, "metadata": metadata}).decode()
    entry = json.dumps({"options": {}, "entry": packed})
    return {"generator": ["g"], "scorer": [scorer], "answer": [answer], "entry": [entry]}


def outcome(text: str, finish: str = "stop", **columns: Any) -> tuple[float | None, str]:
    (said,) = GeneratedReward()(completions=[text], finish_reasons=[finish], **columns)
    return said.score, str(said.outcome)


def test_each_way_to_fare_has_its_name() -> None:
    known, listed = row("same", "7"), row("listed", "0 1\n1 0", valid_answers=["0 1\n1 0", "1 0\n0 1"])
    for text, columns, expected in (
        ("<answer>7</answer>", known, (1.0, "correct")),
        ("<answer>8</answer>", known, (0.0, "wrong")),
        ("", known, (0.0, "no_answer")),
        ("7" * 10_001, known, (0.0, "refused")),
        ("open(1)", row("expression", "x"), (0.0, "refused")),
        ("nan", row("gym", "1"), (0.0, "refused")),
        ("1 0\n0 1", listed, (1.0, "correct")),
    ):
        assert outcome(text, **columns) == expected
    assert outcome("7", "length", **known) == (0.0, "truncated")


def test_what_the_library_gives_is_paid_in_full_or_not_at_all_unless_parts_are_asked_for() -> None:
    strict, said = GeneratedReward(), {0.5: "partial", 0.01: "partial", 1.0: "correct", 0.0: "wrong"}
    said |= {Unanswered.TIME_LIMIT: "time_limit", Unanswered.CRASHED: "unreadable"}
    assert {given: strict.slowly(given) for given in said} == {
        given: Graded(float(given == 1.0), name) for given, name in said.items()
    }
    assert GeneratedReward(partial_credit=True).slowly(0.5) == Graded(0.5, "partial")
    assert isinstance(strict.slowly(Unanswered.LOST), ScoringFailure)  # which is asked again, and no 0


def test_rows_that_no_generator_made_are_not_scored() -> None:
    mixed = {name: [*values, None] for name, values in row("same", "7").items()}
    said = GeneratedReward()(completions=["7", "7"], finish_reasons=["stop"] * 2, **mixed)
    assert said[1] is None
    assert GeneratedReward()(completions=["7"], finish_reasons=["stop"]) == [None]


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("<answer>B</answer>", "B", 1.0),
        ("<answer>(b)</answer>", "B", 1.0),
        ("<answer>B.</answer>", "B", 1.0),
        ("<answer>B) Jupiter</answer>", "B", 0.0),
        ("<answer>C</answer>", "B", 0.0),
        ("<answer>A B C D</answer>", "B", 0.0),
        ("Jupiter", "jupiter", 1.0),
        ("0.50", 0.5, 1.0),
        (r"\boxed{H_2O}", "H_2O", 1.0),
        ("H2O", "H_2O", 0.0),
        ("", "B", 0.0),
        ("B", None, None),
        ("B", "", None),
    ],
)
def test_a_choice_or_a_short_answer_is_paid_where_it_is_the_row_s(text, answer, score) -> None:
    (said,) = exact_match(completions=[text], finish_reasons=["stop"], answer=[answer])
    assert said.score == score
    (same_said,) = exact_match(completions=[text], finish_reasons=["stop"], ground_truth=[answer])
    assert same_said == said
