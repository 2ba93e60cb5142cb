"""The row `ppo`: its credit, its terms, what it remembers of rewards, and what is told of values and of the KL."""

import math
from dataclasses import replace

import pytest
import torch

from posttrain.algorithms.advantages import RewardScaling, RewardStatistics, scaled_rewards
from posttrain.algorithms.credit import Evidence
from posttrain.algorithms.kl import AdaptiveKl, next_coefficient
from posttrain.algorithms.table import build_algorithm
from posttrain.algorithms.terms import ValueLossOptions, entropy_term, value_loss, value_term
from posttrain.needs import Need
from posttrain.training.credited_step import (
    ActorCriticState,
    credit_metrics,
    explained_variance,
    penalty_metrics,
    value_metrics,
)
from tests.support.sequences import doubles, evidence_of, view_of
from tests.support.tiny import token_loss

RAW = {"name": "ppo", "whitening": "none"}
NAN = math.nan


def evidence(rewards: list[list[float]], values: list[float], lengths: object = None, **more) -> Evidence:
    """With values before each token, and 0 after the last ones unless `final_values` says more."""
    numbers = doubles(*rewards)
    known = {"values": doubles(*values), "final_values": more.pop("final_values", torch.zeros_like(numbers))}
    more = {"truncated": torch.zeros(numbers.shape, dtype=torch.bool), **more}
    return evidence_of(numbers, lengths, limit=8, known=known, **more)


def credit_of(given: Evidence, **options: object):
    return build_algorithm({**RAW, **options}).credit(given)


GAMMA = {"gamma": 0.5, "lambda_policy": 0.5, "lambda_value": 0.25}
ONE_STEP = {"estimator": "one_step"}


@pytest.mark.parametrize(
    ("gae", "token_rewards", "advantages", "returns"),
    [
        # λ = 1: advantages are what is earned from there on, less V; the target is that sum.
        ({"lambda_policy": 1.0}, [-0.1, 0.0, -0.3], [1.1, 1.45, 0.7], [1.6, 1.7, 1.7]),
        # δ = (-.25, .75, 1): with λ = ½ A = (-.25 + .375 + .25, .75 + .5, 1); the targets are 2 whatever λ is.
        ({"lambda_policy": 0.5}, None, [0.375, 1.25, 1.0], [2.0, 2.0, 2.0]),
        # The one-step rule is also the values' target.
        (ONE_STEP, None, [-0.25, 0.75, 1.0], [0.25, 1.0, 2.0]),
        (ONE_STEP | {"gamma": 0.5}, None, [-0.375, 0.25, 1.0], [0.125, 0.5, 2.0]),
        # γ = ½: δ = (-.375, .25, 1); A sums δ times (γλ)^k with λ = ½, R = V + A with λ = ¼.
        (
            GAMMA,
            None,
            [-0.375 + 0.25 / 4 + 1 / 16, 0.25 + 1 / 4, 1.0],
            [0.5 - 0.375 + 0.25 / 8 + 1 / 64, 0.25 + 0.25 + 1 / 8, 2.0],
        ),
    ],
)
def test_the_credit_of_a_completion_that_earns_2_at_its_end(gae, token_rewards, advantages, returns) -> None:
    given = evidence([[2.0]], [0.5, 0.25, 1.0], [[3]], token_rewards=token_rewards and doubles(*token_rewards))
    found = credit_of(given, gae=gae)
    assert found.returns.tolist() == pytest.approx(returns)
    assert found.advantages.tolist() == pytest.approx(advantages)


@pytest.mark.parametrize(
    ("options", "returns"),
    [({}, [1.0, 1.0]), ({"gae": {"truncated": "bootstrap"}}, [5.0, 1.0]), ({"missing_stop_penalty": 0.5}, [0.5, 1.0])],
)
def test_a_cut_off_end_is_an_end_unless_it_is_bootstrapped(options, returns) -> None:
    cut = {"truncated": torch.tensor([[True, False]]), "final_values": doubles([4.0, 0.0])}
    assert credit_of(evidence([[1.0, 1.0]], [0.0, 0.0], **cut), **options).returns.tolist() == returns


