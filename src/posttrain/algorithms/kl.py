"""How far the policy π has moved from the reference: four estimators of KL(π‖ref), in nats per token.

With x = log π(y) - log ref(y) for a token y sampled from π, given its prefix:

    estimator      value, in expectation       gradient when in the loss      gradient when in the reward
    k1 = x         KL(π‖ref)                   0                              ∇KL(π‖ref)
    k2 = x²/2      KL(π‖ref) + O(x³)           ∇KL(π‖ref)                     ∇E[k2] - ∇KL(π‖ref) = O(x²)
    k3 = e⁻ˣ-1+x   KL(π‖ref)                   ∇KL(ref‖π)                     ∇KL(π‖ref) - ∇KL(ref‖π) = O(x²)
    full           KL(π‖ref), no variance      ∇KL(π‖ref)                     not offered; models/logprobs.py has it

"In the loss" differentiates the formula at the sampled token; "in the reward" multiplies its value by ∇log π(y).
So k1 belongs in the reward (in the loss it is noise around zero), k2 and full in the loss.  k3 in the loss, GRPO's
choice, pulls along the *other* direction of the divergence, the same to first order near the reference.  k2 and k3 in
the reward have almost no effect there.  tests/laws/test_kl.py enumerates every entry of the table.

Two limits hold for all of them in the loss.  The gradient is that of the divergence at each visited prefix: how
earlier tokens change which prefixes are visited is left out (k1 in the reward includes it).  And samples count as
drawn from π: on the later updates of a step, when they come from an older μ, nothing corrects for that.

Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html), names k1 to k3 and gives their values.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Gt
from jaxtyping import Float, Int64
from torch import Tensor

from posttrain.algorithms.losses import log_ratio
from posttrain.options.bounds import Bounded, PositiveFloat


def k1(logprobs: Float[Tensor, " token"], reference_logprobs: Float[Tensor, " token"]) -> Float[Tensor, " token"]:
    """The log-ratio x itself: unbiased, of either sign.  Summed over a completion it is the log-ratio of the whole."""
    return logprobs - reference_logprobs


def k2(logprobs: Float[Tensor, " token"], reference_logprobs: Float[Tensor, " token"]) -> Float[Tensor, " token"]:
    """Half the squared log-ratio, x²/2: never negative, biased as a value, right as a gradient."""
    return (logprobs - reference_logprobs).square() / 2


def k3(logprobs: Float[Tensor, " token"], reference_logprobs: Float[Tensor, " token"]) -> Float[Tensor, " token"]:
    """e⁻ˣ - 1 + x: unbiased and never negative, since log z ≤ z - 1.  Shao et al. 2024 (GRPO), arXiv:2402.03300.

    Grows like ref/π: one token that the policy has made 10⁻⁹ as likely as the reference did outweighs all others.
    """
    toward_reference = reference_logprobs - logprobs
    return torch.expm1(toward_reference) - toward_reference


def of_completions(
    logprobs: Float[Tensor, " token"],
    reference_logprobs: Float[Tensor, " token"],
    rollout: Int64[Tensor, " token"],
    *,
    estimator: str,
) -> Float[Tensor, " token"]:
    """The estimate that a whole completion gives of KL(π‖ref) between completions, in nats, at each of its tokens.

        k(x),   x = Σ_t (log π(y_t) - log ref(y_t))

    As values k1 and k3 are unbiased for it, while the sum of the tokens' k3 is so in another way, prefix by prefix.
    The slope of k3 is (1 - e⁻ˣ) Σ_t ∇log π(y_t): all tokens of a completion are pulled alike, by the whole it makes.
    k3 grows like ref(y)/π(y), over hundreds of tokens beyond any number.
    """
    whole = log_ratio(logprobs, reference_logprobs, rollout, level="sequence_product")
    return ESTIMATORS[estimator](whole, torch.zeros_like(whole))


ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""The estimators that need no more than the log-prob of the sampled token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveKl(Bounded):
    """Moves the coefficient of a KL in the reward from step to step until the KL reaches a target."""

    target: PositiveFloat
    """The wanted KL to the reference, in nats."""
    per: Literal["sequence", "token"] = "sequence"
    """sequence: the target is of a whole completion (Ziegler's 6 nats).  token: of the mean token; the same number then
    allows as many times more as completions have tokens."""
    horizon: Annotated[float, Gt(0)] = 10_000.0
    """Completions after which a KL that is 20 % too high has multiplied the coefficient by about e^.2."""


def next_coefficient(coefficient: float, kl: float, *, num_rollouts: int, options: AdaptiveKl) -> float:
    """The coefficient for the next step, given the KL of this one.

        β' = β (1 + clip(KL / target - 1, -.2, .2) · n / horizon)        n: completions of the step

    Ziegler et al. 2019, "Fine-tuning language models from human preferences", arXiv:1909.08593, §2.2.  Never below 0.
    """
    error = min(max(kl / options.target - 1, -0.2), 0.2)
    return coefficient * max(0.0, 1 + error * num_rollouts / options.horizon)
