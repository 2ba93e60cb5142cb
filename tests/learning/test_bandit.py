"""Every algorithm learns a small task from rewards, and learns nothing when the rewards are dealt out at random.

The policy is a table of logits: twelve prompts, two positions, four tokens.  One completion in sixteen is right at
first.  Four epochs per step take the ratios out of most clip ranges.
"""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.table import build_algorithm
from posttrain.algorithms.terms import TokenView
from posttrain.batch import TokenColumns
from posttrain.models.classifiers.heads import ValueHead
from posttrain.training.credited_step import explained_variance
from tests.support.sequences import evidence_of, known
from tests.support.tiny import advantage, token_loss

NUM_PROMPTS, GROUP_SIZE, LENGTH, VOCABULARY = 12, 16, 2, 4
NUM_STEPS, EPOCHS_PER_STEP = 40, 4
TARGETS = torch.tensor([[0, 1], [2, 0], [3, 3], [1, 2]] * 3)

CONFIGS = [
    {"name": "reinforce"},
    {"name": "reinforce", "baseline": "batch_mean"},
    {"name": "rloo"},
    {"name": "grpo"},
    {"name": "grpo", "deviation": "none"},
    {"name": "grpo", "deviation": "sample", "token_weights": "mean_over_tokens"},
    {"name": "dr_grpo"},
    {"name": "dapo", "overlong": None},  # all completions are as long as the limit
    {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2},
    {"name": "gspo", "sequence_ratio": "product", "clip_low": 0.2, "clip_high": 0.2},
    {"name": "cispo"},
    {"name": "maxrl"},
]


