"""What expects the rewards of an actor-critic algorithm: the section `algorithm.critic` of a recipe."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt

from posttrain.options.bounds import Bounded, NonNegativeInt
from posttrain.options.rules import Unused

LARGE = 100_000_000
"""Parameters from which `auto` gives the critic a separate trunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticOptions(Bounded):
    """A value head, what it reads, and how it learns."""

    trunk: Literal["auto", "shared", "own"] = "auto"
    """What the head reads: the policy's hidden states (shared), or those of a second model (own), which costs
    memory and another pass and leaves the policy undisturbed.  auto: shared below 100 M parameters, else own."""
    path: str = ""
    """A critic to start from: the folder RUN/critic of a run, or, for `trunk: own`, of any model with the policy's
    tokens.  A reward model gives its body and its score: at first the critic expects at every token what the reward
    model says of the text so far.  Empty is a new head and, for `trunk: own`, a copy of the untrained policy."""
    head: Literal["mlp", "linear"] = "mlp"
    """mlp: d → 4d → 1 with a ReLU between, as courses have it.  linear: d → 1."""
    through_trunk: bool = True
    """Whether the value loss trains a shared trunk too; false leaves the policy's weights to the policy's loss."""
    rate_scale: Annotated[float, Gt(0)] = 10.0
    """The critic's learning rate as a multiple of the policy's."""
    max_grad_norm: Annotated[float, Gt(0)] = 1.0
    """The critic's gradient is scaled down to this Euclidean norm, apart from the policy's."""
    fit_steps: NonNegativeInt = 10
    """Most steps at the start in which only the critic learns: until it explains some of the returns of rollouts that
    it has not learned from (explained variance above 0).  With 0 the policy learns at once."""
    warm_start: str = ""
    """Folder of earlier rollouts (RUN/rollouts), from a similar policy, that the critic learns before the first step;
    empty is none."""

    rules = (Unused("through_trunk", {"trunk": ("auto", "shared")}),)

    def has_own_trunk(self, parameters: int) -> bool:
        return self.trunk == "own" or (self.trunk == "auto" and parameters >= LARGE)


DEFAULT_CRITIC = CriticOptions()
