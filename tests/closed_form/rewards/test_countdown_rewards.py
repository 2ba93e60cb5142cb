"""The Countdown, format and process reward functions, at the cases that their definition turns on."""

import pytest

from posttrain.errors import UserError
from posttrain.records import Finish
from posttrain.rewards.countdown import (
    Countdown,
    CountdownCredit,
    CountdownSteps,
    Outcome,
    countdown,
    countdown_last,
    countdown_outcome,
)
from posttrain.rewards.grading.answers import Span
from posttrain.rewards.shaping import FormatOutcome, graded_format, last_format, strict_format
from tests.support.refusals import refused

RIGHT = "<think>hm</think>\n<answer>(17-5)*3</answer>"
WRONG = "<think>hm</think>\n<answer>17-5*3</answer>"


def test_a_correct_answer_is_worth_one_and_everything_else_nothing() -> None:
    graded = countdown(
        completions=[RIGHT, WRONG, "", "<think>"],
        finish_reasons=["stop", "stop", "stop", "length"],
        numbers=[[17, 5, 3]] * 4,
        target=[36] * 4,
        rule=["all"] * 4,
    )
    assert graded == [
        (1.0, Outcome.CORRECT),
        (0.0, Outcome.WRONG_VALUE),
        (0.0, Outcome.NO_ANSWER),
        (0.0, Outcome.TRUNCATED),
    ]


def test_each_completion_is_graded_on_its_own_problem() -> None:
    graded = countdown(
        completions=[RIGHT, RIGHT, RIGHT, RIGHT],
        finish_reasons=["stop"] * 4,
        numbers=[[3, 5, 17], [17, 5, 3], [17, 5, 4], [17, 5, 3, 9]],
        target=[36, 37, 36, 36],
        rule=["all", "all", "all", "subset"],
    )
    assert [each.score for each in graded] == [1.0, 0.0, 0.0, 1.0]


def test_without_a_rule_column_every_number_has_to_be_used() -> None:
    columns = {"completions": [RIGHT], "finish_reasons": ["stop"], "numbers": [[17, 5, 3, 9]], "target": [36]}
    assert countdown(**columns)[0].outcome is Outcome.WRONG_NUMBERS
    assert countdown_last(**columns)[0].outcome is Outcome.WRONG_NUMBERS


def test_the_two_functions_read_in_their_modes() -> None:
    columns = {"finish_reasons": ["stop"], "numbers": [[17, 5, 3]], "target": [36], "completions": ["So: " + RIGHT]}
    assert countdown(**columns)[0].outcome is Outcome.MALFORMED
    assert countdown_last(**columns)[0].outcome is Outcome.CORRECT


def test_the_finish_reason_of_the_records_is_the_one_that_is_read() -> None:
    columns = {"completions": ["<think>17"], "numbers": [[17, 5, 3]], "target": [36]}
    assert countdown(finish_reasons=[Finish.LENGTH], **columns)[0].outcome is Outcome.TRUNCATED
    assert countdown(finish_reasons=[Finish.STOP], **columns)[0].outcome is Outcome.NO_ANSWER


# Trap: stated as "at most once", graded as "exactly once".  Here the rule is one value of the problem.
def test_using_a_part_of_the_numbers_is_wrong_under_all_and_right_under_subset() -> None:
    text = "<think></think><answer>17-5</answer>"
    assert countdown_outcome(Countdown((17, 5, 3), 12, "all"), text) is Outcome.WRONG_NUMBERS
    assert countdown_outcome(Countdown((17, 5, 3), 12, "subset"), text) is Outcome.CORRECT


# Trap: a subset check by membership, under which 17+17+5-3 = 36 passes.
def test_a_number_given_once_cannot_be_used_twice_under_either_rule() -> None:
    text = "<think></think><answer>17+17+5-3</answer>"
    assert countdown_outcome(Countdown((17, 5, 3), 36, "all"), text) is Outcome.WRONG_NUMBERS
    assert countdown_outcome(Countdown((17, 5, 3), 36, "subset"), text) is Outcome.WRONG_NUMBERS
    assert countdown_outcome(Countdown((17, 17, 5, 3), 36, "all"), text) is Outcome.CORRECT


@pytest.mark.parametrize(
    ("numbers", "target", "rule", "said"),
    [
        ([17, 5, 3], "36", "all", "target = '36'"),
        ([17, 5, 3], 36.0, "all", "target = 36.0"),
        (["17", "5", "3"], 36, "all", "whole numbers"),
        ("17 5 3", 36, "all", "whole numbers"),
        ([17, -5, 3], 36, "all", "numbers = [17, -5, 3]"),
        ([17, 5, 3], 36, "any", "must be all or subset"),
    ],
)
def test_columns_that_no_answer_could_meet_are_an_error_and_not_a_zero(numbers, target, rule, said) -> None:
    columns = {"completions": [RIGHT], "finish_reasons": ["stop"]}
    with refused(said):
        countdown(numbers=[numbers], target=[target], rule=[rule], **columns)


FORMAT_CASES = [
    (RIGHT, 1.0, 1.0, 1.0),
    (WRONG, 1.0, 1.0, 1.0),  # format does not look at the value
    ("<think>hm</think><answer>((</answer>", 1.0, 1.0, 1.0),  # nor at the syntax
    ("<think>hm</think><answer>= 36</answer>", 1.0, 1.0, 0.5),
    ("<think>hm</think><answer>17.0-5*3</answer>", 1.0, 1.0, 0.5),
    ("<think>hm</think><answer> </answer>", 1.0, 1.0, 0.5),
    ("<think>hm</think><answer>\n(17-5)*3\n</answer>", 1.0, 1.0, 1.0),
    ("So: " + RIGHT, 0.0, 1.0, 0.0),
    (RIGHT + " Done.", 0.0, 1.0, 0.0),
    (RIGHT + RIGHT, 0.0, 1.0, 0.0),
    ("<think>hm</think> so <answer>36</answer>", 0.0, 0.0, 0.0),
    ("<answer>(17-5)*3</answer>", 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("text", "strict", "last", "graded"), FORMAT_CASES)
def test_format_rewards(text: str, strict: float, last: float, graded: float) -> None:
    columns = {"completions": [text], "finish_reasons": ["stop"], "prompts": ["?"]}
    scores = [reward(**columns)[0].score for reward in (strict_format, last_format, graded_format)]
    assert scores == [strict, last, graded]


@pytest.mark.parametrize("reward", [strict_format, last_format, graded_format])
def test_format_outcomes_tell_a_cut_completion_from_a_shapeless_one(reward) -> None:
    columns = {"completions": ["<think>", "<think>", RIGHT], "finish_reasons": ["length", "stop", "length"]}
    outcomes = [FormatOutcome.TRUNCATED, FormatOutcome.UNFORMATTED, FormatOutcome.FORMATTED]
    assert [each.outcome for each in reward(**columns)] == outcomes


def test_the_graded_format_names_extra_text() -> None:
    [graded] = graded_format(completions=["<think></think><answer>x</answer>"], finish_reasons=["stop"])
    assert graded == (0.5, FormatOutcome.EXTRA_TEXT)


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
