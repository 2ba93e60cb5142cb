"""Every function agrees with its float64 twin on random input."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.algorithms import advantages, kl, losses, token_weights
from posttrain.algorithms.losses import ClipRange
from posttrain.algorithms.reward_shaping import Overlong, overlong_punishment
from posttrain.models.logprobs import distribution_kl
from tests.support import twins

SEEDS = st.integers(0, 2**32 - 1)

ADVANTAGES = {
    "raw": advantages.raw,
    "batch_centred": advantages.batch_centred,
    "group_centred": advantages.group_centred,
    "leave_one_out": advantages.leave_one_out,
    "population": advantages.group_zscore,
    "over_mean": lambda rewards: advantages.over_mean(rewards.abs()),
    "sample": partial(advantages.group_zscore, deviation="sample"),
}


def assert_twin(actual: torch.Tensor, expected: np.ndarray, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(actual.numpy(), expected, rtol=tolerance, atol=tolerance)


def random_rewards(seed: int) -> np.ndarray:
    """Groups of 2 to 8, some rewards equal, some missing."""
    rng = np.random.default_rng(seed)
    shape = (rng.integers(1, 5), rng.integers(2, 9))
    rewards = np.where(rng.random(shape) < 0.5, rng.normal(size=shape), rng.integers(0, 2, size=shape))
    return np.where(rng.random(shape) < 0.2, np.nan, rewards)


def random_tokens(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """log π, log μ, advantages and rollouts of some completions, their tokens interleaved at random."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, size=rng.integers(1, 6))
    rollout = rng.permutation(np.repeat(np.arange(len(lengths)) * 2, lengths))  # not every number is used
    denominators = -rng.exponential(2, size=len(rollout))
    logprobs = denominators + rng.normal(0, 0.4, size=len(rollout))
    return logprobs, denominators, rng.normal(size=len(rollout)), rollout


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(max_examples=60)
@given(seed=SEEDS)
def test_advantages(name: str, seed: int) -> None:
    rewards = random_rewards(seed)
    assert_twin(
        ADVANTAGES[name](torch.from_numpy(rewards)),
        twins.advantage(name, np.abs(rewards) if name == "over_mean" else rewards),
    )


@pytest.mark.parametrize("level", ["token", "sequence_mean", "sequence_product"])
@settings(max_examples=60)
@given(seed=SEEDS, low=st.floats(0, 1), high=st.floats(0, 3))
def test_losses(level: str, seed: int, low: float, high: float) -> None:
    logprobs, denominators, gains, rollout = random_tokens(seed)
    arguments = [torch.from_numpy(column) for column in (logprobs, denominators, gains, rollout)]
    ratio = twins.ratios(logprobs, denominators, rollout, level)
    clip = ClipRange(low=low, high=high)
    assert_twin(losses.log_ratio(arguments[0], arguments[1], arguments[3], level=level).exp(), ratio)
    surrogate = losses.clipped_surrogate(*arguments, clip=clip, level=level)
    assert_twin(surrogate, twins.clipped_surrogate(ratio, gains, low, high))
    weighted = losses.weighted_policy_gradient(*arguments, clip=clip, level=level)
    assert_twin(weighted, twins.weighted_policy_gradient(logprobs, ratio, gains, low, high))


@pytest.mark.parametrize("estimator", kl.ESTIMATORS)
@settings(max_examples=60)
@given(seed=SEEDS)
def test_kl_estimators(estimator: str, seed: int) -> None:
    logprobs, reference, _, _ = random_tokens(seed)
    estimate = kl.ESTIMATORS[estimator](torch.from_numpy(logprobs), torch.from_numpy(reference))
    assert_twin(estimate, twins.kl(estimator, logprobs, reference))


@pytest.mark.parametrize("estimator", kl.ESTIMATORS)
@settings(max_examples=60)
@given(seed=SEEDS)
def test_kl_estimators_of_whole_completions(estimator: str, seed: int) -> None:
    logprobs, reference, _, rollout = random_tokens(seed)
    arguments = [torch.from_numpy(column) for column in (logprobs, reference, rollout)]
    estimate = kl.of_completions(*arguments, estimator=estimator)
    assert_twin(estimate, twins.completion_kl(estimator, logprobs, reference, rollout))


@settings(max_examples=30)
@given(seed=SEEDS)
def test_full_kl(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits, reference = rng.normal(0, 3, size=(2, rng.integers(1, 5), rng.integers(2, 9)))
    assert_twin(
        distribution_kl(torch.from_numpy(logits), torch.from_numpy(reference)), twins.full_kl(logits, reference)
    )


@pytest.mark.parametrize("rule", ["mean_over_tokens", "mean_over_sequences", "sum_over_sequence", "constant_length"])
@settings(max_examples=40)
@given(completions=st.lists(st.tuples(st.integers(1, 400), st.booleans()), min_size=1, max_size=12))
def test_token_weights(rule: str, completions: list[tuple[int, bool]]) -> None:
    lengths, scored = [length for length, _ in completions], [keep for _, keep in completions]
    weights = getattr(token_weights, rule)(torch.tensor(lengths), torch.tensor(scored), max_completion_tokens=400)
    expected = [twins.token_weight(rule, lengths, scored, i, 400) for i in range(len(lengths))]
    assert_twin(weights, np.array(expected))


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=6),
    buffer=st.floats(0.01, 1),
    penalty=st.floats(0.01, 3),
)
def test_overlong_punishment(lengths: list[int], buffer: float, penalty: float) -> None:
    shaped = overlong_punishment(
        torch.ones(1, len(lengths), dtype=torch.float64),
        torch.tensor([lengths]),
        max_completion_tokens=400,
        overlong=Overlong(buffer=buffer, penalty=penalty),
    )
    expected = [1 - twins.overlong(length, 400, buffer, penalty) for length in lengths]
    assert_twin(shaped, np.array([expected]), tolerance=1e-10)
