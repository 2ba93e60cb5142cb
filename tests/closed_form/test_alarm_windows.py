"""What an alarm compares with what, to the step; where its edges lie; and the completion that it shows."""

from collections.abc import Sequence
from dataclasses import replace
from math import nan
from typing import Any

import pytest
import torch

from posttrain.records import Grades, Group
from posttrain.runs.alarms import EXCERPT, Alarm, PastEvaluation, alarms, bar, evaluation_at, shares, transcript
from tests.closed_form.test_alarms import CALM, history, measured, names
from tests.support.reward_rows import group
from tests.support.sequences import resampled

# Windows.


def test_an_outcome_is_compared_with_the_ten_steps_before_the_last_three() -> None:
    lines = history(calm=40)
    for line in lines[:20]:
        line["outcomes/f/malformed"] = 1.0  # long ago: of steps 8 to 37 the mean would be .43
    for line in lines[37:]:
        line["outcomes/f/malformed"] = 0.4
    assert names(lines) == ["outcome f malformed"]


def test_a_length_is_compared_with_the_ten_steps_before() -> None:
    def lines(at: int, value: float, last: float) -> list[dict[str, Any]]:
        made = history(calm=25)
        made[at]["completions/mean_length"] = value
        made[24]["completions/mean_length"] = last
        return made

    assert names(lines(13, 500.0, 125.0)) == ["length"]  # two and a half times 50; the step with 500 is one too early
    assert names(lines(13, 500.0, 124.0)) == []
    assert names(lines(23, 150.0, 130.0)) == []  # of 60, which the step before has made of 50
    assert names(lines(23, 150.0, 150.0)) == ["length"]


def test_what_runs_into_the_limit_is_compared_with_the_first_five_steps() -> None:
    lines = history(calm=6)
    for line, ratio in zip(lines, (0.0, 0.0, 0.0, 0.0, 0.5, 0.39), strict=True):
        line["completions/clipped_ratio"] = ratio
    assert names(lines) == []  # .39 - .1
    lines[5]["completions/clipped_ratio"] = 0.41
    assert names(lines) == ["length"]


def test_repetition_is_compared_with_the_first_steps_though_there_is_but_one() -> None:
    assert names(history({"completions/repetition": 0.7}, calm=1)) == ["repetition"]
    often = [{"completions/repetition": 0.4}] * 9
    assert names(history(*often, {"completions/repetition": 0.6}, calm=0)) == []  # half, but only .2 more
    assert names(history(*often, {"completions/repetition": 0.66}, calm=0)) == ["repetition"]


def test_a_function_whose_name_begins_like_another_is_not_that_other() -> None:
    assert shares([{"step": 1, "outcomes/ff/right": 1.0}], "outcomes/f/right") == []
    assert shares([{"step": 1, "outcomes/f/wrong": 1.0}], "outcomes/f/right") == [0.0]


def test_a_held_out_outcome_or_accuracy_of_zero_is_zero() -> None:
    lines = history(calm=15)
    for at in (4, 9, 14):
        lines[at] |= {**measured(0.3), "eval/outcomes/f/truncated": 0.0}
    assert names(lines) == []
    lines[14] |= {**measured(0.0, 0.5), "eval/outcomes/f/truncated": 0.4}
    assert names(lines) == ["held-out f truncated"]


# The reward that rises alone.


def test_an_evaluation_goes_with_the_five_steps_that_lead_to_it() -> None:
    lines: list[dict[str, Any]] = [{"step": step, "reward": float(step), **measured(0.5)} for step in range(20)]

    def rewards(at: int, lines: Sequence[dict[str, Any]] = lines) -> list[float]:
        found = evaluation_at(lines, at)
        assert found is not None
        assert found.within == 0.0  # as no step tells a deviation
        return found.rewards

    assert rewards(0) == rewards(3) == rewards(5) == [1, 2, 3, 4, 5]  # step 0 is no step of training
    assert rewards(6) == [2, 3, 4, 5, 6]
    assert rewards(19) == [15, 16, 17, 18, 19]
    assert rewards(0, lines[:3]) == [1, 2]
    assert evaluation_at(lines[:2], 0) is None  # one reward has no spread


def test_the_least_change_of_the_reward_that_is_no_chance_is_of_both_spreads() -> None:
    def with_rewards(rewards: list[float], within: float) -> PastEvaluation:
        return PastEvaluation(accuracy=0.5, low=0.4, high=0.6, rewards=rewards, within=within)

    # Deviations of 1 and 2, or a quarter of the spread within groups before.
    assert bar(with_rewards([0.0, 2.0], 4.0), with_rewards([0.0, 4.0], 100.0)) == 3.0
    assert bar(with_rewards([0.0, 2.0], 16.0), with_rewards([0.0, 4.0], 100.0)) == 4.0


