"""The noise of gradients over what can be enumerated; groups of several sizes against all that can be drawn."""

import itertools
import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from posttrain.algorithms.advantages import leave_one_out
from posttrain.algorithms.table import build_algorithm
from posttrain.options.training import UpdateOptions
from posttrain.records import Finish, Group
from posttrain.runs.progress import Clock
from posttrain.training.collector import CollectedStep
from posttrain.training.learner import Learner, LearnerSettings
from posttrain.variance import (
    GradientNoise,
    baseline_deviation,
    gradient_noise,
    gram,
    measured_baseline_deviation,
    measured_uninformative_share,
    policy_gradient,
    relative_variance,
    squared_advantage,
    success_rates,
    unbiased_uninformative_share,
    uninformative_share,
)
from tests.support.refusals import refused
from tests.support.sequences import doubles, grades_of, spoken
from tests.support.stages import stages_with
from tests.support.tiny import VOCAB, gradient_of, next_logprobs, plain_logprobs, some_prompts, tiny_policy

SUMS = {"token_weights": "sum_over_sequence"}
[PROMPT] = some_prompts([3])
REWARDS = torch.where(torch.arange(VOCAB) % 6 == 0, 2.0, 1.0).double()
"""Of each token as a whole completion: above 0, as a baseline likes it; most pairs are alike and cost no pass."""


@cache
def chances() -> Tensor:
    """What the policy samples after the prompt: completions are one token long, so these are all that there are."""
    return next_logprobs(tiny_policy().model, PROMPT.tokens).exp()


def group_of(*tokens: int) -> CollectedStep:
    """A group of these completions."""
    likely, end = chances().log().tolist(), Finish.LENGTH
    rollouts = tuple(spoken("", sample=i, tokens=(t,), logprob=likely[t], finish=end) for i, t in enumerate(tokens))
    group = Group(prompt=PROMPT, draw=0, rollouts=rollouts)
    return CollectedStep(step=1, groups=[group], grades=grades_of(REWARDS[list(tokens)][None]))


GROUPS = {
    "reinforce": [(token,) for token in range(VOCAB)],
    "rloo": list(itertools.combinations_with_replacement(range(VOCAB), 2)),
}
"""All that there are, of the least size that each takes."""


@cache
def all_gradients(name: str) -> Tensor:
    """The library's gradient of every group, in float64, [group parameter]."""
    options = LearnerSettings(update=UpdateOptions(), max_completion_tokens=1)
    learner = Learner(tiny_policy(), build_algorithm({"name": name, **SUMS}), options)
    return torch.stack([policy_gradient(learner, learner.credit(group_of(*each), Clock())) for each in GROUPS[name]])


@cache
def group_chances(name: str) -> Tensor:
    """How likely each group is; two different completions come in two orders, which have the same gradient."""
    return torch.stack([chances()[list(each)].prod() * len(set(each)) for each in GROUPS[name]])


def enumerated(name: str) -> tuple[Tensor, float]:
    """E g and tr Cov g over all groups."""
    mean = group_chances(name) @ all_gradients(name)
    return mean, float(group_chances(name) @ (all_gradients(name) - mean).square().sum(dim=1))


def test_without_a_baseline_the_enumerated_variance_is_the_closed_form() -> None:
    # g = -r s: E g = -E r s, tr Cov g = E r²‖s‖² - ‖E r s‖².
    policy = tiny_policy()
    scores = [plain_logprobs(policy.model, PROMPT.tokens, [token]).sum() for token in range(VOCAB)]
    table = torch.stack([gradient_of(policy, score) for score in scores])
    expected = (chances() * REWARDS) @ table
    second = (chances() * REWARDS.square()) @ table.square().sum(dim=1)
    mean, variance = enumerated("reinforce")
    torch.testing.assert_close(mean, -expected, rtol=1e-9, atol=1e-12)
    assert variance == pytest.approx(float(second - expected.square().sum()), rel=1e-9)


def test_leave_one_out_has_the_same_mean_and_less_variance() -> None:
    plain_mean, plain_variance = enumerated("reinforce")
    mean, variance = enumerated("rloo")
    torch.testing.assert_close(mean, plain_mean, rtol=1e-9, atol=1e-12)
    # |r_i - r_j| is at most 1 and mostly 0, where r_i is at least 1.
    assert variance < 0.5 * plain_variance / 2  # without a baseline two completions have half the variance of one


@pytest.mark.parametrize("name", ["reinforce", "rloo"])
def test_what_is_measured_of_sampled_groups_is_what_enumeration_gives(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    picks = torch.multinomial(group_chances(name), 4000, replacement=True, generator=generator)
    # 4000 estimates in 40 parts: their means are independent, and say how far the whole may be off.
    parts = [gradient_noise(gram(list(all_gradients(name)[part]))) for part in picks.view(40, 100)]
    mean, variance = enumerated(name)
    for part, true in (("total_variance", variance), ("squared_mean", mean.square().sum().item())):
        numbers = doubles(*(getattr(each, part) for each in parts))
        assert abs(numbers.mean().item() - true) < 4 * numbers.std().item() / math.sqrt(40)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), size=st.integers(2, 3))
