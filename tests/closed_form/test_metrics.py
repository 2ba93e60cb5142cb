"""Metrics of hand-made records and of updates, by hand, and against the list in docs/metrics.md."""

import math
from dataclasses import replace
from math import nan, sqrt

import pytest
import torch

from posttrain.records import Finish, Grades, Group, Prompt, Rollout, TokenSequence
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


def rollout(sample: int, num_tokens: int, *, finish: Finish = Finish.STOP, logprob: float = -1.0) -> Rollout:
    return Rollout(
        sample=sample,
        sequence=TokenSequence.one_turn((5,) * num_tokens, logprobs=(logprob,) * num_tokens, finish=finish),
        text="x" * num_tokens,
    )


def group(draw: int, prompt_tokens: int, *rollouts: Rollout) -> Group:
    prompt = Prompt(id=f"p{draw}", text="?", tokens=(1,) * prompt_tokens)
    return Group(prompt=prompt, draw=draw, rollouts=rollouts)


def grades(rewards: list[list[float]], **scores: list[list[float]]) -> Grades:
    table = torch.tensor(rewards, dtype=torch.float64)
    functions = torch.tensor(list(scores.values()) or [rewards], dtype=torch.float64)
    names = tuple(scores) or ("only",)
    return Grades(names=names, scores=functions, weights=torch.ones(len(names), dtype=torch.float64), rewards=table)


def test_the_mean_reward_and_the_deviation_within_groups_leave_unscored_rollouts_out() -> None:
    metrics = reward_metrics(grades([[1.0, 3.0, nan], [4.0, 4.0, 10.0]]))
    # mean of 1, 3, 4, 4, 10; and not the mean of the group means 2 and 6, which is 4
    assert metrics["reward"] == pytest.approx(22 / 5)
    # sample deviations: of (1, 3) sqrt(2); of (4, 4, 10), centred -2, -2, 4, sqrt(24 / 2)
    assert metrics["reward_std_within_groups"] == pytest.approx((sqrt(2) + sqrt(12)) / 2)
    # of all five, whose mean is 22/5: squares of -3.4, -1.4, -.4, -.4, 5.6 add up to 45.2
    assert metrics["reward_std"] == pytest.approx(sqrt(45.2 / 4))
    assert metrics["frac_unscored"] == pytest.approx(1 / 6)


def test_a_group_tells_nothing_when_its_rewards_are_equal_or_fewer_than_two() -> None:
    # 0.1 three times: the float mean is 0.10000000000000002, so a deviation would not be exactly zero
    metrics = reward_metrics(grades([[0.1, 0.1, 0.1], [nan, nan, 7.0], [0.1, 0.2, 0.1], [1.0, nan, 1.0]]))
    assert metrics["frac_uninformative_groups"] == 3 / 4
    assert metrics["frac_reward_zero_std"] == 2 / 4, "TRL's: the group with one score has no deviation"


def test_rewards_that_rounding_alone_sets_apart_have_no_spread_as_in_advantages() -> None:
    assert 0.1 + 0.2 != 0.3
    metrics = reward_metrics(grades([[0.1 + 0.2, 0.3], [0.3, 0.31]]))
    assert metrics["frac_uninformative_groups"] == metrics["frac_reward_zero_std"] == 1 / 2


def test_each_reward_function_has_its_own_mean_and_deviation() -> None:
    metrics = reward_metrics(grades([[0.0, 0.0]], right=[[1.0, 4.0]], shape=[[nan, 2.0]], absent=[[nan, nan]]))
    assert metrics["rewards/right/mean"] == 2.5
    assert metrics["rewards/right/std"] == pytest.approx(sqrt(4.5))  # deviations of 1.5, squared and summed, over 1
    assert metrics["rewards/shape/mean"] == 2.0
    assert "rewards/shape/std" not in metrics
    assert "rewards/absent/mean" not in metrics


def test_the_rewards_of_a_mixture_are_told_apart_by_data_set() -> None:
    def of(source: str) -> Group:
        return replace(group(0, 1, rollout(0, 1)), prompt=Prompt(id="p", text="?", tokens=(1,), source=source))

    groups = [of("maths"), of("code"), of("maths"), of("silent")]
    metrics = source_metrics(groups, grades([[1.0, nan], [5.0, 7.0], [2.0, 3.0], [nan, nan]]))
    assert metrics == {
        "sources/maths/num_groups": 2,
        "sources/maths/reward": 2,  # of 1, 2, 3, and not the mean of 1 and 2.5
        "sources/code/num_groups": 1,
        "sources/code/reward": 6,
        "sources/silent/num_groups": 1,
    }
    assert all(documented(name) for name in metrics)
    assert source_metrics([of(""), of("")], grades([[1.0, nan], [5.0, 7.0]])) == {}