@pytest.mark.parametrize(
    ("options", "returns"),
    [
        ({"missing_stop_cap": True}, [0.5, 0.5, -1.0, 0.0, 2.0, 0.0]),
        ({"missing_stop_cap": True, "missing_stop_penalty": 0.25}, [0.25, 0.5, -1.25, 0.0, 2.0, 0.0]),
        ({"missing_stop_penalty": 0.25}, [2.75, 0.5, -1.25, 0.0, 2.0, 0.0]),
    ],
)
def test_a_cut_off_completion_earns_at_most_what_the_worst_that_stopped_does(options, returns) -> None:
    """Of the whole step, before the penalty; one that is below it already stays there, and NaN is nobody's bound."""
    cut = torch.tensor([[True, False, True], [False, False, True]])
    given = evidence([[3.0, 0.5, -1.0], [NAN, 2.0, NAN]], [0.0] * 6, truncated=cut)
    assert credit_of(given, **options).returns.tolist() == returns
    none_stopped = evidence([[3.0, 1.0]], [0.0, 0.0], truncated=torch.ones(1, 2, dtype=torch.bool))
    assert credit_of(none_stopped, missing_stop_cap=True).returns.tolist() == [3.0, 1.0]


def test_whitening_leaves_the_targets_as_they_are_and_what_nothing_scored_out() -> None:
    """Targets rebuilt as whitened advantages + values would be others."""
    given = evidence([[2.0, 0.0], [1.0, 0.0]], [0.5, 0.25, 1.0, 0.1])
    raw, white, scaled = (credit_of(given, whitening=kind) for kind in ("none", "mean_and_deviation", "deviation"))
    assert torch.equal(raw.returns, white.returns)
    assert white.advantages.mean().item() == pytest.approx(0, abs=1e-12)
    assert white.advantages.std(correction=0).item() == pytest.approx(1)
    torch.testing.assert_close(scaled.advantages, raw.advantages / raw.advantages.std(correction=0))
    found = build_algorithm({"name": "ppo"}).credit(evidence([[2.0, NAN], [1.0, 0.0]], [0.5, 9.0, 1.0, 0.1]))
    assert found.advantages[1] == 0 == found.returns[1]
    rest = doubles(1.5, 0.0, -0.1)
    torch.testing.assert_close(found.advantages[[0, 2, 3]], (rest - rest.mean()) / rest.std(correction=0))


def test_a_group_of_one_is_enough_with_a_critic() -> None:
    assert build_algorithm({"name": "ppo"}).least_group_size == 1
    assert build_algorithm({"name": "ppo", "baseline": "leave_one_out"}).least_group_size == 2
    assert credit_of(evidence([[1.0]], [0.25])).advantages.tolist() == [0.75]


def test_without_a_critic_the_others_of_the_prompt_are_the_baseline() -> None:
    """(3, 1, 2): the others' means are 1.5, 2.5, 2; one without a score is nobody's baseline."""
    options = {"baseline": "leave_one_out", "gae": {"lambda_policy": 1.0}}
    found = credit_of(evidence_of([[3.0, 1.0, 2.0, NAN]], [[2, 1, 1, 1]]), **options)
    assert found.advantages.tolist() == pytest.approx([1.5, 1.5, -1.5, 0.0, 0.0])
    assert found.returns is None
    raw = credit_of(evidence_of([[3.0, 1.0]], [[2, 1]]), **options | {"baseline": "none"})
    assert raw.advantages.tolist() == [3.0, 3.0, 1.0]


