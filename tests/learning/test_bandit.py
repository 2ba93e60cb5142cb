"""Every algorithm learns a small task from rewards, and learns nothing when the rewards are dealt out at random.

The policy is a table of logits: twelve prompts, two positions, four tokens.  One completion in sixteen is right at
first.  Four epochs per step take the ratios out of most clip ranges.
"""

import pytest
import torch

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.table import build_algorithm
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
