"""Credit per token: GAE against sums written out, what other rules come to, and that none is a bias."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from posttrain.algorithms import ppo
from posttrain.algorithms.credit import Evidence, returns_to_go
from posttrain.algorithms.ppo import ValuedTokens, generalised_advantages, one_step_advantages, whitened, whitening_of
from posttrain.algorithms.table import build_algorithm
from posttrain.course import compute_advantages
from tests.support.sequences import evidence_of

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=5)
SHARES = st.floats(0, 1)


def valued(rewards: Tensor, values: Tensor, rollout: Tensor, ends: Tensor) -> ValuedTokens:
    return ValuedTokens(rewards=rewards, values=values, rollout=rollout, final_values=ends)


def some_tokens(lengths: list[int], seed: int = 0, *, ends: bool = True) -> ValuedTokens:
    """Random rewards and values."""
    drawn = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    rewards, values = (torch.randn(count, generator=drawn, dtype=torch.float64) for _ in range(2))
    final = torch.randn(len(lengths), generator=drawn, dtype=torch.float64) * ends
    return valued(rewards, values, torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)), final)


def written_out(tokens: ValuedTokens, gamma: float, lam: float) -> Tensor:
    """Σ_k (γλ)^k δ_{t+k}, completion by completion and term by term."""
    found = torch.zeros(len(tokens.rollout), dtype=torch.float64)
    for row, final in enumerate(tokens.final_values.tolist()):
        places = [t for t in range(len(found)) if tokens.rollout[t] == row]
        rewards = [tokens.rewards[t].item() for t in places]
        values = [*(tokens.values[t].item() for t in places), final]
        deltas = [rewards[i] + gamma * values[i + 1] - values[i] for i in range(len(places))]
        for i, place in enumerate(places):
            found[place] = math.fsum((gamma * lam) ** (k - i) * deltas[k] for k in range(i, len(places)))
    return found


@given(lengths=LENGTHS, gamma=SHARES, lam=SHARES, seed=st.integers(0, 99))
def test_the_scan_is_the_sum_of_all_later_surprises(lengths, gamma, lam, seed) -> None:
    tokens = some_tokens(lengths, seed)
    found = generalised_advantages(tokens, gamma=gamma, lam=lam)
    torch.testing.assert_close(found, written_out(tokens, gamma, lam), rtol=1e-12, atol=1e-12)


@given(lengths=LENGTHS, gamma=SHARES)
def test_with_lambda_one_a_target_is_what_was_earned_from_there_on_whatever_the_values_were(lengths, gamma) -> None:
    tokens = some_tokens(lengths, ends=False)
    expected = torch.zeros(len(tokens.rollout), dtype=torch.float64)
    for row in range(len(lengths)):
        places = (tokens.rollout == row).nonzero().flatten().tolist()
        for i, place in enumerate(places):
            ahead = enumerate(places[i:])
            expected[place] = math.fsum(gamma**k * tokens.rewards[t].item() for k, t in ahead)
    torch.testing.assert_close(ppo.value_targets(tokens, gamma=gamma), expected, rtol=1e-12, atol=1e-12)


@given(lengths=LENGTHS)
def test_with_lambda_zero_it_is_the_one_step_rule(lengths) -> None:
    tokens = some_tokens(lengths)
    torch.testing.assert_close(generalised_advantages(tokens, lam=0.0), one_step_advantages(tokens), rtol=0, atol=0)


def test_the_one_step_rule_is_the_courses() -> None:
    """Three completions of four tokens after a prompt of two: V of the state before each token is at place 1 to 4."""
    values = torch.randn(3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rewards = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    theirs = compute_advantages(values, rewards, 2)
    earned = torch.zeros(3, 4, dtype=torch.float64)
    earned[:, -1] = rewards
    rollout, ends = torch.arange(3).repeat_interleave(4), torch.zeros(3, dtype=torch.float64)
    ours = one_step_advantages(valued(earned.flatten(), values[:, 1:5].flatten(), rollout, ends))
    torch.testing.assert_close(ours.view(3, 4), theirs, rtol=0, atol=0)


def test_three_tokens_by_hand() -> None:
    """δ = (1 + 2 - 4, 0 + 8 - 2, 16 + 0 - 8) = (-1, 6, 8);  γλ = ½:  A = (-1 + 3 + 2, 6 + 4, 8)."""
    rewards, values = torch.tensor([[1.0, 0, 16], [4, 2, 8]]).double()
    tokens = valued(rewards, values, torch.zeros(3, dtype=torch.long), torch.zeros(1).double())
    assert generalised_advantages(tokens, lam=0.5).tolist() == [4, 10, 8]
    # Cut off, with 32 expected after the end: δ_3 = 40, and half and a quarter of the 32 more before it.
    cut_off = replace(tokens, final_values=torch.tensor([32.0]).double())
    assert generalised_advantages(cut_off, lam=0.5).tolist() == [4 + 8, 10 + 16, 8 + 32]


@given(lengths=LENGTHS, seed=st.integers(0, 9))
def test_completions_do_not_see_each_other(lengths, seed) -> None:
    tokens = some_tokens(lengths, seed)
    together = generalised_advantages(tokens, lam=0.9)
    for row in range(len(lengths)):
        mine = tokens.rollout == row
        rollout, ends = torch.zeros(lengths[row], dtype=torch.long), tokens.final_values[row : row + 1]
        alone = valued(tokens.rewards[mine], tokens.values[mine], rollout, ends)
        torch.testing.assert_close(generalised_advantages(alone, lam=0.9), together[mine], rtol=1e-12, atol=1e-12)


def test_a_lambda_for_each_completion() -> None:
    tokens = some_tokens([4, 7, 3])
    lams = torch.tensor([0.2, 0.9, 1.0], dtype=torch.float64)
    found = generalised_advantages(tokens, lam=lams)
    for row, lam in enumerate(lams.tolist()):
        mine = tokens.rollout == row
        torch.testing.assert_close(found[mine], generalised_advantages(tokens, lam=lam)[mine], rtol=1e-12, atol=1e-12)


def test_long_completions_see_their_ends() -> None:
    """α = .05: 1 - 20/length, and 0 below 20 tokens."""
    lengths = torch.tensor([10, 20, 40, 400])
    assert ppo.adaptive_lambda(lengths, alpha=0.05).tolist() == pytest.approx([0, 0, 0.5, 0.95])


def test_a_scan_of_thousands_of_tokens_is_their_sum() -> None:
    ones, going = torch.ones(5000, dtype=torch.float64), (torch.arange(5000) != 4999).double()
    assert ppo.discounted_sums(ones, going).tolist() == [*range(5000, 0, -1)]


@given(lengths=LENGTHS, seed=st.integers(0, 9))
def test_whitened_advantages_have_mean_zero_and_deviation_one_over_the_counted_tokens(lengths, seed) -> None:
    drawn = torch.Generator().manual_seed(seed)
    advantages = torch.randn(sum(lengths) + 3, generator=drawn, dtype=torch.float64) * 7 + 3
    counted = torch.ones(len(advantages), dtype=torch.bool)
    counted[1] = False
    advantages[1] = torch.nan
    found = whitened(advantages, counted, whitening_of(advantages, counted))
    assert found[1] == 0
    assert found[counted].mean().item() == pytest.approx(0, abs=1e-12)
    assert found[counted].std(correction=0).item() == pytest.approx(1)
    scaled = whitened(advantages, counted, whitening_of(advantages, counted, centre=False))
    torch.testing.assert_close(scaled[counted], advantages[counted] / advantages[counted].std(correction=0))


def test_rounding_is_not_blown_up_to_deviation_one() -> None:
    """Ten times .1 + .2 and ten times .3: they differ by 5.6e-17."""
    advantages = torch.tensor([0.1 + 0.2, 0.3] * 10, dtype=torch.float64)
    counted = torch.ones(20, dtype=torch.bool)
    assert whitening_of(advantages, counted) == (0.0, 1.0)
    just_enough = torch.tensor([-1e-5, 1e-5] * 10, dtype=torch.float64)
    found = whitened(just_enough, counted, whitening_of(just_enough, counted))
    assert found.tolist() == pytest.approx([-1, 1] * 10)


COARSE = [
    *({"name": "reinforce"}, {"name": "reinforce", "baseline": "batch_mean"}, {"name": "rloo"}, {"name": "dr_grpo"}),
    *({"name": "grpo", **more} for more in ({}, {"deviation": "sample", "deviation_epsilon": 1e-4})),
    {"name": "grpo", "deviation": "none"},
]
FINE = [{**each, "credit": "reward_to_go"} for each in COARSE]
STEPS = {"name": "grpo", "credit": "steps"}


def coarse(config: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in config.items() if name != "credit"}


def some_evidence(seed: int, num_prompts: int, group_size: int) -> Evidence:
    """Random rewards, some missing, and lengths; no token rewards."""
    rng = torch.Generator().manual_seed(seed)
    rewards = torch.randint(0, 4, (num_prompts, group_size), generator=rng).double() / 3
    rewards = torch.where(torch.rand(rewards.shape, generator=rng) < 0.15, torch.nan, rewards)
    return evidence_of(rewards, torch.randint(1, 9, rewards.shape, generator=rng), limit=9)


def with_steps(evidence: Evidence, seed: int) -> Evidence:
    """The evidence, in which about half of the tokens end a step that earned something."""
    rng = torch.Generator().manual_seed(seed)
    count = int(evidence.lengths.sum())
    earned = torch.randn(count, generator=rng, dtype=torch.float64)
    steps = torch.where(torch.rand(count, generator=rng) < 0.5, torch.nan, earned)
    return replace(evidence, token_rewards=steps.nan_to_num(nan=0.0), step_rewards=steps)


SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 5))


@pytest.mark.parametrize("config", [*FINE, STEPS], ids=str)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**31), shape=SHAPES)
def test_without_token_rewards_every_level_of_credit_is_that_of_whole_completions(config, seed, shape) -> None:
    evidence = some_evidence(seed, *shape)
    fine, plain = (build_algorithm(each).credit(evidence) for each in (config, coarse(config)))
    assert torch.equal(fine.advantages, plain.advantages)


@pytest.mark.parametrize("config", FINE, ids=str)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**31), shape=SHAPES)
def test_a_reward_that_comes_with_the_last_token_is_the_completions_reward(config, seed, shape) -> None:
    evidence = some_evidence(seed, *shape)
    last = evidence.lengths.flatten().cumsum(0) - 1
    at_last = torch.zeros(int(evidence.lengths.sum()), dtype=torch.float64)
    at_last[last] = evidence.rewards.nan_to_num(nan=0.0).flatten()
    nothing = torch.where(evidence.rewards.isnan(), torch.nan, 0.0).double()
    moved = replace(evidence, rewards=nothing, token_rewards=at_last)
    plain = build_algorithm(coarse(config)).credit(evidence).advantages
    torch.testing.assert_close(build_algorithm(config).credit(moved).advantages, plain, rtol=1e-12, atol=1e-12)


@given(seed=st.integers(0, 2**31), group_size=st.integers(1, 5))
def test_the_first_token_is_to_get_all_that_its_completion_earns(seed: int, group_size: int) -> None:
    evidence = with_steps(some_evidence(seed, 1, group_size), seed)
    parts = evidence.token_rewards.split(evidence.lengths.flatten().tolist())
    table = returns_to_go(evidence.rewards[0], parts)
    totals = evidence.rewards + evidence.token_reward_totals
    torch.testing.assert_close(table[:1], totals, rtol=1e-12, atol=1e-12, equal_nan=True)
    # And the last one what it earns itself, with the outcome.
    lasts = torch.stack([table[len(part) - 1, i] for i, part in enumerate(parts)])
    ends = torch.stack([part[-1] for part in parts]) + evidence.rewards[0]
    torch.testing.assert_close(lasts, ends, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("config", [*FINE[1:], STEPS], ids=str)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**31), group_size=st.integers(1, 6), step=st.sampled_from([0.1, 0.3, 1e-9, 7.7]))
def test_a_group_without_information_is_exactly_0(config, seed, group_size, step) -> None:
    # All completions earn the same at the same places, whatever rounding makes of sums.
    rng = torch.Generator().manual_seed(seed)
    length = int(torch.randint(1, 9, (1,), generator=rng))
    one = torch.where(torch.rand(length, generator=rng) < 0.5, torch.nan, torch.tensor(step)).double()
    steps = one.repeat(group_size)
    evidence = replace(
        some_evidence(0, 1, group_size),
        rewards=torch.full((1, group_size), 0.1 + 0.2, dtype=torch.float64),
        lengths=torch.full((1, group_size), length),
        token_rewards=steps.nan_to_num(nan=0.0),
        step_rewards=steps,
    )
    assert (build_algorithm(config).credit(evidence).advantages == 0).all()


@pytest.mark.parametrize("config", [*FINE, STEPS], ids=str)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**31), shape=SHAPES)
def test_an_unscored_completion_gets_nothing_and_changes_nothing_for_others(config, seed, shape) -> None:
    evidence = with_steps(some_evidence(seed, *shape), seed)
    rule = build_algorithm(config).credit
    unscored = evidence.rewards.isnan().flatten()[evidence.rollout]
    other = torch.where(unscored, evidence.token_rewards + 3.0, evidence.token_rewards)
    changed = replace(evidence, token_rewards=other, step_rewards=torch.where(unscored, 3.0, evidence.step_rewards))
    given = rule(evidence).advantages
    assert torch.isfinite(given).all()
    assert (given[unscored] == 0).all()
    torch.testing.assert_close(rule(changed).advantages, given, rtol=1e-12, atol=1e-12)


COMPLETIONS = [(0,), (1, 0), (1, 1, 0), (1, 1, 1)]
"""Of a softmax policy with two tokens, of which 0 stops, and three places at most."""


def expected_gradient(config: dict[str, object], logits: torch.Tensor, earned: list[list[float]]) -> torch.Tensor:
    """Of -Σ A_t log π(y_t) / G over the 16 pairs; `earned` is what each token of each completion earns."""
    table = logits.log_softmax(1)
    logprobs = [torch.stack([table[t, token] for t, token in enumerate(tokens)]) for tokens in COMPLETIONS]
    rule, expected = build_algorithm(config).credit, torch.zeros((), dtype=torch.float64)
    for pair in itertools.product(range(len(COMPLETIONS)), repeat=2):
        paid = torch.tensor([value for i in pair for value in earned[i]], dtype=torch.float64)
        evidence = evidence_of([[0.0, 0.0]], [[len(COMPLETIONS[i]) for i in pair]], token_rewards=paid)
        tokens = torch.cat([logprobs[i] for i in pair])
        chance = math.prod(logprobs[i].sum().exp().item() for i in pair)
        expected = expected - chance * (rule(evidence).advantages * tokens).sum() / 2
    return torch.autograd.grad(expected, logits)[0]


@pytest.mark.parametrize(
    ("config", "factor"), [(FINE[0], 1.0), (FINE[2], 1.0), (FINE[3], 0.5), (FINE[6], 0.5)], ids=str
)
def test_reward_to_go_has_the_true_gradient_in_expectation(config: dict[str, object], factor: float) -> None:
    logits = torch.tensor([[0.3, -0.4], [-0.2, 0.9], [0.6, 0.1]], dtype=torch.float64, requires_grad=True)
    earned = [[0.7], [0.2, -0.5], [0.2, 1.1, 0.4], [0.2, 1.1, -0.3]]
    table = logits.log_softmax(1)
    chances = torch.stack([sum(table[t, token] for t, token in enumerate(tokens)) for tokens in COMPLETIONS]).exp()
    totals = torch.tensor([sum(each) for each in earned], dtype=torch.float64)
    (true,) = torch.autograd.grad(-(chances @ totals), logits)
    # With its own return in the mean of two, a token's advantage is half of what it is without.
    torch.testing.assert_close(expected_gradient(config, logits, earned), factor * true, rtol=1e-12, atol=1e-14)