def test_half_the_squared_error_and_its_clipped_form() -> None:
    values, returns = doubles(0.0, 2.0, 0.5, 0.0), doubles(1.0, 1.0, 1.0, -1.0)
    assert value_loss(values, returns).tolist() == pytest.approx([0.5, 0.5, 0.125, 0.5])
    # V' = 0, reach ¼: V is held to (0, .25, .25, 0); errors (1, .75, .75, 1), and the larger of each two counts.
    clipped = value_loss(values, returns, earlier=doubles(0, 0, 0, 0), reach=doubles(*[0.25] * 4))
    assert clipped.tolist() == pytest.approx([0.5, 0.5, 0.5 * 0.75**2, 0.5])


def test_values_are_held_to_a_reach_of_those_at_collection_and_the_share_of_them_is_told() -> None:
    """V' = 5, 5, 5, 5 and reach 1: V = 7, 5.5, 3 and 7 become 6, 5.5, 4 and 6; errors of V_c: 2, 1.5, 0 and -4."""
    term, zeros = value_term(ValueLossOptions(clip=0.2)), doubles(0, 0, 0, 0)
    columns = {"value_range": zeros + 1, "values": zeros + 5, "returns": doubles(4.0, 4.0, 4.0, 10.0)}
    view = view_of(zeros, seen={"values": doubles(7.0, 5.5, 3.0, 7.0)}, **columns)
    # ½ max((V - R)², (V_c - R)²): 9 and 4, 2.25 and 2.25, 1 and 0, 9 and 16
    assert term.per_token(view).tolist() == [4.5, 1.125, 0.5, 8.0]
    assert term.measures(view)["value/clip_fraction"].tolist() == [0, 0, 0, 1]
    assert value_term(ValueLossOptions()).measures is None


def test_the_bonus_for_entropy_lowers_the_loss_and_may_be_zero() -> None:
    view = view_of(doubles(0, 0), seen={"entropies": doubles(0.5, 2.0)})
    assert entropy_term(0.1).per_token(view).tolist() == [-0.5, -2.0]
    assert (entropy_term(0.0).coefficient, entropy_term(0.1).reported) == (0.0, False)


@pytest.mark.parametrize(
    ("rewards", "reach"),
    [
        ([2.0, 0.0], [0.2, 0.2]),  # returns 2 and 0 have deviation 1
        ([6.0, NAN, 0.0], [0.6] * 3),  # 3, of the two that were scored
        ([NAN, NAN], None),
    ],
)
def test_the_clip_of_values_is_in_deviations_of_the_returns(rewards, reach) -> None:
    given = evidence([rewards], [0.0, 9.0, 0.0] if len(rewards) == 3 else [0.0, 0.0])
    assert credit_of(given).value_range is None
    found = credit_of(given, value_loss={"clip": 0.2}).value_range
    assert (found if found is None else found.tolist()) == (reach and pytest.approx(reach))
    alike = evidence([[1.0, 1.0]], [0.0, 0.0])
    assert (credit_of(alike, value_loss={"clip": 0.2}).value_range > 1e300).all()


@pytest.mark.parametrize(
    ("options", "names", "needs"),
    [
        ({}, ["policy", "value"], {Need.VALUES}),
        (
            {"kl": {"coefficient": 0.1}, "entropy_bonus": 0.01},
            ["policy", "kl", "entropy_bonus", "value"],
            {Need.REFERENCE_LOGPROBS, Need.ENTROPY, Need.VALUES},
        ),
        ({"baseline": "none"}, ["policy"], set()),
    ],
)
def test_terms_are_there_as_the_options_say(options, names, needs) -> None:
    made = build_algorithm({"name": "ppo", **options})
    assert [term.name for term in made.terms] == names
    assert made.needs == needs
    assert (made.critic is None) == ("baseline" in options)
    in_reward = build_algorithm({"name": "ppo", "kl": {"coefficient": 0.1, "place": "reward", "estimator": "k1"}})
    assert in_reward.kl_penalty is not None
    assert [term.name for term in in_reward.terms] == ["policy", "value"]


