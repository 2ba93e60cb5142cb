"""The row `ppo`: its credit, its terms, what it remembers, and options that make no sense."""

import math

import pytest
import torch

from posttrain.algorithms.credit import Evidence
from posttrain.algorithms.kl import AdaptiveKl, next_coefficient
from posttrain.algorithms.reward_shaping import RewardScaling, RewardStatistics, scaled_rewards
from posttrain.algorithms.table import build_algorithm
from posttrain.algorithms.terms import TokenView, ValueLossOptions, entropy_term, value_loss, value_term
from posttrain.batch import TokenColumns
from posttrain.needs import Need
from posttrain.training.credited_step import (
    value_metrics,
)
from tests.support.sequences import known
from tests.support.tiny import token_loss

RAW = {"name": "ppo", "whitening": "none"}
NAN = math.nan


def evidence(rewards: list[list[float]], values: list[float] | None, lengths: list[list[int]], **more) -> Evidence:
    """`final_values` may be given; else they are 0."""
    numbers = torch.tensor(rewards, dtype=torch.float64)
    final = more.pop("final_values", torch.zeros_like(numbers))
    return Evidence(
        rewards=numbers,
        scores=numbers[None],
        weights=torch.ones(1, dtype=torch.float64),
        lengths=torch.tensor(lengths),
        max_completion_tokens=8,
        known={} if values is None else {"values": column(values), "final_values": final},
        **{"truncated": torch.zeros(numbers.shape, dtype=torch.bool), **more},
    )