def rising(length: int, first_risen: int) -> list[dict[str, Any]]:
    return [{"step": step, **CALM, "reward": 0.0 if step < first_risen else 10.0} for step in range(length)]


def test_evaluations_that_share_steps_or_come_too_soon_are_not_compared() -> None:
    near = rising(15, 12)  # the last five rewards are 6 on average and spread by 4.9
    near[11] |= measured(0.5)
    near[14] |= measured(0.2)
    assert names(near) == []
    near[4] |= measured(0.5)
    assert names(near) == ["reward alone"]
    soon = rising(10, 6)
    soon[0] |= measured(0.5)
    soon[9] |= measured(0.2)
    assert names(soon) == []
    assert names([*soon[:9], {"step": 9, **CALM, "reward": 10.0}, {**soon[9], "step": 10}]) == ["reward alone"]


def test_the_edges_of_a_reward_that_rises_alone() -> None:
    same = rising(20, 12)
    same[4] |= measured(0.3)
    same[19] |= measured(0.3)
    assert names(same) == ["reward alone"]  # an accuracy that stayed did not rise
    still = [{"step": step, **CALM, "reward": 1.0, "reward_std_within_groups": 0.0} for step in range(20)]
    still[4] |= measured(0.5, 0.1)
    still[19] |= measured(0.2, 0.1)
    assert names(still) == ["reward alone"]  # a reward that cannot rise did not fall
    still[19] |= measured(0.3, 0.1)
    assert names(still) == []  # intervals that touch at .4


# What it says and shows.


def test_it_says_what_the_reward_is_in_the_last_step() -> None:
    silent = [{"frac_uninformative_groups": 1.0, "reward": 0.2}] * 9
    for last, says in ((0.7, "they are 0.700 on average"), (None, "they are not scored")):
        (alarm,) = alarms(history(*silent, {"frac_uninformative_groups": 1.0, "reward": last}), {})
        assert says in alarm.says


def with_lengths(made: Group, *lengths: int) -> Group:
    rollouts = zip(made.rollouts, lengths, strict=True)
    return replace(made, rollouts=tuple(resampled(r, tokens=(7,) * n, logprobs=(0.0,) * n) for r, n in rollouts))


GROUPS = [
    with_lengths(group(["first", "second", "third"]), 3, 5, 4),
    with_lengths(group(["fourth", "fifth", "sixth"]), 2, 1, 6),
]
REWARDS = torch.tensor([[nan, -5.0, -2.0], [-3.0, nan, -4.0]], dtype=torch.float64)
GRADES = Grades(
    names=("f",),
    scores=REWARDS[None],
    weights=torch.ones(1, dtype=torch.float64),
    rewards=REWARDS,
    outcomes={"f": (("right", "wrong", "wrong"), ("right", "wrong", "odd"))},
)


@pytest.mark.parametrize(
    ("alarm", "text"),
    [
        (Alarm("reward alone", ""), "third"),  # the largest reward; one that is missing is none
        (Alarm("length", ""), "sixth"),
        (Alarm("repetition", ""), "sixth"),
        (Alarm("no signal", ""), "first"),
        (Alarm("outcome f wrong", "", ("f", "wrong")), "second"),
        (Alarm("held-out f gone", "", ("f", "gone")), "first"),  # no completion of the step has it
        (Alarm("held-out g right", "", ("g", "right")), "first"),  # nor is the function asked in training
    ],
    ids=lambda value: value.name if isinstance(value, Alarm) else "",
)
def test_the_completion_that_is_shown_is_what_the_alarm_is_about(alarm: Alarm, text: str) -> None:
    assert transcript(alarm, GROUPS, GRADES) == f"1 + 1?\n{text}"


def test_of_a_long_completion_the_beginning_and_the_end_are_shown() -> None:
    half = EXCERPT // 2
    for text, shown in (
        ("a" * half + "b" * half, "a" * half + "b" * half),
        ("a" * half + "x" + "b" * half, "a" * half + " … " + "b" * half),
    ):
        zero = torch.zeros(1, 1, dtype=torch.float64)
        alone = Grades(names=("f",), scores=zero[None], weights=torch.ones(1).double(), rewards=zero)
        assert transcript(Alarm("no signal", ""), [group([text])], alone) == f"1 + 1?\n{shown}"