def test_both_estimates_are_without_bias(seed: int, size: int) -> None:
    # A population of three equally likely vectors: the mean over all samples of K, with replacement, is exact.
    vectors = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    samples = [gradient_noise(gram(list(vectors[list(picks)]))) for picks in itertools.product(range(3), repeat=size)]
    mean = vectors.mean(dim=0)
    assert sum(each.squared_mean for each in samples) / 3**size == pytest.approx(float(mean @ mean), rel=1e-9)
    spread = float((vectors - mean).square().sum() / 3)
    assert sum(each.total_variance for each in samples) / 3**size == pytest.approx(spread, rel=1e-9)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([1e-3, 7.0]))
def test_a_scale_changes_no_relative_variance_and_a_ratio_to_itself_is_1(seed: int, scale: float) -> None:
    noise = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    products = gram(list(2 + noise))
    own, scaled = relative_variance(products), relative_variance(products * scale**2)
    assert scaled.value == pytest.approx(own.value, rel=1e-9)
    assert scaled.error_factor == pytest.approx(own.error_factor, rel=1e-6)
    beside = relative_variance(products, products * scale**2)
    assert beside.value == pytest.approx(1)
    assert beside.error_factor == pytest.approx(1)


def test_the_error_of_a_ratio_is_the_jackknifes() -> None:
    # Estimates 1, 2, 4 of one parameter.  Without the first: E g² ≈ 8, tr ≈ (4 + 16)/2 - 8 = 2, relative 1/4; without
    # the second: 4, (1 + 16)/2 - 4 = 4.5, 9/8; without the third: 2, (1 + 4)/2 - 2 = .5, 1/4.
    logs = [math.log(each) for each in (1 / 4, 9 / 8, 1 / 4)]
    mean = sum(logs) / 3
    error = math.sqrt(2 / 3 * sum((each - mean) ** 2 for each in logs))
    products = gram([torch.tensor([each]) for each in (1.0, 2.0, 4.0)])
    assert relative_variance(products).error_factor == pytest.approx(math.exp(error))
    # All three: E g² ≈ (2 + 4 + 8)/3 = 14/3 and tr ≈ 21/3 - 14/3 = 7/3.
    assert relative_variance(products).value == pytest.approx(1 / 2)


def test_signal_to_noise_is_the_root_of_what_is_left() -> None:
    for variance, expected in ((4.0, 0.5), (0.25, 2.0), (0.0, math.inf)):
        found = GradientNoise(num_estimates=2, squared_mean=1.0, total_variance=variance)
        assert found.signal_to_noise == expected
    nothing = GradientNoise(num_estimates=2, squared_mean=0.0, total_variance=1.0)
    assert (nothing.relative_variance, nothing.signal_to_noise) == (math.inf, 0.0)


def test_where_no_signal_is_found_noise_is_infinite() -> None:
    opposite = gradient_noise(gram([torch.tensor([1.0]), torch.tensor([-1.0])]))
    assert (opposite.squared_mean, opposite.total_variance) == (-1.0, 2.0)
    assert opposite.relative_variance == math.inf
    assert opposite.signal_to_noise == 0
    with refused("1 gradient", "at least 2"):
        gradient_noise(gram([torch.tensor([1.0])]))


def test_the_gradient_is_that_of_the_update_and_moves_nothing() -> None:
    stages = stages_with({"name": "rloo"}, tokens_per_microbatch=40)
    credited = stages.credited()
    before = [each.detach().clone() for each in stages.policy.model.parameters()]
    whole = policy_gradient(stages.learner, credited)
    report = stages.learn(credited)
    assert whole.norm().item() == pytest.approx(report["grad_norm"], rel=1e-9)
    assert any(not torch.equal(a, b) for a, b in zip(before, stages.policy.model.parameters(), strict=True))


def test_a_step_of_several_updates_is_refused() -> None:
    stages = stages_with({"name": "rloo"}, minibatches_per_epoch=2)
    with refused("2 updates"):
        policy_gradient(stages.learner, stages.credited())


