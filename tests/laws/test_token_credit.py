"""Credit per token: what it comes to where only outcomes pay, what it preserves, and that it is no bias."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.algorithms.credit import Evidence, returns_to_go
from posttrain.algorithms.table import build_algorithm

FINE = [
    {"name": name, "credit": "reward_to_go", **options}
    for name, options in [
        ("reinforce", {}),
        ("reinforce", {"baseline": "batch_mean"}),
        ("rloo", {}),
        ("dr_grpo", {}),
        ("grpo", {}),
        ("grpo", {"deviation": "sample", "deviation_epsilon": 1e-4}),
        ("grpo", {"deviation": "none"}),
    ]
]
STEPS = {"name": "grpo", "credit": "steps"}


def coarse(config: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in config.items() if name != "credit"}


def some_evidence(seed: int, num_prompts: int, group_size: int) -> Evidence:
    """Random rewards, some missing, and lengths; no token rewards."""
    rng = torch.Generator().manual_seed(seed)
    rewards = torch.randint(0, 4, (num_prompts, group_size), generator=rng).double() / 3
    rewards = torch.where(torch.rand(rewards.shape, generator=rng) < 0.15, torch.nan, rewards)
    return Evidence(
        rewards=rewards,
        scores=rewards[None],
        weights=torch.ones(1, dtype=torch.float64),
        lengths=torch.randint(1, 9, rewards.shape, generator=rng),
        max_completion_tokens=9,
    )


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
def test_without_token_rewards_every_level_of_credit_is_that_of_whole_completions_to_the_bit(
    config: dict[str, object], seed: int, shape: tuple[int, int]
) -> None:
    evidence = some_evidence(seed, *shape)
    fine, plain = (build_algorithm(each).credit(evidence) for each in (config, coarse(config)))
    assert torch.equal(fine.advantages, plain.advantages)


@pytest.mark.parametrize("config", FINE, ids=str)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**31), shape=SHAPES)
def test_a_reward_that_comes_with_the_last_token_is_the_completions_reward(
    config: dict[str, object], seed: int, shape: tuple[int, int]
) -> None:
    evidence = some_evidence(seed, *shape)
    last = evidence.lengths.flatten().cumsum(0) - 1
    at_last = torch.zeros(int(evidence.lengths.sum()), dtype=torch.float64)
    at_last[last] = evidence.rewards.nan_to_num(nan=0.0).flatten()
    moved = replace(
        evidence,
        rewards=torch.where(evidence.rewards.isnan(), torch.nan, 0.0).double(),
        token_rewards=at_last,
        step_rewards=None,
    )
    plain = build_algorithm(coarse(config)).credit(evidence).advantages
    torch.testing.assert_close(build_algorithm(config).credit(moved).advantages, plain, rtol=1e-12, atol=1e-12)


@settings(max_examples=30)
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
def test_a_group_without_information_is_exactly_0(
    config: dict[str, object], seed: int, group_size: int, step: float
) -> None:
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
def test_an_unscored_completion_gets_nothing_and_changes_nothing_for_others(
    config: dict[str, object], seed: int, shape: tuple[int, int]
) -> None:
    evidence = with_steps(some_evidence(seed, *shape), seed)
    rule = build_algorithm(config).credit
    unscored = evidence.rewards.isnan().flatten()[evidence.rollout]
    other = torch.where(unscored, evidence.token_rewards + 3.0, evidence.token_rewards)
    changed = replace(evidence, token_rewards=other, step_rewards=torch.where(unscored, 3.0, evidence.step_rewards))
    given = rule(evidence).advantages
    assert torch.isfinite(given).all()
    assert (given[unscored] == 0).all()
    torch.testing.assert_close(rule(changed).advantages, given, rtol=1e-12, atol=1e-12)


# In expectation over every pair of completions of a softmax policy: two tokens, 0 stops, three places at most.

LIMIT = 3
COMPLETIONS = [(0,), (1, 0), (1, 1, 0), (1, 1, 1)]


def expected_gradient(config: dict[str, object], logits: torch.Tensor, earned: list[list[float]]) -> torch.Tensor:
    """Of -Σ A_t log π(y_t) / G over the 16 pairs; `earned` is what each token of each completion earns."""
    table = logits.log_softmax(1)
    logprobs = [torch.stack([table[t, token] for t, token in enumerate(tokens)]) for tokens in COMPLETIONS]
    rule, expected = build_algorithm(config).credit, torch.zeros((), dtype=torch.float64)
    for pair in itertools.product(range(len(COMPLETIONS)), repeat=2):
        rewards = torch.zeros(1, 2, dtype=torch.float64)
        evidence = Evidence(
            rewards=rewards,
            scores=rewards[None],
            weights=torch.ones(1, dtype=torch.float64),
            lengths=torch.tensor([[len(COMPLETIONS[i]) for i in pair]]),
            max_completion_tokens=LIMIT,
            token_rewards=torch.tensor([value for i in pair for value in earned[i]], dtype=torch.float64),
        )
        tokens = torch.cat([logprobs[i] for i in pair])
        chance = math.prod(logprobs[i].sum().exp().item() for i in pair)
        expected = expected - chance * (rule(evidence).advantages * tokens).sum() / 2
    return torch.autograd.grad(expected, logits)[0]


@pytest.mark.parametrize(
    ("config", "factor"),
    [(FINE[0], 1.0), (FINE[2], 1.0), (FINE[3], 0.5), (FINE[6], 0.5)],
    ids=str,
)
def test_reward_to_go_has_the_true_gradient_in_expectation(config: dict[str, object], factor: float) -> None:
    logits = torch.tensor([[0.3, -0.4], [-0.2, 0.9], [0.6, 0.1]], dtype=torch.float64, requires_grad=True)
    earned = [[0.7], [0.2, -0.5], [0.2, 1.1, 0.4], [0.2, 1.1, -0.3]]
    table = logits.log_softmax(1)
    chances = torch.stack([sum(table[t, token] for t, token in enumerate(tokens)) for tokens in COMPLETIONS]).exp()
    true = torch.autograd.grad(-(chances @ torch.tensor([sum(each) for each in earned], dtype=torch.float64)), logits)[
        0
    ]
    # With its own return in the mean of two, a token's advantage is half of what it is without.
    torch.testing.assert_close(expected_gradient(config, logits, earned), factor * true, rtol=1e-12, atol=1e-14)
