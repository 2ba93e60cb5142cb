"""What expects the rewards of an actor-critic algorithm: the section `algorithm.critic` of a recipe."""

from dataclasses import dataclass
from typing import Literal

from posttrain.errors import UserError

LARGE = 100_000_000
"""Parameters from which on `auto` gives the critic a trunk of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticOptions:
    """A value head, what it reads, and how it learns."""

    trunk: Literal["auto", "shared", "own"] = "auto"
    """What the head reads: the hidden states of the policy (shared), or those of a second model (own), which costs its
    memory and a pass of its own and leaves the policy undisturbed.  auto: shared below 100 M parameters, else own."""
    path: str = ""
    """A critic to start from: the folder RUN/critic of a run, or, for a trunk of its own, of any model with the
    policy's tokens.  A reward model gives its body and its score, so that the critic at first expects at every token
    what the reward model would say of the text so far.  Empty is a new head, and as own trunk a copy of the policy as
    it is before training."""
    head: Literal["mlp", "linear"] = "mlp"
    """mlp: d → 4d → 1 with a ReLU between, as courses have it.  linear: d → 1."""
    through_trunk: bool = True
    """Whether the value loss trains a shared trunk too; false leaves the policy's weights to the policy's loss."""
    rate_scale: float = 10.0
    """The critic's learning rate as a multiple of the policy's."""
    max_grad_norm: float = 1.0
    """The critic's own gradient is scaled down to this Euclidean norm, apart from the policy's."""
    fit_steps: int = 10
    """Steps at the start, at most, in which the critic alone learns: until it explains some of the returns of rollouts
    that it has not learned from (explained variance above 0).  0 lets the policy move at once."""
    warm_start: str = ""
    """Folder of earlier rollouts (RUN/rollouts) that the critic learns from before the first step; their policy should
    be near this one.  Empty is none."""

    def __post_init__(self) -> None:
        if not self.rate_scale > 0:
            raise UserError(f"rate_scale = {self.rate_scale}: the critic would not learn; use a number above 0.")
        if not self.max_grad_norm > 0:
            raise UserError(f"max_grad_norm = {self.max_grad_norm}: leaves no gradient; use a number above 0.")
        if self.fit_steps < 0:
            raise UserError(f"fit_steps = {self.fit_steps}: is negative; use 0 or more.")
        if self.trunk == "own" and not self.through_trunk:
            raise UserError("through_trunk = false with trunk = own: such a trunk is the critic's own.  Leave it out.")

    def has_own_trunk(self, parameters: int) -> bool:
        """Whether the critic of a policy of so many parameters is a second model."""
        return self.trunk == "own" or (self.trunk == "auto" and parameters >= LARGE)


DEFAULT_CRITIC = CriticOptions()
"""A critic where no more is said."""