def test_a_ratio_far_off_stays_finite() -> None:
    """A < 0 and log ρ = 800: exp would be infinite, and 0 · inf in the backward pass NaN.  e²⁰ is where it ends."""
    algorithm, logprobs = build_algorithm({"name": "ppo", "baseline": "none"}), doubles(0, 0).requires_grad_()
    loss = token_loss(algorithm, logprobs, doubles(-800.0, -0.1), doubles(-1, -1), torch.tensor([0, 1]))
    loss.sum().backward()
    assert loss[0].item() == pytest.approx(math.exp(20))
    assert logprobs.grad.tolist() == pytest.approx([0.0, math.exp(0.1)])
    # The bound is never within the clip: between its end and the bound the loss has a slope; 5e8 is above e²⁰ = 4.85e8.
    algorithm = build_algorithm({"name": "ppo", "baseline": "none", "clip_high": 5e8})
    loss = token_loss(algorithm, doubles(0, 0), doubles(-800.0, 0.0), doubles(-1, -1), torch.tensor([0, 1]))
    assert loss[0].item() == pytest.approx(5e8 + 1, rel=1e-10)


@pytest.mark.parametrize(
    ("kl", "num_rollouts", "options", "expected"),
    [
        (6.0, 100, (6.0, 1000.0), 0.1),
        (6.6, 100, (6.0, 1000.0), 0.1 * 1.01),
        (600.0, 100, (6.0, 1000.0), 0.1 * 1.02),
        (-5.0, 100, (6.0, 1000.0), 0.1 * 0.98),
        (0.0, 10**6, (6.0, 1000.0), 0.0),
        (6.6, 1, (6.0, 0.5), 0.12),
    ],
)
def test_the_controller_moves_the_coefficient_by_at_most_a_fifth_of_what_the_horizon_allows(
    kl, num_rollouts, options, expected
) -> None:
    adaptive = AdaptiveKl(target=options[0], horizon=options[1])
    assert next_coefficient(0.1, kl, num_rollouts=num_rollouts, options=adaptive) == pytest.approx(expected)


def test_reward_statistics_are_those_of_all_rewards_so_far() -> None:
    found = RewardStatistics()
    assert found.deviation == 0
    for step in (doubles([1.0, 5.0], [NAN, 3.0]), doubles([2.0, 8.0]), doubles([NAN, 0.0])):
        found = found.with_rewards(step)
    every = doubles(1.0, 5.0, 3.0, 2.0, 8.0, 0.0)
    assert (found.count, found.first_mean) == (6, 3.0)
    assert found.mean == pytest.approx(every.mean().item())
    assert found.deviation == pytest.approx(every.std(correction=0).item())


def test_rewards_are_centred_on_the_first_step_and_divided_by_all_so_far() -> None:
    seen = RewardStatistics(first_mean=3.0, count=4, mean=9.0, squares=16.0)  # deviation 2
    rewards = doubles([3.0, 7.0], [NAN, 103.0])
    found = scaled_rewards(rewards, seen, RewardScaling())
    assert found.nan_to_num(nan=-99).flatten().tolist() == [0.0, 2.0, -99.0, 10.0]
    assert scaled_rewards(rewards, seen, RewardScaling(centre=False, clip=None)).flatten()[3] == 51.5
    assert scaled_rewards(rewards, seen, RewardScaling(clip=0.5)).flatten()[1] == 0.5
    nothing_differs = RewardStatistics().with_rewards(doubles([4.0, 4.0]))
    assert scaled_rewards(doubles([4.0, 5.0]), nothing_differs, RewardScaling()).tolist() == [[0.0, 1.0]]


