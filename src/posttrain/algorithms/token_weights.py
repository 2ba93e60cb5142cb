"""How tokens add up to the loss of an update: one weight for every token of a rollout.

The weights are computed once per update, on all its rollouts, before anything is dropped or split into
micro-batches; neither can then change the gradient.  A rollout that nothing scored weighs 0 and is not counted.  One
whose tokens are masked has length 0 here: it counts as a rollout, and none of its tokens does.
docs/decisions/002-token-weights.md compares the rules.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

Weighting = Literal["mean_over_tokens", "mean_over_sequences", "sum_over_sequence", "constant_length"]


def mean_over_tokens(
    lengths: Int64[Tensor, " rollout"], scored: Bool[Tensor, " rollout"], *, max_completion_tokens: int
) -> Float64[Tensor, " rollout"]:
    """Every token of the update counts alike; the weights of all tokens sum to 1.

    w_i = 1 / Σ_k |y_k|        Yu et al. 2025 (DAPO), arXiv:2503.14476
    """
    return _shares(scored, torch.where(scored, lengths, 0).sum())


def mean_over_sequences(
    lengths: Int64[Tensor, " rollout"], scored: Bool[Tensor, " rollout"], *, max_completion_tokens: int
) -> Float64[Tensor, " rollout"]:
    """Every completion counts alike and shares its weight among its tokens; the weights of all tokens sum to 1.

        w_i = 1 / (R |y_i|)        Shao et al. 2024 (GRPO), arXiv:2402.03300

    A token of a short completion weighs more than one of a long completion.
    """
    return _shares(scored, scored.sum() * lengths)


def sum_over_sequence(
    lengths: Int64[Tensor, " rollout"], scored: Bool[Tensor, " rollout"], *, max_completion_tokens: int
) -> Float64[Tensor, " rollout"]:
    """The policy gradient of the expected reward: log π(y) is a sum over tokens, averaged over completions.

        w_i = 1 / R        Williams 1992; Ahmadian et al. 2024 (RLOO), arXiv:2402.14740

    The weights of all tokens sum to the mean length, so the gradient grows with the completions.
    """
    return _shares(scored, scored.sum())


def constant_length(
    lengths: Int64[Tensor, " rollout"], scored: Bool[Tensor, " rollout"], *, max_completion_tokens: int
) -> Float64[Tensor, " rollout"]:
    """`sum_over_sequence` in units of the length limit: no preference for any length, at a gradient of usual size.

    w_i = 1 / (R · max_completion_tokens)        Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783
    """
    return _shares(scored, scored.sum() * max_completion_tokens)


def _shares(scored: Bool[Tensor, " rollout"], divisor: Tensor) -> Float64[Tensor, " rollout"]:
    """1 / divisor for the scored rollouts, 0 for the others and where the divisor is 0, since nothing is counted."""
    return torch.where(scored & (divisor > 0), 1 / divisor.double(), 0.0)


WEIGHTINGS: Mapping[Weighting, Callable[..., Tensor]] = {
    "mean_over_tokens": mean_over_tokens,
    "mean_over_sequences": mean_over_sequences,
    "sum_over_sequence": sum_over_sequence,
    "constant_length": constant_length,
}
"""The rules by the names that recipes give them."""
