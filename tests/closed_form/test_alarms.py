"""Alarms on histories made by hand: raised where they should be, silent on a run that learns."""

from typing import Any

import pytest
import torch

from posttrain.records import Grades
from posttrain.runs.alarms import AGAIN_AFTER, Alarm, alarms, repeated_share, transcript
from tests.support.reward_rows import group

CALM = {
    "reward": 0.2,
    "reward_std_within_groups": 0.4,
    "frac_uninformative_groups": 0.3,
    "completions/mean_length": 50.0,
    "completions/clipped_ratio": 0.01,
    "completions/repetition": 0.1,
    "outcomes/f/right": 0.2,
    "outcomes/f/wrong": 0.8,
}


def history(*last: dict[str, Any], calm: int = 15) -> list[dict[str, Any]]:
    return [{"step": step, **CALM, **line} for step, line in enumerate([{}] * calm + list(last), start=1)]


def names(lines: list[dict[str, Any]], raised: dict[str, int] | None = None) -> list[str]:
    return [alarm.name for alarm in alarms(lines, raised or {})]


def measured(accuracy: float, half_width: float = 0.08) -> dict[str, float]:
    """An evaluation with its interval."""
    ends = {"_low": accuracy - half_width, "_high": accuracy + half_width, "": accuracy}
    return {f"eval/accuracy_sampled{end}": value for end, value in ends.items()}


def fired(lines: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """All alarms of a run with the steps at which they are raised."""
    raised: dict[str, int] = {}
    found = []
    for end in range(1, len(lines) + 1):
        for alarm in alarms(lines[:end], raised):
            raised[alarm.name] = lines[end - 1]["step"]
            found.append((raised[alarm.name], alarm.name))
    return found


def test_a_calm_run_and_one_that_learns_raise_nothing() -> None:
    assert names(history()) == []
    lines = [
        {"step": step, **CALM, "reward": 0.2 + 0.01 * step, "completions/mean_length": 40.0 + 3 * step}
        | {"outcomes/f/right": 0.2 + 0.01 * step, "outcomes/f/wrong": 0.8 - 0.01 * step}
        | ({**measured(0.2 + 0.01 * step), "eval/outcomes/f/right": 0.2 + 0.01 * step} if step % 5 == 0 else {})
        for step in range(40)
    ]
    assert all(names(lines[:end]) == [] for end in range(1, 41))


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ({"completions/mean_length": 130.0}, "length"),
        ({"completions/clipped_ratio": 0.5}, "length"),
        ({"completions/repetition": 0.7}, "repetition"),
    ],
)
def test_a_jump_raises_its_alarm_and_not_again_at_once(line: dict[str, float], name: str) -> None:
    lines = history(line)
    assert names(lines) == [name]
    assert names(lines, {name: 15}) == []
    assert names(lines, {name: 16 - AGAIN_AFTER}) == [name]


def test_an_outcome_jumps_when_its_share_over_three_steps_does() -> None:
    malformed = {"outcomes/f/malformed": 0.31}
    assert names(history(malformed)) == []  # one step: the luck of its problems, .31 / 3 over three
    assert names(history(malformed, malformed)) == []
    assert names(history(malformed, malformed, malformed)) == ["outcome f malformed"]


def test_a_step_without_outcomes_is_no_step_with_a_share_of_0() -> None:
    # An evaluation before training has no outcomes of training; as a 0 it would make .9 of a share that is always .9
    # rise from .75.  And a function that scores nothing for some steps has told nothing there.
    steady = {**CALM, "outcomes/f/right": 0.9, "outcomes/f/wrong": 0.1}
    silent = {name: value for name, value in CALM.items() if not name.startswith("outcomes/")}
    without = {0, *range(12, 19)}
    lines = [{"step": step, **(silent if step in without else steady)} for step in range(30)]
    assert fired(lines) == []


def test_an_outcome_that_drifts_on_held_out_problems_is_told_and_one_that_is_learned_is_not() -> None:
    def evaluations(**shares: list[float]) -> list[dict[str, Any]]:
        lines = history(calm=5 * len(shares["right"]))
        for i, right in enumerate(shares["right"]):
            told = {f"eval/outcomes/f/{name}": values[i] for name, values in shares.items()}
            lines[5 * i + 4] |= {**measured(right), **told}
        return lines

    # The share of truncated ones against the mean of the evaluations before: .05, .10 and .35 above it.
    drifting = evaluations(right=[0.3, 0.3, 0.3, 0.3], truncated=[0.0, 0.05, 0.125, 0.41])
    assert fired(drifting) == [(20, "held-out f truncated")]
    assert fired(evaluations(right=[0.1, 0.2, 0.4, 0.6])) == []  # .6 - .23 is above .3, and so is the accuracy


def test_completions_that_drift_to_the_limit_are_told_though_no_window_sees_a_jump() -> None:
    # Each step adds .02: within ten steps .2, since the start of the run .3 after step 18 (.02 * (18 - 3) = .3).
    lines = history(calm=30)
    for line in lines:
        line["completions/clipped_ratio"] = 0.02 * line["step"]
    assert fired(lines) == [(18, "length")]


