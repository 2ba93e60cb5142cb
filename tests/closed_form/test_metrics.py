"""Metrics of hand-made records and of updates, by hand, and against the list in docs/metrics.md."""

import math
from dataclasses import replace
from math import nan, sqrt

import pytest
import torch

from posttrain.records import Finish, Grades, Group, Prompt, Rollout
from posttrain.training.metrics import (
    UpdateReport,
    completion_metrics,
    logged_metrics,
    outcome_metrics,
    reward_metrics,
    source_metrics,
    step_metrics,
    step_tokens,
    update_metrics,
)
from tests.support.pages import documented
from tests.support.sequences import doubles, grades_of, spoken

CUT = {"finish": Finish.LENGTH}


def group(prompt_tokens: int, *rollouts: Rollout, source: str = "") -> Group:
    prompt = Prompt(id="p", text="?", tokens=(1,) * prompt_tokens, source=source)
    return Group(prompt=prompt, draw=0, rollouts=rollouts)


def grades(rewards: list[list[float]], **scores: list[list[float]]) -> Grades:
    return grades_of(rewards, [*scores.values()], names=tuple(scores)) if scores else grades_of(rewards)


def test_the_mean_reward_and_the_deviation_within_groups_leave_unscored_rollouts_out() -> None:
    metrics = reward_metrics(grades([[1.0, 3.0, nan], [4.0, 4.0, 10.0]]))
    # mean of 1, 3, 4, 4, 10; and not the mean of the group means 2 and 6, which is 4
    assert metrics["reward"] == pytest.approx(22 / 5)
    # sample deviations: of (1, 3) sqrt(2); of (4, 4, 10), centred -2, -2, 4, sqrt(24 / 2)
    assert metrics["reward_std_within_groups"] == pytest.approx((sqrt(2) + sqrt(12)) / 2)
    # of all five, whose mean is 22/5: squares of -3.4, -1.4, -.4, -.4, 5.6 add up to 45.2
    assert metrics["reward_std"] == pytest.approx(sqrt(45.2 / 4))
    assert metrics["frac_unscored"] == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    ("rewards", "uninformative", "zero_std"),
    [
        # 0.1 three times: the float mean is 0.10000000000000002, so a deviation would not be exactly zero.
        # The second group has one score and so no deviation, which is what TRL's counts.
        ([[0.1, 0.1, 0.1], [nan, nan, 7.0], [0.1, 0.2, 0.1], [1.0, nan, 1.0]], 3 / 4, 2 / 4),
        # Rewards that rounding sets apart have no spread, as in advantages: 0.1 + 0.2 is not 0.3.
        ([[0.1 + 0.2, 0.3], [0.3, 0.31]], 1 / 2, 1 / 2),
        ([[nan, nan]], 1.0, 0.0),
    ],
)
def test_a_group_tells_nothing_when_its_rewards_are_equal_or_fewer_than_two(rewards, uninformative, zero_std) -> None:
    metrics = reward_metrics(grades(rewards))
    assert metrics["frac_uninformative_groups"] == uninformative
    assert metrics["frac_reward_zero_std"] == zero_std
    assert ("reward" in metrics) == (metrics["frac_unscored"] < 1)


def test_each_reward_function_has_its_own_mean_and_deviation() -> None:
    metrics = reward_metrics(grades([[0.0, 0.0]], right=[[1.0, 4.0]], shape=[[nan, 2.0]], absent=[[nan, nan]]))
    assert metrics["rewards/right/mean"] == 2.5
    assert metrics["rewards/right/std"] == pytest.approx(sqrt(4.5))  # deviations of 1.5, squared and summed, over 1
    assert metrics["rewards/shape/mean"] == 2.0
    assert not {"rewards/shape/std", "rewards/absent/mean"} & metrics.keys()


def of_sources(*sources: str) -> list[Group]:
    return [group(1, spoken(""), source=source) for source in sources]


