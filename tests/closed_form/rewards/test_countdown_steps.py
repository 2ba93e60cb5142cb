"""Countdown's process reward, by hand: which step and which try earns what, and where its mark is."""

import pytest

from posttrain.errors import UserError
from posttrain.rewards.countdown.grader import CountdownCredit, Outcome
from posttrain.rewards.countdown.step_rewards import CountdownSteps
from posttrain.rewards.grading.answers import Span
from tests.support.refusals import refused

PAYS = {"step": 0.01, "attempt": 0.02, "hit": 0.2, "cost": 0.03, "most": 0.5}


def marks(text: str, *, rule: str = "all", **options: float) -> list[tuple[str, float]]:
    """What each marked stretch of the text says, and earns; the puzzle is 17 from 3, 4 and 5."""
    reward = CountdownSteps(**{**PAYS, **options})
    (given,) = reward(completions=[text], numbers=[[3, 4, 5]], target=[17], rule=[rule])
    assert given.score == 0.0
    assert all(isinstance(span, Span) for span in given.spans)
    return [(text[start:end], pytest.approx(value, abs=1e-12)) for start, end, value in given.spans]


def test_right_steps_and_a_new_try_earn_and_are_marked_where_they_stand() -> None:
    assert marks("<think>4+3=7,7+5=12.\n3*4=12,12+5=17!\n</think>\n<answer>3*4+5</answer>") == [
        ("4+3=7", 0.01),
        ("7+5=12", 0.01),
        ("4+3=7,7+5=12.", 0.02),
        ("3*4=12", 0.01),
        ("12+5=17", 0.01),
        ("3*4=12,12+5=17!", 0.2),
    ]


def test_a_wrong_step_costs_and_ends_its_try() -> None:
    assert marks("<think>3*4=13,13+4=17!\n") == [("3*4=13", -0.03)]
    assert marks("<think>3*4=12,12+4=16\n") == [("3*4=12", 0.01), ("12+4=16", -0.03)]  # 4 is spent
    assert marks("<think>5-3=2,3-5=2\n") == [("5-3=2", 0.01), ("3-5=2", -0.03)]


@pytest.mark.parametrize("again", ["3*4=12", "4*3=12", "03*4=12"])
def test_a_step_made_again_earns_nothing_also_the_other_way_round(again: str) -> None:
    assert marks(f"<think>3*4=12\n{again}\n") == [("3*4=12", 0.01), (again, 0.0)]


def test_other_sides_of_a_difference_are_another_step() -> None:
    assert marks("<think>5-4=1\n4/4=1\n") == [("5-4=1", 0.01), ("4/4=1", -0.03)]
    assert marks("<think>5-4=1,3-1=2\n5-3=2,4-2=2\n")[3:5] == [("5-3=2", 0.01), ("4-2=2", 0.01)]


def test_a_try_made_again_costs_and_the_target_is_hit_once() -> None:
    line = "3*4=12,12+5=17!"
    other = "4*3=12,5+12=17!"
    assert [each[1] for each in marks(f"{line}\n{line}\n{other}\n") if "," in each[0]] == [0.2, -0.03, -0.03]
    # Another way to the target is a new try, and no second hit: 20 - 3 after 12 + 5.
    assert marks(f"{line}\n4*5=20,20-3=17!\n")[-1] == ("4*5=20,20-3=17!", 0.02)


def test_a_try_that_does_not_use_all_is_complete_under_subset_alone() -> None:
    assert marks("3*4=12\n") == [("3*4=12", 0.01)]
    assert marks("3*4=12\n", rule="subset") == [("3*4=12", 0.01), ("3*4=12", 0.02)]


def test_what_is_earned_and_what_is_charged_stop_at_most() -> None:
    assert marks("3*4=12,12+5=17!\n4+5=9\n", most=0.205) == [
        ("3*4=12", 0.01),
        ("12+5=17", 0.01),
        ("3*4=12,12+5=17!", 0.185),
        ("4+5=9", 0.0),
    ]
    assert [each[1] for each in marks("1+1=2\n" * 3, cost=0.2, hit=0.2, most=0.3)] == [-0.2, -0.1, 0.0]


def test_only_lines_of_the_thinking_that_begin_with_a_step_are_read() -> None:
    text = "  <think> 3*4=12 \nso 4+5=9\n3 * 4=12\n\n5+3=8; 8+4=12.\n5+3=8, 8+4=12 .\n</think>3+4=7<think>\n4*5=20"
    second = [("5+3=8", 0.01), ("8+4=12", 0.01), ("5+3=8, 8+4=12 .", 0.02)]  # white space around a step is none of it
    assert marks(text) == [("3*4=12", 0.01), *second]


def test_no_more_than_a_thousand_tries_are_read() -> None:
    assert len(marks("3*4=12\n" * 1001)) == 1000


def test_without_tags_all_is_thinking() -> None:
    assert marks("3*4=12") == [("3*4=12", 0.01)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"most": 0.0}, "most = 0.0"),
        ({"hit": 0.6}, "hit = 0.6 must be from 0 to most = 0.5"),
        ({"cost": -0.1}, "cost = -0.1"),
        ({"step": float("nan")}, "step = nan"),
    ],
)
def test_what_is_paid_for_the_way_is_bounded(options: dict[str, float], says: str) -> None:
    with refused(says):
        CountdownSteps(**options)


def test_several_completions_are_told_apart() -> None:
    given = CountdownSteps()(completions=["3*4=12", "6+1=7"], numbers=[(3, 4, 5), (6, 1)], target=[17, 7])
    assert [len(each.spans) for each in given] == [1, 2]


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