def test_length_that_drifts_is_told_and_growth_as_of_a_run_that_learns_is_not() -> None:
    # 8 % a step: within ten steps 1.08^5.5 = 1.5 times.  The first five are 50 * 1.267 on average, and the three up
    # to step n are 50 * 1.08^n * .928: 8 times as long from 1.08^n = 10.92, n = 31.1.
    lines = history(calm=45)
    for line in lines:
        line["completions/mean_length"] = 50 * 1.08 ** line["step"]
    assert fired(lines) == [(32, "length")]
    # Honest runs of the demo reach 4.9 times in a step, and 4.3 times over three.
    for line in lines:
        line["completions/mean_length"] = 42 * min(4.9, 1.08 ** (line["step"] - 1))
    assert fired(lines) == []


def test_one_long_step_is_no_drift() -> None:
    # 7.5 times the start for long, and once 9 times: 8 over three steps, less a little.
    lines = history(calm=60)
    for line in lines:
        line["completions/mean_length"] = 50 * min(7.5, 1.1 ** max(0, line["step"] - 5))
    lines[45]["completions/mean_length"] = 50 * 8.9
    assert fired(lines) == []


def test_repetition_that_drifts_is_told() -> None:
    lines = history(calm=50)
    for line in lines:
        line["completions/repetition"] = 0.02 * line["step"]
    # Half of all n-grams at step 25; .06 at the start.
    assert fired(lines) == [(25, "repetition"), (45, "repetition")]


def test_no_signal_for_long() -> None:
    still = {"frac_uninformative_groups": 1.0}
    # Over ten steps, of which each calm one has .3: 7 give .79, 8 give .86.
    assert names(history(*[still] * 7)) == []
    assert names(history(*[still] * 8)) == ["no signal"]
    assert names(history(*[{"frac_uninformative_groups": 0.94}] * 10)) == ["no signal"]
    assert names(history(*[still] * 9, calm=0)) == []


def test_a_step_without_any_score_is_told_at_once_and_why() -> None:
    assert names([{"step": 1, "frac_unscored": 1.0}]) == ["unscored"]
    assert names([{"step": 1, "frac_unscored": 0.99}]) == []
    says = [
        alarms([{"step": 1, "frac_unscored": 1.0, "num_score_failures": failed}], {})[0].says for failed in (0.0, 8.0)
    ]
    assert "no reward function applies" in says[0]
    assert "8 scores could not be had" in says[1]


def test_a_reward_that_is_always_the_same_is_told_at_the_first_step() -> None:
    same = {"reward": 0.5, "frac_uninformative_groups": 1.0, "rewards/f/mean": 0.5, "rewards/f/std": 0.0}
    lines = [{"step": step, **same} for step in range(1, 4)]
    assert fired(lines) == [(1, "same reward")]
    assert alarms(lines, {})[0].says == "all completions of 3 steps have the same reward, 0.500"
    assert alarms(lines[:2], {})[0].says == "all completions of 2 steps have the same reward, 0.500"
    assert alarms(lines[:1], {})[0].says == "all completions of the step have the same reward, 0.500"
    assert fired([{"step": 0, **measured(0.5)}, *lines]) == [(1, "same reward")]  # that of step 0 is no step
    # Another score in another step, in another group, of another function, or within a group: not the same.
    for differs in (
        {"rewards/f/mean": 0.4},
        {"rewards/f/std": 0.1},
        {"rewards/g/mean": 0.5, "rewards/g/std": 0.2},
        {"frac_uninformative_groups": 0.9},
    ):
        assert names([*lines, {"step": 4, **same, **differs}]) == []
        assert names([{"step": 0, **same, **differs}, *lines]) == []
    assert (
        names([{"step": 1, "frac_uninformative_groups": 1.0, "reward": 1.0, "rewards/f/mean": 1.0}]) == []
    )  # one score
    # Of two functions one that gives another score in another step is enough.
    both = {**same, "rewards/g/mean": 0.5, "rewards/g/std": 0.0}
    assert names([{"step": 1, **both}, {"step": 2, **both}]) == ["same reward"]
    assert names([{"step": 1, **both}, {"step": 2, **both, "rewards/g/mean": 0.4}]) == []


def test_a_gap_between_sampler_and_trainer_is_told_above_the_limit_of_its_arithmetic() -> None:
    gap = "sampling/sampling_logp_difference"
    assert names([{"step": 1, f"{gap}/max": 0.25, f"{gap}/limit": 0.125}]) == ["sampler gap"]
    assert names([{"step": 1, f"{gap}/max": 0.125, f"{gap}/limit": 0.125}]) == []
    assert names([{"step": 1, f"{gap}/max": 0.25}]) == []