def test_the_rewards_of_a_mixture_are_told_apart_by_data_set_in_the_order_of_their_names() -> None:
    rewards = grades([[1.0, nan], [5.0, 7.0], [2.0, 3.0], [nan, nan]])
    metrics = source_metrics(of_sources("maths", "code", "maths", "silent"), rewards)
    assert metrics == {
        "sources/maths/num_groups": 2,
        "sources/maths/reward": 2,  # of 1, 2, 3, and not the mean of 1 and 2.5
        "sources/code/num_groups": 1,
        "sources/code/reward": 6,
        "sources/silent/num_groups": 1,
    }
    assert all(documented(name) for name in metrics)
    assert source_metrics(of_sources("", ""), grades([[1.0, nan], [5.0, 7.0]])) == {}
    ordered = source_metrics(of_sources(*"hbgcafed"), grades([[1.0]] * 8))
    assert [name.split("/")[1] for name in ordered if name.endswith("reward")] == list("abcdefgh")


def test_what_a_function_logged_is_averaged_over_the_completions_that_it_logged_it_for() -> None:
    logged = {"mine": (({"h": 1.0, "a": 2.0}, None), ({"h": 4.0, "c": 7.0, "b": 0.0}, {"h": 1.0})), "other": ((None,),)}
    metrics = logged_metrics(logged)
    assert metrics == {"logged/mine/h": 2.0, "logged/mine/a": 2.0, "logged/mine/c": 7.0, "logged/mine/b": 0.0}
    many = {"mine": (tuple({name: 1.0} for name in "hbgcafed"),)}
    assert [name[-1] for name in logged_metrics(many)] == list("abcdefgh")


def test_outcome_rates_are_shares_of_the_rollouts_that_have_an_outcome() -> None:
    metrics = outcome_metrics({"sum": (("wrong", "right"), ("right", "")), "shape": (("", ""), ("", ""))})
    # In one order, whichever came first.
    assert [*metrics.items()] == [("outcomes/sum/right", 2 / 3), ("outcomes/sum/wrong", 1 / 3)]


def test_completion_lengths_are_told_with_and_without_those_that_were_cut_off() -> None:
    groups = [
        group(7, spoken("", 2, logprob=-0.5), spoken("", 9, logprob=-2.0, **CUT)),
        group(4, spoken("", 5, logprob=-1.0), spoken("", 4, logprob=-3.0)),
    ]
    expected = {
        "completions/mean_length": 5.0,  # (2 + 9 + 5 + 4) / 4
        "completions/min_length": 2.0,
        "completions/max_length": 9.0,
        "completions/mean_terminated_length": 11 / 3,
        "completions/min_terminated_length": 2.0,
        "completions/max_terminated_length": 5.0,
        "completions/clipped_ratio": 1 / 4,
        # over tokens, not over completions: (2 * .5 + 9 * 2 + 5 * 1 + 4 * 3) / 20
        "entropy_estimate": 36 / 20,
        "tokens/prompt": 11.0,
        "tokens/completion": 20.0,
    }
    metrics = completion_metrics(groups)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert step_tokens(groups) == 2 * 7 + 2 * 4 + 20
    all_cut = completion_metrics([group(1, spoken("", 3, **CUT))])
    assert all_cut["completions/clipped_ratio"] == 1.0
    assert "completions/mean_terminated_length" not in all_cut


def test_every_metric_of_a_step_is_finite_and_in_the_documentation() -> None:
    outcomes = {"right": (("correct", "no_answer"), ("correct", "correct"))}
    table = grades([[0.5, nan], [1.0, 0.0]], right=[[0.5, nan], [1.0, 0.0]], shape=[[1.0, 0.0], [1.0, 1.0]])
    told = replace(table, outcomes=outcomes, num_failures=1)
    groups = [group(3, spoken("", 2), spoken("", 6, **CUT)), group(3, spoken("", 2), spoken("", 1))]
    metrics = step_metrics(groups, told, torch.tensor([[False, False], [True, False]]))
    assert (metrics["frac_zero_advantage"], metrics["num_score_failures"]) == (0.75, 1.0)
    assert all(math.isfinite(value) for value in metrics.values())
    assert len(metrics) == 26  # 8 on rewards, 4 on functions, 2 outcomes, 8 on completions, 3 tokens, 1 advantages
    assert [name for name in metrics if not documented(name)] == []


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("rewards/any_name/mean", True),
        ("kl", True),
        ("klx", False),
        ("rewards/a/b/mean", False),
        ("reward_mean", False),
    ],
)
def test_the_documentation_check_can_fail(name: str, known: bool) -> None:
    assert documented(name) is known