def column(numbers: list[float]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def credit_of(config: dict[str, object], given: Evidence):
    return build_algorithm(config).credit(given)


def test_the_reward_is_earned_by_the_last_token_and_token_rewards_where_they_are() -> None:
    """λ = 1: advantages are what is earned from there on, less V; the target is that sum."""
    given = evidence([[2.0]], [0.5, 0.25, 1.0], [[3]], token_rewards=column([-0.1, 0.0, -0.3]))
    found = credit_of({**RAW, "gae": {"lambda_policy": 1.0}}, given)
    assert found.returns.tolist() == pytest.approx([1.6, 1.7, 1.7])
    assert found.advantages.tolist() == pytest.approx([1.1, 1.45, 0.7])


def test_policy_and_values_have_lambdas_of_their_own() -> None:
    """δ = (-.25, .75, 1): with λ = ½ A = (-.25 + .375 + .25, .75 + .5, 1); the targets are 2 whatever λ is."""
    given = evidence([[2.0]], [0.5, 0.25, 1.0], [[3]])
    found = credit_of({**RAW, "gae": {"lambda_policy": 0.5}}, given)
    assert found.advantages.tolist() == pytest.approx([0.375, 1.25, 1.0])
    assert found.returns.tolist() == pytest.approx([2.0, 2.0, 2.0])


def test_the_one_step_rule_is_also_the_values_target() -> None:
    found = credit_of({**RAW, "gae": {"estimator": "one_step"}}, evidence([[2.0]], [0.5, 0.25, 1.0], [[3]]))
    assert found.advantages.tolist() == pytest.approx([-0.25, 0.75, 1.0])
    assert found.returns.tolist() == pytest.approx([0.25, 1.0, 2.0])
    half = credit_of(
        {**RAW, "gae": {"estimator": "one_step", "gamma": 0.5}}, evidence([[2.0]], [0.5, 0.25, 1.0], [[3]])
    )
    assert half.returns.tolist() == pytest.approx([0.125, 0.5, 2.0])
    assert half.advantages.tolist() == pytest.approx([-0.375, 0.25, 1.0])


def test_the_future_is_discounted_in_advantages_and_targets() -> None:
    """γ = ½: δ = (-.375, .25, 1); A sums δ times (γλ)^k with λ = ½, R = V + A with λ = ¼."""
    gae = {"gamma": 0.5, "lambda_policy": 0.5, "lambda_value": 0.25}
    found = credit_of({**RAW, "gae": gae}, evidence([[2.0]], [0.5, 0.25, 1.0], [[3]]))
    assert found.advantages.tolist() == pytest.approx([-0.375 + 0.25 / 4 + 1 / 16, 0.25 + 1 / 4, 1.0])
    assert found.returns.tolist() == pytest.approx([0.5 - 0.375 + 0.25 / 8 + 1 / 64, 0.25 + 0.25 + 1 / 8, 2.0])


def test_a_cut_off_end_is_an_end_unless_it_is_bootstrapped() -> None:
    cut = {"truncated": torch.tensor([[True, False]]), "final_values": column([4.0, 0.0]).view(1, 2)}
    given = evidence([[1.0, 1.0]], [0.0, 0.0], [[1, 1]], **cut)
    assert credit_of(RAW, given).returns.tolist() == [1.0, 1.0]
    assert credit_of({**RAW, "gae": {"truncated": "bootstrap"}}, given).returns.tolist() == [5.0, 1.0]
    assert credit_of({**RAW, "missing_stop_penalty": 0.5}, given).returns.tolist() == [0.5, 1.0]


def test_a_cut_off_completion_earns_at_most_what_the_worst_that_stopped_does() -> None:
    """Of the whole step, before the penalty; one that is below it already stays there, and NaN is nobody's bound."""
    cut = {"truncated": torch.tensor([[True, False, True], [False, False, True]])}
    given = evidence([[3.0, 0.5, -1.0], [NAN, 2.0, NAN]], [0.0] * 6, [[1, 1, 1], [1, 1, 1]], **cut)
    capped = credit_of({**RAW, "missing_stop_cap": True}, given)
    assert capped.returns.tolist() == [0.5, 0.5, -1.0, 0.0, 2.0, 0.0]
    both = credit_of({**RAW, "missing_stop_cap": True, "missing_stop_penalty": 0.25}, given)
    assert both.returns.tolist() == [0.25, 0.5, -1.25, 0.0, 2.0, 0.0]
    penalty = credit_of({**RAW, "missing_stop_penalty": 0.25}, given)
    assert penalty.returns.tolist() == [2.75, 0.5, -1.25, 0.0, 2.0, 0.0]
    none_stopped = evidence([[3.0, 1.0]], [0.0, 0.0], [[1, 1]], truncated=torch.ones(1, 2, dtype=torch.bool))
    assert credit_of({**RAW, "missing_stop_cap": True}, none_stopped).returns.tolist() == [3.0, 1.0]


def test_whitening_leaves_the_targets_as_they_are() -> None:
    """Targets rebuilt as whitened advantages + values would be others."""
    given = evidence([[2.0, 0.0], [1.0, 0.0]], [0.5, 0.25, 1.0, 0.1], [[1, 1], [1, 1]])
    raw, white = credit_of(RAW, given), credit_of({"name": "ppo"}, given)
    assert torch.equal(raw.returns, white.returns)
    assert white.advantages.mean().item() == pytest.approx(0, abs=1e-12)
    assert white.advantages.std(correction=0).item() == pytest.approx(1)
    scaled = credit_of({"name": "ppo", "whitening": "deviation"}, given)
    torch.testing.assert_close(scaled.advantages, raw.advantages / raw.advantages.std(correction=0))


def test_what_nothing_scored_has_no_advantage_and_no_part_in_the_whitening() -> None:
    given = evidence([[2.0, NAN], [1.0, 0.0]], [0.5, 9.0, 1.0, 0.1], [[1, 1], [1, 1]])
    found = credit_of({"name": "ppo"}, given)
    assert found.advantages[1] == 0 == found.returns[1]
    rest = column([1.5, 0.0, -0.1])
    torch.testing.assert_close(found.advantages[[0, 2, 3]], (rest - rest.mean()) / rest.std(correction=0))


def test_a_group_of_one_is_enough_with_a_critic() -> None:
    assert build_algorithm({"name": "ppo"}).least_group_size == 1
    assert build_algorithm({"name": "ppo", "baseline": "leave_one_out"}).least_group_size == 2
    assert credit_of(RAW, evidence([[1.0]], [0.25], [[1]])).advantages.tolist() == [0.75]


def test_without_a_critic_the_others_of_the_prompt_are_the_baseline() -> None:
    """(3, 1, 2): the others' means are 1.5, 2.5, 2; one without a score is nobody's baseline."""
    config = {**RAW, "baseline": "leave_one_out", "gae": {"lambda_policy": 1.0}}
    found = credit_of(config, evidence([[3.0, 1.0, 2.0, NAN]], None, [[2, 1, 1, 1]]))
    assert found.advantages.tolist() == pytest.approx([1.5, 1.5, -1.5, 0.0, 0.0])
    assert found.returns is None
    raw = credit_of({**config, "baseline": "none"}, evidence([[3.0, 1.0]], None, [[2, 1]]))
    assert raw.advantages.tolist() == [3.0, 3.0, 1.0]


def test_half_the_squared_error_and_its_clipped_form() -> None:
    values, returns = column([0.0, 2.0, 0.5, 0.0]), column([1.0, 1.0, 1.0, -1.0])
    assert value_loss(values, returns).tolist() == pytest.approx([0.5, 0.5, 0.125, 0.5])
    # V' = 0, reach ¼: V is held to (0, .25, .25, 0); errors (1, .75, .75, 1), and the larger of each two counts.
    reach = torch.full((4,), 0.25, dtype=torch.float64)
    clipped = value_loss(values, returns, earlier=torch.zeros(4).double(), reach=reach)
    assert clipped.tolist() == pytest.approx([0.5, 0.5, 0.5 * 0.75**2, 0.5])


def test_values_are_held_to_a_reach_of_those_at_collection_and_the_share_of_them_is_told() -> None:
    """V' = 5, 5, 5, 5 and reach 1: V = 7, 5.5, 3 and 7 become 6, 5.5, 4 and 6; errors of V_c: 2, 1.5, 0 and -4."""
    term = value_term(ValueLossOptions(clip=0.2))
    columns = TokenColumns(
        advantages=torch.zeros(4).double(),
        weights=torch.ones(4).double(),
        behaviour_logprobs=torch.zeros(4).double(),
        value_range=torch.ones(4).double(),
        known=known(values=torch.full((4,), 5.0).double(), returns=column([4.0, 4.0, 4.0, 10.0])),
    )
    view = TokenView(
        logprobs=torch.zeros(4).double(),
        rollout=torch.arange(4),
        columns=columns,
        known=known(values=column([7.0, 5.5, 3.0, 7.0])),
    )
    # ½ max((V - R)², (V_c - R)²): 9 and 4, 2.25 and 2.25, 1 and 0, 9 and 16
    assert term.per_token(view).tolist() == [4.5, 1.125, 0.5, 8.0]
    assert term.measures(view)["value/clip_fraction"].tolist() == [0, 0, 0, 1]
    assert value_term(ValueLossOptions()).measures is None


def test_the_bonus_for_entropy_lowers_the_loss_and_may_be_zero() -> None:
    columns = TokenColumns(
        advantages=torch.zeros(2).double(), weights=torch.ones(2).double(), behaviour_logprobs=torch.zeros(2).double()
    )
    view = TokenView(
        logprobs=torch.zeros(2).double(),
        rollout=torch.arange(2),
        columns=columns,
        known=known(entropies=column([0.5, 2.0])),
    )
    assert entropy_term(0.1).per_token(view).tolist() == [-0.5, -2.0]
    assert (entropy_term(0.0).coefficient, entropy_term(0.1).reported) == (0.0, False)


def test_the_clip_of_values_is_in_deviations_of_the_returns() -> None:
    given = evidence([[2.0, 0.0]], [0.0, 0.0], [[1, 1]])
    assert credit_of(RAW, given).value_range is None
    reach = credit_of({**RAW, "value_loss": {"clip": 0.2}}, given).value_range
    assert reach.tolist() == pytest.approx([0.2, 0.2])  # returns 2 and 0 have deviation 1
    wider = evidence([[6.0, NAN, 0.0]], [0.0, 9.0, 0.0], [[1, 1, 1]])
    reach = credit_of({**RAW, "value_loss": {"clip": 0.2}}, wider).value_range
    assert reach.tolist() == pytest.approx([0.6] * 3)  # 3, of the two that were scored
    nobody = evidence([[NAN, NAN]], [0.0, 0.0], [[1, 1]])
    assert credit_of({**RAW, "value_loss": {"clip": 0.2}}, nobody).value_range is None
    alike = evidence([[1.0, 1.0]], [0.0, 0.0], [[1, 1]])
    assert (credit_of({**RAW, "value_loss": {"clip": 0.2}}, alike).value_range > 1e300).all()


def test_terms_are_there_as_the_options_say() -> None:
    assert [term.name for term in build_algorithm({"name": "ppo"}).terms] == ["policy", "value"]
    kl = {"coefficient": 0.1}
    whole = build_algorithm({"name": "ppo", "kl": kl, "entropy_bonus": 0.01})
    assert [term.name for term in whole.terms] == ["policy", "kl", "entropy_bonus", "value"]
    assert whole.needs == {Need.REFERENCE_LOGPROBS, Need.ENTROPY, Need.VALUES}
    in_reward = build_algorithm({"name": "ppo", "kl": {**kl, "place": "reward", "estimator": "k1"}})
    assert in_reward.kl_penalty is not None
    assert [term.name for term in in_reward.terms] == ["policy", "value"]
    bare = build_algorithm({"name": "ppo", "baseline": "none"})
    assert (bare.critic, [term.name for term in bare.terms]) == (None, ["policy"])


def test_a_ratio_far_off_stays_finite() -> None:
    """A < 0 and log ρ = 800: exp would be infinite, and 0 · inf in the backward pass NaN.  e²⁰ is where it ends."""
    algorithm = build_algorithm({"name": "ppo", "baseline": "none"})
    logprobs = torch.tensor([0.0, 0.0], dtype=torch.float64, requires_grad=True)
    loss = token_loss(algorithm, logprobs, column([-800.0, -0.1]), column([-1.0, -1.0]), torch.tensor([0, 1]))
    loss.sum().backward()
    assert loss[0].item() == pytest.approx(math.exp(20))
    assert logprobs.grad.tolist() == pytest.approx([0.0, math.exp(0.1)])


def test_the_bound_of_a_ratio_far_off_is_never_within_the_clip() -> None:
    """A < 0: between the clip's end and the bound the loss has a slope.  clip_high = 5e8 is above e²⁰ = 4.85e8."""
    algorithm = build_algorithm({"name": "ppo", "baseline": "none", "clip_high": 5e8})
    loss = token_loss(algorithm, column([0.0, 0.0]), column([-800.0, 0.0]), column([-1.0, -1.0]), torch.tensor([0, 1]))
    assert loss[0].item() == pytest.approx(5e8 + 1, rel=1e-10)


def test_the_controller_moves_the_coefficient_by_at_most_a_fifth_of_what_the_horizon_allows() -> None:
    options = AdaptiveKl(target=6.0, horizon=1000.0)
    assert next_coefficient(0.1, 6.0, num_rollouts=100, options=options) == 0.1
    assert next_coefficient(0.1, 6.6, num_rollouts=100, options=options) == pytest.approx(0.1 * 1.01)
    assert next_coefficient(0.1, 600.0, num_rollouts=100, options=options) == pytest.approx(0.1 * 1.02)
    assert next_coefficient(0.1, -5.0, num_rollouts=100, options=options) == pytest.approx(0.1 * 0.98)
    assert next_coefficient(0.1, 0.0, num_rollouts=10**6, options=options) == 0.0
    assert next_coefficient(0.1, 6.6, num_rollouts=1, options=AdaptiveKl(target=6.0, horizon=0.5)) == pytest.approx(
        0.12
    )


def test_reward_statistics_are_those_of_all_rewards_so_far() -> None:
    steps = [column([1.0, 5.0, NAN, 3.0]).view(2, 2), column([2.0, 8.0]).view(1, 2), column([NAN, 0.0]).view(1, 2)]
    found = RewardStatistics()
    assert found.deviation == 0
    for step in steps:
        found = found.with_rewards(step)
    every = column([1.0, 5.0, 3.0, 2.0, 8.0, 0.0])
    assert (found.count, found.first_mean) == (6, 3.0)
    assert found.mean == pytest.approx(every.mean().item())
    assert found.deviation == pytest.approx(every.std(correction=0).item())


def test_rewards_are_centred_on_the_first_step_and_divided_by_all_so_far() -> None:
    seen = RewardStatistics(first_mean=3.0, count=4, mean=9.0, squares=16.0)  # deviation 2
    rewards = column([3.0, 7.0, NAN, 103.0]).view(2, 2)
    found = scaled_rewards(rewards, seen, RewardScaling())
    assert found.nan_to_num(nan=-99).flatten().tolist() == [0.0, 2.0, -99.0, 10.0]
    assert scaled_rewards(rewards, seen, RewardScaling(centre=False, clip=None)).flatten()[3] == 51.5
    assert scaled_rewards(rewards, seen, RewardScaling(clip=0.5)).flatten()[1] == 0.5
    nothing_differs = RewardStatistics().with_rewards(column([4.0, 4.0]).view(1, 2))
    assert scaled_rewards(column([4.0, 5.0]).view(1, 2), nothing_differs, RewardScaling()).tolist() == [[0.0, 1.0]]


def test_rewards_that_are_all_alike_are_so_whatever_their_sums_round_to() -> None:
    """0.3 less V, summed up and V put back, is 0.3 to 1e-17: no spread to explain, to clip by or to divide by."""
    random = torch.Generator().manual_seed(0)
    values = (0.3 + torch.randn(23, generator=random, dtype=torch.float64) / 10).tolist()
    given = evidence([[0.3], [0.3], [0.3]], values, [[7], [11], [5]])
    found = credit_of({**RAW, "value_loss": {"clip": 0.2}}, given)
    assert 0 < found.returns.std() < 1e-15
    assert found.value_range.min() > 1e300
    assert "value/explained_variance" not in value_metrics(given, found)
    same = torch.full((1, 3), 0.1, dtype=torch.float64)
    statistics = RewardStatistics().with_rewards(same)
    assert statistics.deviation > 0
    assert scaled_rewards(same, statistics, RewardScaling()).abs().max() < 1e-15
