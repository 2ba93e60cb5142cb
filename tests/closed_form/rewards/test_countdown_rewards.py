"""The Countdown and format reward functions, at the cases that their definition turns on."""

import pytest

from posttrain.records import Finish
from posttrain.rewards.countdown.grader import Countdown, Outcome, countdown, countdown_last, countdown_outcome
from posttrain.rewards.format import FormatOutcome, graded_format, last_format, strict_format
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
