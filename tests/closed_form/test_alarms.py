"""Alarms on histories made by hand: raised where they should be, silent on a run that learns; and what they show."""

from dataclasses import replace
from math import nan
from typing import Any

import pytest

from posttrain.records import Group
from posttrain.runs.alarms import (
    AGAIN_AFTER,
    EXCERPT,
    SHOWN,
    Alarm,
    PastEvaluation,
    alarms,
    bar,
    evaluation_at,
    illustrations,
    repeated_share,
    shares,
    transcript,
)
from tests.support.sequences import grades_of, group_of, spoken

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
Lines = list[dict[str, Any]]


def history(*last: dict[str, Any], calm: int = 15) -> Lines:
    return [{"step": step, **CALM, **line} for step, line in enumerate([{}] * calm + list(last), start=1)]


def names(lines: Lines, raised: dict[str, int] | None = None) -> list[str]:
    return [alarm.name for alarm in alarms(lines, raised or {})]


def measured(accuracy: float, half_width: float = 0.08) -> dict[str, float]:
    """An evaluation with its interval."""
    ends = {"_low": accuracy - half_width, "_high": accuracy + half_width, "": accuracy}
    return {f"eval/accuracy_sampled{end}": value for end, value in ends.items()}


def fired(lines: Lines) -> list[tuple[int, str]]:
    """All alarms of a run with the steps at which they are raised."""
    raised: dict[str, int] = {}
    found = []
    for end in range(1, len(lines) + 1):
        for alarm in alarms(lines[:end], raised):
            raised[alarm.name] = lines[end - 1]["step"]
            found.append((raised[alarm.name], alarm.name))
    return found


def varying(name: str, values: Any, calm: int) -> Lines:
    """A calm run of which one number is a function of the step, or a list of values."""
    lines = history(calm=calm)
    for line in lines:
        line[name] = values(line["step"]) if callable(values) else values[line["step"] - 1]
    return lines


def test_a_calm_run_and_one_that_learns_raise_nothing() -> None:
    assert names(history()) == []
    lines = [
        {"step": step, **CALM, "reward": 0.2 + 0.01 * step, "completions/mean_length": 40.0 + 3 * step}
        | {"outcomes/f/right": 0.2 + 0.01 * step, "outcomes/f/wrong": 0.8 - 0.01 * step}
        | ({**measured(0.2 + 0.01 * step), "eval/outcomes/f/right": 0.2 + 0.01 * step} if step % 5 == 0 else {})
        for step in range(40)
    ]
    assert all(names(lines[:end]) == [] for end in range(1, 41))


def test_values_that_are_missing_raise_nothing() -> None:
    assert names([{"step": step} for step in range(30)]) == []
    assert names(history(dict.fromkeys(CALM))) == []


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
    for steps, raised in ((1, []), (2, []), (3, ["outcome f malformed"])):  # one step is the luck of its problems
        assert names(history(*[malformed] * steps)) == raised
    # It is compared with the ten steps before: with those of long ago, 8 to 37, the mean would be .43.
    assert names(varying("outcomes/f/malformed", [1.0] * 20 + [0.0] * 17 + [0.4] * 3, 40)) == ["outcome f malformed"]


def test_a_step_without_outcomes_is_no_step_with_a_share_of_0() -> None:
    # An evaluation before training has no outcomes of training; as a 0 it would make .9 of a share that is always .9
    # rise from .75.  And a function that scores nothing for some steps has told nothing there.
    steady = {**CALM, "outcomes/f/right": 0.9, "outcomes/f/wrong": 0.1}
    silent = {name: value for name, value in CALM.items() if not name.startswith("outcomes/")}
    without = {0, *range(12, 19)}
    assert fired([{"step": step, **(silent if step in without else steady)} for step in range(30)]) == []


def test_a_function_whose_name_begins_like_another_is_not_that_other() -> None:
    assert shares([{"step": 1, "outcomes/ff/right": 1.0}], "outcomes/f/right") == []
    assert shares([{"step": 1, "outcomes/f/wrong": 1.0}], "outcomes/f/right") == [0.0]