def test_rewards_that_are_all_alike_are_so_whatever_their_sums_round_to() -> None:
    """0.3 less V, summed up and V put back, is 0.3 to 1e-17: no spread to explain, to clip by or to divide by."""
    random = torch.Generator().manual_seed(0)
    values = (0.3 + torch.randn(23, generator=random, dtype=torch.float64) / 10).tolist()
    given = evidence([[0.3], [0.3], [0.3]], values, [[7], [11], [5]])
    found = credit_of(given, value_loss={"clip": 0.2})
    assert 0 < found.returns.std() < 1e-15
    assert found.value_range.min() > 1e300
    assert "value/explained_variance" not in value_metrics(given, found)
    same = doubles([0.1] * 3)
    statistics = RewardStatistics().with_rewards(same)
    assert statistics.deviation > 0
    assert scaled_rewards(same, statistics, RewardScaling()).abs().max() < 1e-15


@pytest.mark.parametrize(
    ("returns", "values", "explained"),
    [
        # Var R of (0, 2) is 1.  R - V: (0, 0); (-1, 1); (1, -1) - twice as wide as R gives 1 - 4.
        ([0.0, 2.0], [0.0, 2.0], 1.0),
        ([0.0, 2.0], [7.0, 7.0], 0.0),
        ([0.0, 2.0], [2.0, 0.0], -3.0),
        ([1.0, 1.0], [0.0, 1.0], None),
        # A deviation of 1e-5 is above the least, 1e-6.
        ([0.0, 2e-5], [0.0, 2e-5], 1.0),
        ([0.0, 1e-6], [0.0, 1e-6], None),
    ],
)
def test_explained_variance_by_hand(returns, values, explained) -> None:
    assert explained_variance(doubles(*returns), doubles(*values)) == explained


def test_what_is_told_of_values_is_of_scored_completions() -> None:
    """Of four tokens the last is of what nothing scored: V = 1, 2, 3; R = 2, 2, 6."""
    given = evidence([[2.0, 6.0, NAN]], [1.0, 2.0, 3.0, 50.0], [[2, 1, 1]])
    told = value_metrics(given, credit_of(given, gae={"lambda_policy": 1.0}))
    # Var R = 32/9; of R - V = 1, 0, 3 it is 14/9.
    expected = {"value/explained_variance": 1 - 14 / 32, "value/mean": 2, "returns/mean": 10 / 3}
    assert told == pytest.approx({**expected, "returns/std": math.sqrt(32) / 3})
    nobody = evidence([[NAN]], [1.0])
    assert value_metrics(nobody, credit_of(nobody)) == {}


def test_the_kl_of_samples_is_told_of_completions_and_of_tokens() -> None:
    """log μ - log ref = 1, 0 and 1, of two completions."""
    columns = {"behaviour_logprobs": doubles(-1.0, -2.0, -3.0), "reference_logprobs": doubles(-2.0, -2.0, -4.0)}
    told = penalty_metrics(evidence_of([[0.0, 0.0]], [[2, 1]], known=columns))
    assert told == pytest.approx({"kl_completion": 1.0, "kl_token": 2 / 3})


def test_a_penalty_is_told_of_beside_a_critic_or_a_controller() -> None:
    kl = {"coefficient": 0.5, "estimator": "k1", "place": "reward"}
    given = evidence([[2.0, 1.0]], [1.0, 0.0])
    both = {"behaviour_logprobs": doubles(-1.0, -1.0), "reference_logprobs": doubles(-2.0, -1.0)}
    given = replace(given, known={**given.known, **both})

    def told(**options: object) -> dict[str, float]:
        algorithm = build_algorithm({**RAW, **options})
        return credit_metrics(
            given, algorithm.credit(given), algorithm, ActorCriticState.at_first(algorithm, begun=False)
        )

    assert (told(kl=kl)["kl_coefficient"], told(kl=kl)["kl_completion"]) == (0.5, 0.5)
    assert told(kl=kl, baseline="none", adaptive_kl={"target": 1.0})["kl_coefficient"] == 0.5
    assert "kl_coefficient" not in told(kl=kl, baseline="none")
    assert "kl_coefficient" not in told()