GAP = "sampling/sampling_logp_difference"


def report(gaps: list[float], sums: dict[str, float], **given: object) -> UpdateReport:
    """One completion's update, of a token for each gap."""
    usual = {"loss": 0.0, "grad_norms": {"policy": 1.0}, "learning_rate": 0.1, "num_micro_batches": 1}
    usual |= {"num_completions": 1, "completion_sums": {}, "ratio_range": (1.0, 1.0)}
    return UpdateReport(**usual | given, num_tokens=len(gaps), sums=sums, gaps=doubles(*gaps))


# One update of one token and one of three.
FIRST = report(
    [0.25],
    {f"{GAP}/mean": 0.25, "ratio/mean": 1.0, "kl": 8.0},
    loss=1.0,
    grad_norms={"policy": 2.0, "value_head": 0.5},
    completion_sums={"clip_ratio/low_mean": 1.0},
    ratio_range=(0.9, 1.0),
)
SECOND = report(
    [1.0, 5.0, 3.0],
    {f"{GAP}/mean": 9.0, "ratio/mean": 6.0, "kl": 12.0},
    loss=4.0,
    grad_norms={"policy": 3.0, "value_head": 1.5},
    learning_rate=0.05,
    num_micro_batches=2,
    num_completions=2,
    completion_sums={"clip_ratio/low_mean": 0.5},
    ratio_range=(0.5, 4.0),
)


def test_means_are_over_the_tokens_or_completions_of_all_updates_together_and_the_rest_as_it_should_be() -> None:
    expected = {
        "tokens/trained": 4,
        "kl": 5,  # (8 + 12) / 4, where the mean of the two means is (8 + 4) / 2
        "ratio/mean": 1.75,  # (1 + 6) / 4
        "completions/trained": 3,
        "clip_ratio/low_mean": 0.5,  # (1 + .5) / 3, where the mean of the two means is (1 + .25) / 2
        "ratio/min": 0.5,
        "ratio/max": 4,
        "loss": 2.5,  # over updates, as the norms
        "grad_norm/policy": 2.5,
        "grad_norm/value_head": 1,
        # Of both as one vector: √(2² + ½²) and √(3² + 1.5²).
        "grad_norm": (sqrt(4.25) + sqrt(11.25)) / 2,
        "learning_rate": 0.05,  # the last
        "num_micro_batches": 3,
    }
    metrics = update_metrics([FIRST, SECOND])
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-14)
    assert update_metrics([]) == {}


@pytest.mark.parametrize(("reports", "mean", "most"), [([FIRST, SECOND], 0.25, 0.25), ([SECOND, FIRST], 9 / 3, 5)])
def test_the_gap_between_sampler_and_trainer_is_that_of_the_first_update(reports, mean, most) -> None:
    # Only there have both the same weights.
    metrics = update_metrics(reports)
    assert (metrics[f"{GAP}/mean"], metrics[f"{GAP}/max"], metrics["kl"]) == (mean, most, 5)


@pytest.mark.parametrize("module", ["policy", "body"])
def test_the_norm_of_the_only_module_is_told_once(module: str) -> None:
    metrics = update_metrics([replace(FIRST, grad_norms={module: 0.1}), replace(SECOND, grad_norms={module: 0.3})])
    assert metrics["grad_norm"] == (0.1 + 0.3) / 2
    assert [name for name in metrics if name.startswith("grad_norm")] == ["grad_norm"]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_how_the_tokens_are_dealt_out_to_updates_changes_no_mean(cut: int) -> None:
    numbers = [0.5, 2.0, 8.0, 1.5]
    parts = (numbers[:cut], numbers[cut:])
    reports = [report([0.0] * len(part), {f"{GAP}/mean": 0.0, "entropy": sum(part)}) for part in parts]
    assert update_metrics(reports)["entropy"] == 3  # 12 / 4