@pytest.mark.parametrize(
    ("right", "truncated", "raised"),
    [
        # The share of truncated ones against the mean of the evaluations before: .05, .10 and .35 above it.
        ([0.3, 0.3, 0.3, 0.3], [0.0, 0.05, 0.125, 0.41], [(20, "held-out f truncated")]),
        ([0.1, 0.2, 0.4, 0.6], [0.0] * 4, []),  # .6 - .23 is above .3, and so is the accuracy
        ([0.3, 0.3, 0.3], [0.0, 0.0, 0.0], []),  # an outcome of zero is zero
        ([0.3, 0.3, 0.0], [0.0, 0.0, 0.4], [(15, "held-out f truncated")]),  # and so is an accuracy
    ],
)
def test_an_outcome_that_drifts_on_held_out_problems_is_told_and_one_that_is_learned_is_not(
    right: list[float], truncated: list[float], raised: list[tuple[int, str]]
) -> None:
    lines = history(calm=5 * len(right))
    for line, correct, cut in zip(lines[4::5], right, truncated, strict=True):
        line |= measured(correct, 0.5 if correct == 0 else 0.08)
        line |= {"eval/outcomes/f/right": correct, "eval/outcomes/f/truncated": cut}
    assert fired(lines) == raised


LENGTH, CUT, REPEATED = "completions/mean_length", "completions/clipped_ratio", "completions/repetition"


@pytest.mark.parametrize(
    ("at", "value", "last", "raised"),
    [
        (13, 500.0, 125.0, ["length"]),  # two and a half times 50; the step with 500 is one too early
        (13, 500.0, 124.0, []),
        (23, 150.0, 130.0, []),  # of 60, which the step before has made of 50
        (23, 150.0, 150.0, ["length"]),
    ],
)
def test_a_length_is_compared_with_the_ten_steps_before(at: int, value: float, last: float, raised: list[str]) -> None:
    lengths = [50.0] * 25
    lengths[at], lengths[24] = value, last
    assert names(varying(LENGTH, lengths, 25)) == raised


@pytest.mark.parametrize(("last", "raised"), [(0.39, []), (0.41, ["length"])])
def test_what_runs_into_the_limit_is_compared_with_the_first_five_steps(last: float, raised: list[str]) -> None:
    assert names(varying(CUT, [0.0, 0.0, 0.0, 0.0, 0.5, last], 6)) == raised  # less .1


@pytest.mark.parametrize(
    ("name", "values", "calm", "raised"),
    [
        # Each step adds .02: within ten steps .2, since the start of the run .3 after step 18 (.02 * (18 - 3) = .3).
        (CUT, lambda step: 0.02 * step, 30, [(18, "length")]),
        # 8 % a step: within ten steps 1.08^5.5 = 1.5 times.  The first five are 50 * 1.267 on average, and the three
        # up to step n are 50 * 1.08^n * .928: 8 times as long from 1.08^n = 10.92, n = 31.1.
        (LENGTH, lambda step: 50 * 1.08**step, 45, [(32, "length")]),
        # Honest runs of the demo reach 4.9 times in a step, and 4.3 times over three.
        (LENGTH, lambda step: 42 * min(4.9, 1.08 ** (step - 1)), 45, []),
        # 7.5 times the start for long, and once 8.9 times: 8 over three steps, less a little.
        (LENGTH, lambda step: 50 * (8.9 if step == 46 else min(7.5, 1.1 ** max(0, step - 5))), 60, []),
        # Half of all n-grams at step 25; .06 at the start.
        (REPEATED, lambda step: 0.02 * step, 50, [(25, "repetition"), (45, "repetition")]),
    ],
)
def test_a_drift_is_told_though_no_window_sees_a_jump(name: str, values: Any, calm: int, raised: Any) -> None:
    assert fired(varying(name, values, calm)) == raised


