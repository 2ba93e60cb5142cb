"""A KL coefficient that moves from step to step until the KL to the reference is what is wanted."""

import math
from dataclasses import dataclass
from typing import Literal

from posttrain.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveKl:
    """Moves the coefficient of a KL in the reward until the KL is what is wanted."""

    target: float
    """The KL to the reference that is wanted, in nats."""
    per: Literal["sequence", "token"] = "sequence"
    """What the target is of.  sequence: a whole completion (Ziegler's 6 nats).  token: the mean token; the same number
    then allows as many times more as completions have tokens."""
    horizon: float = 10_000.0
    """Completions after which a KL that is 20 % too high has multiplied the coefficient by about e^.2."""

    def __post_init__(self) -> None:
        if not 0 < self.target < math.inf:
            raise UserError(f"target = {self.target}: a KL in nats; use a finite number above 0.")
        if not self.horizon > 0:
            raise UserError(f"horizon = {self.horizon}: a number of completions; use more than 0.")


def next_coefficient(coefficient: float, kl: float, *, num_rollouts: int, options: AdaptiveKl) -> float:
    """The coefficient for the next step, given the KL of this one.

        β' = β (1 + clip(KL / target - 1, -.2, .2) · n / horizon)        n: completions of the step

    Ziegler et al. 2019, "Fine-tuning language models from human preferences", arXiv:1909.08593, §2.2.  Never below 0.
    """
    error = min(max(kl / options.target - 1, -0.2), 0.2)
    return coefficient * max(0.0, 1 + error * num_rollouts / options.horizon)
