"""KL estimators by hand."""

import math

import pytest
import torch

from posttrain.algorithms.credit import Evidence
from posttrain.algorithms.kl import ESTIMATORS, k1, k2, k3, of_completions
from posttrain.algorithms.terms import KlTerm, TokenView, kl_term
from posttrain.batch import TokenColumns
from posttrain.models.logprobs import distribution_kl
from tests.support.sequences import known


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


LN2 = math.log(2)


@pytest.mark.parametrize(
    ("name", "doubled", "halved"),
    [
        ("k1", LN2, -LN2),  # x = log(π/ref)
        ("k2", LN2**2 / 2, LN2**2 / 2),
        ("k3", 1 / 2 - 1 + LN2, 2 - 1 - LN2),  # ref/π - 1 + x: not symmetric
    ],
)
def test_an_estimate_where_the_policy_has_doubled_or_halved_a_probability(name, doubled, halved) -> None:
    estimate = ESTIMATORS[name](logs(0.6, 0.2), logs(0.3, 0.4))
    assert estimate.tolist() == pytest.approx([doubled, halved], rel=1e-14)


@pytest.mark.parametrize("x", [1e-8, -1e-8])
def test_k3_resolves_a_difference_whose_square_is_far_below_one_ulp_of_one(x) -> None:
    # For small x, k3 = x²/2 - x³/6 + ...; e⁻ˣ - 1 + x written out would be lost in the rounding of e⁻ˣ.
    estimate = k3(torch.tensor([x], dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    assert estimate.item() == pytest.approx(x**2 / 2, rel=1e-6, abs=0)


def test_the_full_divergence_sums_over_the_vocabulary() -> None:
    # Position 1: .5 ln(.5/.25) + .5 ln(.5/.75) = .5 ln 2 + .5 ln(2/3).  Position 2: ln(1/.9), as π is (almost) sure.
    policy = torch.stack([logs(0.5, 0.5), torch.tensor([60.0, 0.0], dtype=torch.float64)])
    reference = torch.stack([logs(0.25, 0.75), logs(0.9, 0.1)])
    expected = [0.5 * LN2 + 0.5 * math.log(2 / 3), -math.log(0.9)]
    assert distribution_kl(policy, reference).tolist() == pytest.approx(expected, rel=1e-14)


def test_the_full_divergence_takes_logits_as_they_are() -> None:
    # Softmax forgets a constant added to all logits.
    policy, reference = torch.stack([logs(0.5, 0.5)]), torch.stack([logs(0.25, 0.75)])
    torch.testing.assert_close(
        distribution_kl(policy + 3, reference - 5), distribution_kl(policy, reference), rtol=1e-14, atol=0
    )


def test_the_estimate_of_a_completion_is_that_of_the_sum_of_its_log_ratios() -> None:
    # Completion 0 of three tokens: π/ref = 2 · 1/2 · 4 = 4, so k1 = ln 4, k2 = (ln 4)²/2, k3 = 1/4 - 1 + ln 4.
    # Completion 1 of one token: π/ref = 1/2, so -ln 2, (ln 2)²/2, 2 - 1 - ln 2.
    policy, reference = logs(0.6, 0.2, 0.8, 0.1), logs(0.3, 0.4, 0.2, 0.2)
    rollout = torch.tensor([0, 0, 0, 1])
    expected = {
        "k1": (2 * LN2, -LN2),
        "k2": (2 * LN2**2, LN2**2 / 2),
        "k3": (-3 / 4 + 2 * LN2, 1 - LN2),
    }
    for name, (three, one) in expected.items():
        estimate = of_completions(policy, reference, rollout, estimator=name)
        assert estimate.tolist() == pytest.approx([three] * 3 + [one], rel=1e-14)


def evidence(token_rewards: torch.Tensor, lengths: list[list[int]]) -> Evidence:
    """Rollouts of which nothing is known but what their tokens earn."""
    shape = torch.tensor(lengths)
    rewards = torch.zeros(shape.shape, dtype=torch.float64)
    return Evidence(
        rewards=rewards,
        scores=rewards[None],
        weights=torch.ones(1, dtype=torch.float64),
        lengths=shape,
        max_completion_tokens=9,
        token_rewards=token_rewards,
    )


def test_a_rollout_adds_up_its_own_tokens() -> None:
    # Two groups of two completions of 1, 3, 1 and 2 tokens.
    per_token = torch.tensor([10.0, 1.0, 2.0, 4.0, 100.0, 20.0, 30.0], dtype=torch.float64)
    assert evidence(per_token, [[1, 3], [1, 2]]).token_reward_totals.tolist() == [[10, 7], [100, 50]]


def test_k1_of_a_completion_is_its_log_ratio() -> None:
    # π(y) = .5 · .2 = .1, ref(y) = .25 · .8 = .2.
    per_token = k1(logs(0.5, 0.2), logs(0.25, 0.8))
    assert evidence(per_token, [[2]]).token_reward_totals.item() == pytest.approx(math.log(0.1 / 0.2), rel=1e-14)


def test_at_the_reference_every_estimate_is_zero() -> None:
    same = logs(0.3, 0.7)
    for estimate in (k1(same, same), k2(same, same), k3(same, same), distribution_kl(same[None], same[None])):
        assert torch.all(estimate == 0)


def weighed(importance: str | None) -> tuple[list[float], list[float]]:
    """Values and slopes of k3 for two tokens of one completion, π = (.6, .4), μ = (.4, .1) and ref = (.3, .8)."""
    logprobs = logs(0.6, 0.4).requires_grad_()
    zeros = torch.zeros(2, dtype=torch.float64)
    columns = TokenColumns(
        advantages=zeros,
        weights=zeros,
        behaviour_logprobs=logs(0.4, 0.1),
        known=known(reference_logprobs=logs(0.3, 0.8)),
    )
    view = TokenView(logprobs=logprobs, rollout=torch.zeros(2, dtype=torch.int64), columns=columns)
    values = kl_term(KlTerm(coefficient=1.0, importance=importance)).per_token(view)
    values.sum().backward()
    return values.tolist(), logprobs.grad.tolist()


def test_an_estimate_is_weighed_with_its_own_ratio() -> None:
    # x = (ln 2, -ln 2), k3 as above, ρ = (1.5, 4).  The slope of ρk is ρ(k + 1 - e⁻ˣ) = ρx.
    k = [1 / 2 - 1 + LN2, 2 - 1 - LN2]
    values, slopes = weighed("token")
    assert values == pytest.approx([1.5 * k[0], 4 * k[1]], rel=1e-12)
    assert slopes == pytest.approx([1.5 * LN2, -4 * LN2], rel=1e-12)
    assert weighed(None) == (pytest.approx(k, rel=1e-12), pytest.approx([1 / 2, -1], rel=1e-12))


def test_estimates_of_a_completion_share_its_ratio() -> None:
    # √(1.5 · 4) = √6 for both, whose log each log π moves by 1/2: √6 (1 - e⁻ˣ + (k₁ + k₂)/2).
    k = [1 / 2 - 1 + LN2, 2 - 1 - LN2]
    values, slopes = weighed("sequence_mean")
    root = math.sqrt(6)
    assert values == pytest.approx([root * k[0], root * k[1]], rel=1e-12)
    assert slopes == pytest.approx([root * (1 / 2 + sum(k) / 2), root * (-1 + sum(k) / 2)], rel=1e-12)
