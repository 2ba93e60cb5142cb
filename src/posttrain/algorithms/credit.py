"""Credit per token: from what is known of a step's rollouts to advantages, and to returns where there are values.

Tokens of all completions lie one after the other, group after group, as in a batch.  A rule that gives one advantage
to a whole completion is lifted by `per_rollout`; a rule that looks at tokens reads the token columns of the evidence
itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from posttrain.errors import RunError


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of the rollouts of a step before anything is learned from them."""

    rewards: Float64[Tensor, "prompt group"]
    """Weighted sums of the scores; NaN where nothing scored a rollout."""
    scores: Float64[Tensor, "function prompt group"]
    """Score of each reward function, clipped where the recipe says so; NaN where it does not apply."""
    weights: Float64[Tensor, " function"]
    """What each function's scores count in `rewards`; 0 for one that is only reported."""
    lengths: Int64[Tensor, "prompt group"]
    """Tokens of each completion, the stop token included; at least 1."""
    max_completion_tokens: int
    """The limit that completions were sampled under."""
    token_rewards: Float64[Tensor, " token"] | None = None
    """What single tokens earn beside the reward of their completion, such as a KL penalty."""
    values: Float64[Tensor, " token"] | None = None
    """What a value head expected before each token."""
    teacher_gaps: Float64[Tensor, " token"] | None = None
    """log π of a teacher less log μ, of each token: above 0 where the teacher finds it likelier."""

    @property
    def rollout(self) -> Int64[Tensor, " token"]:
        """Which completion, counted through all groups, each token belongs to."""
        lengths = self.lengths.flatten()
        return torch.arange(len(lengths)).repeat_interleave(lengths)

    @property
    def token_reward_totals(self) -> Float64[Tensor, "prompt group"]:
        """What the tokens of each completion earn together; 0 where there are no token rewards."""
        totals = torch.zeros(self.lengths.numel(), dtype=torch.float64)
        if self.token_rewards is not None:
            totals = totals.index_add(0, self.rollout, self.token_rewards)
        return totals.view(self.lengths.shape)


class Credit(NamedTuple):
    """What an algorithm makes of the evidence, token by token."""

    advantages: Float64[Tensor, " token"]
    """0 on every token of a completion that nothing scored."""
    returns: Float64[Tensor, " token"] | None = None
    """What a value head should have expected before each token; None for algorithms without values."""


CreditRule = Callable[[Evidence], Credit]
Shaping = Callable[..., Tensor]
"""(rewards, lengths, *, max_completion_tokens) -> rewards, all "prompt group", before the advantage."""


def per_rollout(advantage: Callable[[Tensor], Tensor], *, shaping: Shaping | None = None) -> CreditRule:
    """Lift a rule for whole completions, rewards to advantages, both "prompt group", to every one of their tokens.

        A_t = A(r + Σ_t r_t)        r: rewards, shaped first; r_t: token rewards

    Every token of a completion gets the same advantage.
    """

    def credit(evidence: Evidence) -> Credit:
        rewards = evidence.rewards
        if shaping is not None:
            rewards = shaping(rewards, evidence.lengths, max_completion_tokens=evidence.max_completion_tokens)
        if evidence.token_rewards is not None:
            rewards = rewards + evidence.token_reward_totals
        given = advantage(rewards)
        if not isinstance(given, Tensor) or given.shape != rewards.shape:
            shape = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise RunError(
                f"advantage rule {getattr(advantage, '__name__', advantage)}: returned {shape} for rewards"
                f" {list(rewards.shape)}; return a tensor of one advantage for each reward, [prompt group]."
            )
        return Credit(given.flatten().repeat_interleave(evidence.lengths.flatten()))

    return credit


def mean_of_rollouts(
    tokens: Float64[Tensor, " token"], lengths: Int64[Tensor, "prompt group"]
) -> Float64[Tensor, "prompt group"]:
    """One number for each completion from one for each of its tokens: their mean, and exactly x where all are x."""
    parts = tokens.split(lengths.flatten().tolist())
    means = [part[0] if bool((part == part[0]).all()) else part.mean() for part in parts]
    return torch.stack(means).view(lengths.shape)