def test_repetition_is_compared_with_the_first_steps_though_there_is_but_one() -> None:
    assert names(history({REPEATED: 0.7}, calm=1)) == ["repetition"]
    often = [{REPEATED: 0.4}] * 9
    assert names(history(*often, {REPEATED: 0.6}, calm=0)) == []  # half, but only .2 more
    assert names(history(*often, {REPEATED: 0.66}, calm=0)) == ["repetition"]


@pytest.mark.parametrize(("tokens", "share"), [([1, 2, 3], 0), (list(range(20)), 0), ([7] * 13, 0.9)])
def test_the_share_of_repeated_ngrams(tokens: list[int], share: float) -> None:
    assert repeated_share(tokens) == pytest.approx(share)


def test_no_signal_for_long() -> None:
    still = {"frac_uninformative_groups": 1.0}
    # Over ten steps, of which each calm one has .3: 7 give .79, 8 give .86.
    assert names(history(*[still] * 7)) == []
    assert names(history(*[still] * 8)) == ["no signal"]
    assert names(history(*[{"frac_uninformative_groups": 0.94}] * 10)) == ["no signal"]
    assert names(history(*[still] * 9, calm=0)) == []
    # A group of one completion tells nothing by itself, and PPO asks nothing of it: every completion has an advantage.
    assert names(history(*[{**still, "frac_zero_advantage": 0.0}] * 10)) == []
    assert names(history(*[{**still, "frac_zero_advantage": 1.0}] * 10)) == ["no signal"]
    for last, says in ((0.7, "they are 0.700 on average"), (None, "they are not scored")):
        (alarm,) = alarms(history(*[{**still, "reward": 0.2}] * 9, {**still, "reward": last}), {})
        assert says in alarm.says


@pytest.mark.parametrize(("failed", "says"), [(0.0, "no reward function applies"), (8.0, "8 scores failed")])
def test_a_step_without_any_score_is_told_at_once_and_why(failed: float, says: str) -> None:
    assert names([{"step": 1, "frac_unscored": 0.99}]) == []
    (alarm,) = alarms([{"step": 1, "frac_unscored": 1.0, "num_score_failures": failed}], {})
    assert alarm.name == "unscored"
    assert says in alarm.says


def test_a_reward_that_is_always_the_same_is_told_at_the_first_step() -> None:
    same = {"reward": 0.5, "frac_uninformative_groups": 1.0, "rewards/f/mean": 0.5, "rewards/f/std": 0.0}
    lines = [{"step": step, **same} for step in range(1, 4)]
    assert fired(lines) == [(1, "same reward")]
    for count, steps in ((3, "3 steps"), (2, "2 steps"), (1, "the step")):
        said = f"all completions of {steps} have the same reward, 0.500"
        assert alarms(lines[:count], {})[0].says == said
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
    one_score = {"frac_uninformative_groups": 1.0, "reward": 1.0, "rewards/f/mean": 1.0}
    assert names([{"step": 1, **one_score}]) == []
    # Of two functions one that gives another score in another step is enough.
    both = {**same, "rewards/g/mean": 0.5, "rewards/g/std": 0.0}
    assert names([{"step": 1, **both}, {"step": 2, **both}]) == ["same reward"]
    assert names([{"step": 1, **both}, {"step": 2, **both, "rewards/g/mean": 0.4}]) == []


def test_a_gap_between_sampler_and_trainer_is_told_above_the_limit_of_its_arithmetic() -> None:
    gap = "sampling/sampling_logp_difference"
    assert names([{"step": 1, f"{gap}/max": 0.25, f"{gap}/limit": 0.125}]) == ["sampler gap"]
    assert names([{"step": 1, f"{gap}/max": 0.125, f"{gap}/limit": 0.125}]) == []
    assert names([{"step": 1, f"{gap}/max": 0.25}]) == []