def test_the_gradient_of_the_policy_is_the_same_with_a_critic_that_learns() -> None:
    # A critic that knows nothing yet expects the step's mean reward everywhere, so that the baseline is batch_mean's.
    plain = {"whitening": "none", "gae": {"lambda_policy": 1.0}, **SUMS}
    one_update = {"epochs_per_step": 1, "minibatches_per_epoch": 1}
    critic = stages_with({"name": "ppo", **plain}, **one_update)
    mean = stages_with({"name": "reinforce", "baseline": "batch_mean", **SUMS}, **one_update)
    found = [policy_gradient(each.learner, each.credited()) for each in (critic, mean)]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def every_draw(p: float, size: int) -> list[tuple[float, torch.Tensor]]:
    """All rewards that so many completions may earn, with how likely they are."""
    draws = itertools.product((0.0, 1.0), repeat=size)
    return [(math.prod(p if each else 1 - p for each in draw), doubles(draw)) for draw in draws]


@settings(max_examples=15)
@given(p=st.floats(0.05, 0.95), size=st.integers(2, 6))
def test_the_share_of_groups_without_information_and_the_noise_of_their_mean_are_those_of_all_draws(p, size) -> None:
    draws, rate = every_draw(p, size), doubles(p)
    share = sum(chance * measured_uninformative_share(rewards, size) for chance, rewards in draws)
    assert uninformative_share(rate, size) == pytest.approx(share, rel=1e-9)
    squares = sum(chance * (rewards.mean().item() - p) ** 2 for chance, rewards in draws)
    assert baseline_deviation(rate, size) == pytest.approx(math.sqrt(squares), rel=1e-9)


@settings(max_examples=15)
@given(chances=st.lists(st.floats(0.05, 0.95), min_size=1, max_size=3), size=st.integers(2, 5))
def test_the_squared_advantage_is_that_of_all_draws_of_prompts_that_differ(chances: list[float], size: int) -> None:
    square = reward = 0.0
    for p in chances:
        for chance, rewards in every_draw(p, size):
            square += chance * leave_one_out(rewards).square().mean().item()
            reward += chance * rewards.square().mean().item()
    assert squared_advantage(doubles(*chances), size) == pytest.approx(square / reward, rel=1e-9)
    with refused("nothing to compare"):
        squared_advantage(doubles(*chances), 1)


@settings(max_examples=15)
@given(p=st.floats(0.05, 0.95), size=st.integers(2, 4))
def test_the_share_from_counted_successes_is_without_bias_where_that_at_their_rate_is_not(p: float, size: int) -> None:
    draws, rate = every_draw(p, 6), doubles(p)
    expected = sum(chance * unbiased_uninformative_share(rewards, size) for chance, rewards in draws)
    assert expected == pytest.approx(uninformative_share(rate, size), rel=1e-9)
    at_rate = sum(chance * uninformative_share(success_rates(rewards), size) for chance, rewards in draws)
    assert at_rate > expected + 1e-6


def test_shares_are_means_over_prompts_and_all_samples_may_be_one_group() -> None:
    # .5² + .5² = 1/2 and 1
    assert uninformative_share(torch.tensor([0.5, 1.0]).double(), 2) == 0.75
    assert unbiased_uninformative_share(torch.tensor([[1.0, 1.0], [1.0, 0.0]]).double(), 2) == pytest.approx(0.5)
    # p (1 - p) = 0 and 1/4, times 2, over a mean p of 1/4
    assert squared_advantage(torch.tensor([0.0, 0.5]).double(), 2) == pytest.approx(1.0)
    with refused("groups of 2, at most 0 of which earn 1"):
        squared_advantage(torch.zeros(2).double(), 2)


def test_the_unbiased_share_is_that_among_all_groups_of_the_samples() -> None:
    rewards = torch.tensor([[1.0, 0, 0, 1, 0], [0, 0, 0, 0, 1]], dtype=torch.float64)
    rows = [[row[list(pick)] for pick in itertools.combinations(range(5), 3)] for row in rewards]
    shares = [sum(len(set(group.tolist())) == 1 for group in groups) / len(groups) for groups in rows]
    assert unbiased_uninformative_share(rewards, 3) == pytest.approx(sum(shares) / 2, rel=1e-12)


def test_the_noise_of_a_sampled_mean_is_the_spread_of_a_prompts_groups() -> None:
    # Groups of 2: means 1, 0 and 1/2, 1/2; variances 1/2 and 0; those left over are left out.
    rewards = torch.tensor([[1.0, 1, 0, 0, 1], [1, 0, 0, 1, 1]], dtype=torch.float64)
    assert measured_baseline_deviation(rewards, 2) == pytest.approx(math.sqrt(1 / 4), rel=1e-12)
    assert measured_uninformative_share(rewards, 2) == 0.5


def test_too_few_samples_and_other_rewards_are_told() -> None:
    rewards = doubles([1.0, 0.0, 0.5])
    for share in (measured_uninformative_share, unbiased_uninformative_share):
        with refused("3 samples of a prompt make no group of 4"):
            share(rewards, 4)
    with refused("3 samples of a prompt are 1 group of 2: give 2"):
        measured_baseline_deviation(rewards, 2)
    with refused("rewards must be 0 or 1"):
        success_rates(rewards)