def columns(
    algorithm: Algorithm, logits: torch.Tensor, tokens: torch.Tensor, rewards: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """log π, advantage, rollout and weight of each of the [prompt, group, length] tokens, one after the other."""
    logprobs = logits.log_softmax(-1)[:, None].expand(-1, GROUP_SIZE, -1, -1).gather(-1, tokens[..., None])
    count = NUM_PROMPTS * GROUP_SIZE
    rollout = torch.arange(count).repeat_interleave(LENGTH)
    scored = torch.ones(count, dtype=torch.bool)
    weights = algorithm.token_weights(torch.full((count,), LENGTH), scored, max_completion_tokens=LENGTH)
    advantages = advantage(algorithm, rewards).reshape(-1)
    return logprobs.reshape(-1), advantages[rollout], rollout, weights[rollout]


def chance_of_the_target(config: dict[str, object], seed: int, shuffle_rewards: bool = False) -> float:
    algorithm = build_algorithm(config)
    rng = torch.Generator().manual_seed(seed)
    logits = torch.zeros(NUM_PROMPTS, LENGTH, VOCABULARY, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(NUM_STEPS):
        chances = logits.detach().softmax(-1)[:, None].expand(-1, GROUP_SIZE, -1, -1).reshape(-1, VOCABULARY)
        tokens = chances.multinomial(1, generator=rng).reshape(NUM_PROMPTS, GROUP_SIZE, LENGTH)
        rewards = (tokens == TARGETS[:, None]).double().mean(-1)
        if shuffle_rewards:
            rewards = rewards.reshape(-1)[torch.randperm(rewards.numel(), generator=rng)].reshape(rewards.shape)
        behaviour = None
        for _ in range(EPOCHS_PER_STEP):
            logprobs, advantages, rollout, weights = columns(algorithm, logits, tokens, rewards)
            behaviour = logprobs.detach() if behaviour is None else behaviour
            loss = (weights * token_loss(algorithm, logprobs, behaviour, advantages, rollout)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return logits.detach().softmax(-1).gather(-1, TARGETS[..., None]).mean().item()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_learns_the_target_and_learns_nothing_from_shuffled_rewards(config) -> None:
    assert chance_of_the_target(config, seed=0) > 0.95
    assert chance_of_the_target(config, seed=0, shuffle_rewards=True) < 0.5


CONTEXTS, ARMS, PULLS, STEPS, EPOCHS = 6, 4, 1024, 60, 2
CHANCES = torch.tensor(
    [
        *[[0.9, 0.1, 0.1, 0.1], [0.1, 0.2, 0.1, 0.1], [0.5, 0.5, 0.9, 0.5]],
        *[[0, 0, 0, 1], [0.3, 0.8, 0.3, 0.3], [0.6, 0, 0, 0]],
    ]
).double()
STATES = CONTEXTS + CONTEXTS * ARMS
"""Before the arm each context; before the coin each pair of context and arm."""
WEIGHT = torch.full((2 * PULLS,), 1 / (2 * PULLS), dtype=torch.float64)


def trained(*, shuffled: bool = False) -> tuple[Tensor, ValueHead, float]:
    """The policy's logits for each context, the head, and what it explained of the last step's returns."""
    algorithm: Algorithm = build_algorithm({"name": "ppo"})
    drawn = torch.Generator().manual_seed(0)
    logits = torch.zeros(CONTEXTS, ARMS, dtype=torch.float64, requires_grad=True)
    head = ValueHead(STATES, "linear", seed=0, dtype=torch.float64)
    optimizer = torch.optim.Adam([{"params": [logits], "lr": 0.03}, {"params": head.parameters(), "lr": 0.06}])
    explained = 0.0
    for _ in range(STEPS):
        context = torch.randint(CONTEXTS, (PULLS,), generator=drawn)
        arm = logits.detach().softmax(-1)[context].multinomial(1, generator=drawn)[:, 0]
        rewards = (torch.rand(PULLS, generator=drawn, dtype=torch.float64) < CHANCES[context, arm]).double()
        if shuffled:
            rewards = rewards[torch.randperm(PULLS, generator=drawn)]
        state = torch.stack([context, CONTEXTS + context * ARMS + arm], dim=1).flatten()
        hidden = one_hot(state, STATES).double()
        before = head(hidden).detach()
        columns = known(values=before, final_values=torch.zeros(PULLS, 1).double())
        lengths = torch.full((PULLS, 1), 2)
        credit = algorithm.credit(evidence_of(rewards[:, None], lengths, limit=2, known=columns))
        explained = explained_variance(credit.returns, before) or 0.0
        mu = logits.detach().log_softmax(-1)[context, arm]
        columns = TokenColumns(
            advantages=credit.advantages,
            weights=WEIGHT,
            behaviour_logprobs=torch.stack([mu, torch.zeros_like(mu)], dim=1).flatten(),
            known=known(values=before, returns=credit.returns),
        )
        for _ in range(EPOCHS):
            own = logits.log_softmax(-1)[context, arm]
            logprobs = torch.stack([own, torch.zeros_like(own)], dim=1).flatten()
            rollout = torch.arange(PULLS).repeat_interleave(2)
            view = TokenView(logprobs=logprobs, rollout=rollout, columns=columns, known=known(values=head(hidden)))
            optimizer.zero_grad()
            (WEIGHT * algorithm.loss(view)).sum().backward()
            optimizer.step()
    return logits.detach(), head, explained


def test_values_become_what_the_policy_earns_and_the_policy_takes_what_pays_best() -> None:
    logits, head, explained = trained()
    policy = logits.softmax(-1)
    with torch.no_grad():
        values = head(torch.eye(STATES, dtype=torch.float64))
    earned = (policy * CHANCES).sum(-1)
    assert (values[:CONTEXTS] - earned).abs().max() < 0.1
    best = CHANCES.argmax(-1)
    after_best = values[CONTEXTS:].view(CONTEXTS, ARMS)[torch.arange(CONTEXTS), best]
    assert (after_best - CHANCES.amax(-1)).abs().max() < 0.1
    assert (earned / CHANCES.amax(-1)).mean() > 0.9
    assert explained > 0.15  # chances leave most of the variance to luck


def test_rewards_dealt_out_at_random_have_one_value_and_teach_no_arm() -> None:
    logits, head, explained = trained(shuffled=True)
    earned = (logits.softmax(-1) * CHANCES).sum(-1)
    assert (earned / CHANCES.amax(-1)).mean() < 0.6
    with torch.no_grad():
        values = head(torch.eye(STATES, dtype=torch.float64))[:CONTEXTS]
    assert values.max() - values.min() < 0.2
    assert explained < 0.1