def test_data_sets_come_in_the_order_of_their_names_in_every_process() -> None:
    def of(source: str) -> Group:
        return replace(group(0, 1, rollout(0, 1)), prompt=Prompt(id="p", text="?", tokens=(1,), source=source))

    metrics = source_metrics([of(name) for name in "hbgcafed"], grades([[1.0]] * 8))
    assert [name.split("/")[1] for name in metrics if name.endswith("reward")] == list("abcdefgh")


def test_what_a_function_logged_is_averaged_over_the_completions_that_it_logged_it_for() -> None:
    logged = {"mine": (({"h": 1.0, "a": 2.0}, None), ({"h": 4.0, "c": 7.0, "b": 0.0}, {"h": 1.0})), "other": ((None,),)}
    metrics = logged_metrics(logged)
    assert metrics == {"logged/mine/h": 2.0, "logged/mine/a": 2.0, "logged/mine/c": 7.0, "logged/mine/b": 0.0}
    many = {"mine": (tuple({name: 1.0} for name in "hbgcafed"),)}
    assert [name[-1] for name in logged_metrics(many)] == list("abcdefgh")


def test_a_step_in_which_nothing_was_scored_has_no_reward() -> None:
    metrics = reward_metrics(grades([[nan, nan]]))
    assert "reward" not in metrics
    assert metrics["frac_unscored"] == metrics["frac_uninformative_groups"] == 1.0
    assert metrics["frac_reward_zero_std"] == 0.0


def test_outcome_rates_are_shares_of_the_rollouts_that_have_an_outcome() -> None:
    metrics = outcome_metrics({"sum": (("wrong", "right"), ("right", "")), "shape": (("", ""), ("", ""))})
    assert metrics == {"outcomes/sum/right": 2 / 3, "outcomes/sum/wrong": 1 / 3}
    assert list(metrics) == ["outcomes/sum/right", "outcomes/sum/wrong"]  # in one order, whichever came first


def test_completion_lengths_are_told_with_and_without_those_that_were_cut_off() -> None:
    groups = [
        group(0, 7, rollout(0, 2, logprob=-0.5), rollout(1, 9, finish=Finish.LENGTH, logprob=-2.0)),
        group(1, 4, rollout(0, 5, logprob=-1.0), rollout(1, 4, logprob=-3.0)),
    ]
    metrics = completion_metrics(groups)
    assert metrics["completions/mean_length"] == 5.0  # (2 + 9 + 5 + 4) / 4
    assert (metrics["completions/min_length"], metrics["completions/max_length"]) == (2.0, 9.0)
    assert metrics["completions/mean_terminated_length"] == pytest.approx(11 / 3)
    assert (metrics["completions/min_terminated_length"], metrics["completions/max_terminated_length"]) == (2.0, 5.0)
    assert metrics["completions/clipped_ratio"] == 1 / 4
    # over tokens, not over completions: (2 * .5 + 9 * 2 + 5 * 1 + 4 * 3) / 20
    assert metrics["entropy_estimate"] == pytest.approx(36 / 20)
    assert metrics["tokens/prompt"] == 11.0
    assert metrics["tokens/completion"] == 20.0
    assert step_tokens(groups) == 2 * 7 + 2 * 4 + 20


def test_when_every_completion_was_cut_off_there_is_no_terminated_length() -> None:
    metrics = completion_metrics([group(0, 1, rollout(0, 3, finish=Finish.LENGTH))])
    assert metrics["completions/clipped_ratio"] == 1.0
    assert "completions/mean_terminated_length" not in metrics


def test_every_metric_of_a_step_is_finite_and_in_the_documentation() -> None:
    outcomes = {"right": (("correct", "no_answer"), ("correct", "correct"))}
    table = grades([[0.5, nan], [1.0, 0.0]], right=[[0.5, nan], [1.0, 0.0]], shape=[[1.0, 0.0], [1.0, 1.0]])
    told = replace(table, outcomes=outcomes, num_failures=1)
    groups = [
        group(0, 3, rollout(0, 2), rollout(1, 6, finish=Finish.LENGTH)),
        group(1, 3, rollout(0, 2), rollout(1, 1)),
    ]
    metrics = step_metrics(groups, told, torch.tensor([[False, False], [True, False]]))
    assert metrics["frac_zero_advantage"] == 0.75
    assert metrics["num_score_failures"] == 1.0
    assert all(math.isfinite(value) for value in metrics.values())
    assert len(metrics) == 26  # 8 on rewards, 4 on functions, 2 outcomes, 8 on completions, 3 tokens, 1 advantages
    assert [name for name in metrics if not documented(name)] == []