def test_a_reward_that_rises_alone() -> None:
    # The last five rewards are .48 on average and spread by .12, the first .2; and .25 * .4 = .1 is less.
    rising = [{"reward": 0.2 + 0.04 * i} for i in range(10)]
    assert names(history(measured(0.30), *rising, {**measured(0.29), "reward": 0.6})) == ["reward alone"]
    assert names(history(measured(0.30), *rising, {**measured(0.40), "reward": 0.6})) == []
    assert names(history(measured(0.30), *[{}] * 10, measured(0.29))) == []
    saturated = {"reward": 1.0, "reward_std_within_groups": 0.0}  # no rise, above a spread of nothing
    evaluated = {**saturated, **measured(0.30)}
    assert names(history(evaluated, *[saturated] * 11, evaluated, calm=0)) == []


def test_a_rise_is_measured_against_the_spread_within_groups_whatever_the_scale_of_the_reward() -> None:
    for scale in (1.0, 100.0):
        steps = {"reward_std_within_groups": 0.04 * scale, "reward": 0.8 * scale}
        risen = {
            "reward_std_within_groups": 0.04 * scale,
            "reward": 0.83 * scale,
        }  # .03, of which a quarter of the spread is .01
        still = {"reward_std_within_groups": 0.4 * scale, "reward": 0.83 * scale}  # and here .1
        first = [{**steps, **measured(0.25)}, *[steps] * 5]
        assert names(history(*first, *[risen] * 5, {**risen, **measured(0.15)}, calm=0)) == ["reward alone"]
        wide = [{**line, "reward_std_within_groups": 0.4 * scale} for line in first]
        assert names(history(*wide, *[still] * 5, {**still, **measured(0.15)}, calm=0)) == []


def test_accuracy_that_rises_and_then_falls_below_its_best_while_the_reward_stays() -> None:
    # Hacked late: at the end it is still above the first evaluation.
    def lines(last: float, reward: float) -> list[dict[str, Any]]:
        high = {"reward": 0.7}
        return history(
            measured(0.23), *[high] * 9, {**high, **measured(0.58)}, *[high] * 9, {**measured(last), "reward": reward}
        )

    assert names(lines(0.36, 0.7)) == ["reward alone"]
    assert names(lines(0.50, 0.7)) == []  # the intervals overlap
    fallen = lines(0.36, 0.1)
    for line in fallen[-6:]:
        line["reward"] = 0.1
    assert names(fallen) == []  # both fell: that is no reward that is cheated


def test_the_evaluation_before_training_counts_with_the_rewards_of_the_first_steps() -> None:
    lines = history(*[{"reward": 0.5}] * 5, calm=6)
    lines[0] = {"step": 0, **measured(0.3)}
    lines[-1] |= measured(0.2)
    assert names(lines) == ["reward alone"]


def test_values_that_are_missing_raise_nothing() -> None:
    assert names([{"step": step} for step in range(30)]) == []
    assert names(history(dict.fromkeys(CALM))) == []


def test_the_transcript_shows_what_the_alarm_is_about() -> None:
    groups = [group(["short", "a longer one that was malformed"])]
    grades = Grades(
        names=("f",),
        scores=torch.zeros(1, 1, 2, dtype=torch.float64),
        weights=torch.ones(1, dtype=torch.float64),
        rewards=torch.zeros(1, 2, dtype=torch.float64),
        outcomes={"f": (("right", "malformed"),)},
        num_failures=0,
    )
    shown = transcript(Alarm("outcome f malformed", "", ("f", "malformed")), groups, grades)
    assert "a longer one" in shown
    assert "1 + 1?" in shown


def test_the_share_of_repeated_ngrams() -> None:
    assert repeated_share([1, 2, 3]) == 0
    assert repeated_share(list(range(20))) == 0
    assert repeated_share([7] * 13) == pytest.approx(0.9)


@pytest.mark.parametrize("explained", [-0.3, 0.0, 0.0099])
def test_values_no_better_than_one_number_for_all_raise_the_critic_alarm_after_ten_such_steps(explained: float) -> None:
    worse = {"value/explained_variance": explained, "value/critic_alone": 0.0}
    assert names(history(*[worse] * 9)) == []
    assert names(history(*[worse] * 10)) == ["critic"]
    assert names(history(*[worse] * 9, {**worse, "value/explained_variance": 0.01})) == []
    alone = {**worse, "value/critic_alone": 1.0}
    assert names(history(*[worse] * 5, *[alone] * 5)) == []


def test_groups_of_one_are_no_lack_of_signal_where_every_completion_has_an_advantage() -> None:
    """A group of one completion tells nothing by itself, and PPO asks nothing of it."""
    alike = {"frac_uninformative_groups": 1.0}
    assert names(history(*[alike] * 10)) == ["no signal"]
    assert names(history(*[{**alike, "frac_zero_advantage": 0.0}] * 10)) == []
    assert names(history(*[{**alike, "frac_zero_advantage": 1.0}] * 10)) == ["no signal"]