@pytest.mark.parametrize("explained", [-0.3, 0.0, 0.0099])
def test_values_no_better_than_one_number_for_all_raise_the_critic_alarm_after_ten_such_steps(explained: float) -> None:
    worse = {"value/explained_variance": explained, "value/critic_alone": 0.0}
    assert names(history(*[worse] * 9)) == []
    assert names(history(*[worse] * 10)) == ["critic"]
    assert names(history(*[worse] * 9, {**worse, "value/explained_variance": 0.01})) == []
    assert names(history(*[worse] * 5, *[{**worse, "value/critic_alone": 1.0}] * 5)) == []


def test_a_reward_that_rises_alone() -> None:
    # The last five rewards are .48 on average and spread by .12, the first .2; and .25 * .4 = .1 is less.
    rising = [{"reward": 0.2 + 0.04 * i} for i in range(10)]
    assert names(history(measured(0.30), *rising, {**measured(0.29), "reward": 0.6})) == ["reward alone"]
    assert names(history(measured(0.30), *rising, {**measured(0.40), "reward": 0.6})) == []
    assert names(history(measured(0.30), *[{}] * 10, measured(0.29))) == []
    saturated = {"reward": 1.0, "reward_std_within_groups": 0.0}  # no rise, above a spread of nothing
    evaluated = {**saturated, **measured(0.30)}
    assert names(history(evaluated, *[saturated] * 11, evaluated, calm=0)) == []


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize(("spread", "raised"), [(0.04, ["reward alone"]), (0.4, [])])
def test_a_rise_is_measured_against_the_spread_within_groups_whatever_the_scale_of_the_reward(
    scale: float, spread: float, raised: list[str]
) -> None:
    # A rise of .03: a quarter of the spread is .01, or .1.
    steps, risen = ({"reward_std_within_groups": spread * scale, "reward": reward * scale} for reward in (0.8, 0.83))
    first, last = [{**steps, **measured(0.25)}, *[steps] * 5], [*[risen] * 5, {**risen, **measured(0.15)}]
    assert names(history(*first, *last, calm=0)) == raised


def test_accuracy_that_rises_and_then_falls_below_its_best_while_the_reward_stays() -> None:
    # Hacked late: at the end it is still above the first evaluation.
    def lines(last: float, reward: float) -> Lines:
        high = {"reward": 0.7}
        best = {**high, **measured(0.58)}
        return history(measured(0.23), *[high] * 9, best, *[high] * 9, {**measured(last), "reward": reward})

    assert names(lines(0.36, 0.7)) == ["reward alone"]
    assert names(lines(0.50, 0.7)) == []  # the intervals overlap
    fallen = lines(0.36, 0.1)
    for line in fallen[-6:]:
        line["reward"] = 0.1
    assert names(fallen) == []  # both fell: that is no reward that is cheated


def test_an_evaluation_goes_with_the_five_steps_that_lead_to_it() -> None:
    lines: Lines = [{"step": step, "reward": float(step), **measured(0.5)} for step in range(20)]

    def rewards(at: int, lines: Lines = lines) -> list[float]:
        found = evaluation_at(lines, at)
        assert found.within == 0.0  # as no step tells a deviation
        return found.rewards

    assert rewards(0) == rewards(3) == rewards(5) == [1, 2, 3, 4, 5]  # step 0 is no step of training
    assert rewards(6) == [2, 3, 4, 5, 6]
    assert rewards(19) == [15, 16, 17, 18, 19]
    assert rewards(0, lines[:3]) == [1, 2]
    assert evaluation_at(lines[:2], 0) is None  # one reward has no spread
    # That before training counts with the rewards of the first steps.
    trained = history(*[{"reward": 0.5}] * 5, calm=6)
    trained[0] = {"step": 0, **measured(0.3)}
    trained[-1] |= measured(0.2)
    assert names(trained) == ["reward alone"]