def test_the_documentation_check_can_fail() -> None:
    assert documented("rewards/any_name/mean")
    assert documented("kl")
    assert not documented("klx")
    assert not documented("rewards/a/b/mean")
    assert not documented("reward_mean")


# One update of one token and one of three.
FIRST = UpdateReport(
    loss=1.0,
    grad_norms={"policy": 2.0, "value_head": 0.5},
    learning_rate=0.1,
    num_micro_batches=1,
    num_tokens=1,
    num_completions=1,
    sums={"sampling/sampling_logp_difference/mean": 0.25, "ratio/mean": 1.0, "kl": 8.0},
    completion_sums={"clip_ratio/low_mean": 1.0},
    ratio_range=(0.9, 1.0),
    gaps=torch.tensor([0.25], dtype=torch.float64),
)
SECOND = UpdateReport(
    loss=4.0,
    grad_norms={"policy": 3.0, "value_head": 1.5},
    learning_rate=0.05,
    num_micro_batches=2,
    num_tokens=3,
    num_completions=2,
    sums={"sampling/sampling_logp_difference/mean": 9.0, "ratio/mean": 6.0, "kl": 12.0},
    completion_sums={"clip_ratio/low_mean": 0.5},
    ratio_range=(0.5, 4.0),
    gaps=torch.tensor([1.0, 5.0, 3.0], dtype=torch.float64),
)


def test_means_over_tokens_are_over_those_of_all_updates_together() -> None:
    metrics = update_metrics([FIRST, SECOND])
    assert metrics["tokens/trained"] == 4
    # (8 + 12) / 4, where the mean of the two means is (8 + 4) / 2; and (1 + 6) / 4.
    assert metrics["kl"] == 5
    assert metrics["ratio/mean"] == 1.75


def test_means_over_completions_are_over_those_of_all_updates_together() -> None:
    metrics = update_metrics([FIRST, SECOND])
    assert metrics["completions/trained"] == 3
    assert metrics["clip_ratio/low_mean"] == 0.5  # (1 + .5) / 3, where the mean of the two means is (1 + .25) / 2


def test_what_is_no_mean_over_tokens_is_taken_as_it_should_be() -> None:
    metrics = update_metrics([FIRST, SECOND])
    assert (metrics["ratio/min"], metrics["ratio/max"]) == (0.5, 4)
    assert metrics["loss"] == 2.5  # over updates, as the norms
    assert (metrics["grad_norm/policy"], metrics["grad_norm/value_head"]) == (2.5, 1)
    # Of both as one vector: √(2² + ½²) and √(3² + 1.5²).
    assert metrics["grad_norm"] == pytest.approx((math.sqrt(4.25) + math.sqrt(11.25)) / 2, rel=1e-14)
    assert metrics["learning_rate"] == 0.05  # the last
    assert metrics["num_micro_batches"] == 3


def test_the_gap_between_sampler_and_trainer_is_that_of_the_first_update() -> None:
    # Only there have both the same weights.
    metrics = update_metrics([FIRST, SECOND])
    assert metrics["sampling/sampling_logp_difference/mean"] == 0.25
    assert metrics["sampling/sampling_logp_difference/max"] == 0.25
    turned = update_metrics([SECOND, FIRST])
    assert turned["sampling/sampling_logp_difference/mean"] == 3  # 9 / 3
    assert turned["sampling/sampling_logp_difference/max"] == 5
    assert turned["kl"] == metrics["kl"]


@pytest.mark.parametrize("module", ["policy", "body"])
def test_the_norm_of_the_only_module_is_told_once(module: str) -> None:
    metrics = update_metrics([replace(FIRST, grad_norms={module: 0.1}), replace(SECOND, grad_norms={module: 0.3})])
    assert metrics["grad_norm"] == (0.1 + 0.3) / 2
    assert [name for name in metrics if name.startswith("grad_norm")] == ["grad_norm"]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_how_the_tokens_are_dealt_out_to_updates_changes_no_mean(cut: int) -> None:
    numbers = [0.5, 2.0, 8.0, 1.5]
    reports = [
        UpdateReport(
            loss=0.0,
            grad_norms={"policy": 1.0},
            learning_rate=0.1,
            num_micro_batches=1,
            num_tokens=len(part),
            num_completions=1,
            completion_sums={},
            sums={"sampling/sampling_logp_difference/mean": 0.0, "entropy": sum(part)},
            ratio_range=(1.0, 1.0),
            gaps=torch.zeros(len(part), dtype=torch.float64),
        )
        for part in (numbers[:cut], numbers[cut:])
    ]
    assert update_metrics(reports)["entropy"] == 3  # 12 / 4


def test_a_step_without_an_update_has_none() -> None:
    assert update_metrics([]) == {}