@pytest.mark.parametrize(("within", "least"), [(4.0, 3.0), (16.0, 4.0)])
def test_the_least_change_of_the_reward_that_is_no_chance_is_of_both_spreads(within: float, least: float) -> None:
    # Deviations of 1 and 2, or a quarter of the spread within groups before.
    before = PastEvaluation(accuracy=0.5, low=0.4, high=0.6, rewards=[0.0, 2.0], within=within)
    assert bar(before, PastEvaluation(accuracy=0.5, low=0.4, high=0.6, rewards=[0.0, 4.0], within=100.0)) == least


def rising(length: int, first_risen: int, **evaluations: dict[str, float]) -> Lines:
    """Steps whose reward jumps once, and evaluations by the name of their step."""
    lines = [{"step": step, **CALM, "reward": 0.0 if step < first_risen else 10.0} for step in range(length)]
    for at, evaluation in evaluations.items():
        lines[int(at.removeprefix("at_"))] |= evaluation
    return lines


def test_evaluations_that_share_steps_or_come_too_soon_are_not_compared() -> None:
    near = rising(15, 12, at_11=measured(0.5), at_14=measured(0.2))  # the last five rewards are 6 ± 4.9
    assert names(near) == []
    near[4] |= measured(0.5)
    assert names(near) == ["reward alone"]
    soon = rising(10, 6, at_0=measured(0.5), at_9=measured(0.2))
    assert names(soon) == []
    assert names([*soon[:9], {"step": 9, **CALM, "reward": 10.0}, {**soon[9], "step": 10}]) == ["reward alone"]


def test_the_edges_of_a_reward_that_rises_alone() -> None:
    assert names(rising(20, 12, at_4=measured(0.3), at_19=measured(0.3))) == ["reward alone"]  # it did not rise
    still = [{"step": step, **CALM, "reward": 1.0, "reward_std_within_groups": 0.0} for step in range(20)]
    still[4] |= measured(0.5, 0.1)
    still[19] |= measured(0.2, 0.1)
    assert names(still) == ["reward alone"]  # a reward that cannot rise did not fall
    still[19] |= measured(0.3, 0.1)
    assert names(still) == []  # intervals that touch at .4


def of_lengths(**lengths: int) -> Group:
    rollouts = (spoken(text, count, sample=sample) for sample, (text, count) in enumerate(lengths.items()))
    return replace(group_of(), rollouts=tuple(rollouts))


GROUPS = [of_lengths(first=3, second=5, third=4), of_lengths(fourth=2, fifth=1, sixth=6)]
OUTCOMES = {"f": (("right", "wrong", "wrong"), ("right", "wrong", "odd"))}
GRADES = grades_of([[nan, -5.0, -2.0], [-3.0, nan, -4.0]], outcomes=OUTCOMES)


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
    (group, rollout), *_ = illustrations(alarm, GROUPS, GRADES)
    assert transcript(group, rollout) == f"?\n{text}"


def test_an_alarm_names_the_completions_that_it_is_about_and_no_more_than_eight() -> None:
    wrong = illustrations(Alarm("outcome f wrong", "", ("f", "wrong")), GROUPS, GRADES)
    assert [rollout.text for _, rollout in wrong] == ["second", "third", "fifth"]
    longest = illustrations(Alarm("length", ""), GROUPS, GRADES)
    assert [rollout.num_sampled for _, rollout in longest] == [6, 5, 4, 3, 2, 1]
    many = [of_lengths(**{f"text{each}": each + 1 for each in range(SHOWN + 1)})]
    assert len(illustrations(Alarm("length", ""), many, grades_of([[0.0] * (SHOWN + 1)]))) == SHOWN


@pytest.mark.parametrize(("middle", "shown"), [("", ""), ("x", " … ")])
def test_of_a_long_completion_the_beginning_and_the_end_are_shown(middle: str, shown: str) -> None:
    first, last = "a" * (EXCERPT // 2), "b" * (EXCERPT // 2)
    group = group_of(first + middle + last)
    told = transcript(group, group.rollouts[0])
    assert told == f"?\n{first}{shown}{last}"
