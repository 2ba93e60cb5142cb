"""Columns that an algorithm must declare before it can read them, and what a function sees that did not.

A loss term declares `needs`, a credit rule `Algorithm.credit_needs`.  Reading any other column is an error that names
the need, whether or not the column was computed for somebody else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeVar

from jaxtyping import Float
from torch import Tensor

from posttrain.errors import RunError


class Need(StrEnum):
    """A column that is computed on demand.  log π of the sampled tokens, advantages and log μ are always there."""

    REFERENCE_LOGPROBS = "reference_logprobs"
    """The reference's log-probs of the sampled tokens."""
    FULL_KL = "full_kl"
    """KL(π‖ref) of whole next-token distributions: a pass of policy and reference over the output layer."""
    ENTROPY = "entropy"
    """Entropy of the policy's next-token distributions: another pass over the output layer."""
    VALUES = "values"
    """Values of a value head now and at collection, and the returns.  Where the head has a separate trunk, log π
    comes without its gradient, for the two trunks are differentiated one after the other."""
    PROXIMAL_LOGPROBS = "proximal_logprobs"
    """Log-probs of the sampled tokens under the policy that the step starts from: a pass of its own where the step has
    several updates."""
    TEACHER_LOGPROBS = "teacher_logprobs"
    """Log-probs of the sampled tokens under a teacher, which may have seen another prompt."""
    TEACHER_KL = "teacher_kl"
    """KL(π‖teacher) of whole next-token distributions: a pass of policy and teacher over the output layer."""


CREDIT_NEEDS = frozenset(
    {Need.REFERENCE_LOGPROBS, Need.PROXIMAL_LOGPROBS, Need.TEACHER_LOGPROBS, Need.VALUES, Need.ENTROPY}
)
"""What can be computed before a step has batches, for its credit rule."""
KEPT_FOR_TERMS = CREDIT_NEEDS - {Need.ENTROPY}
"""What a loss term reads as it was before the step's updates; the rest is computed anew in each of them."""
NEED_OF = {
    **{need.value: need for need in Need if need is not Need.ENTROPY},
    "entropies": Need.ENTROPY,
    "final_values": Need.VALUES,
}
"""The need that a column belongs to, where it belongs to one."""


class MissingColumn(RunError):
    """A function reads a column that it does not see."""

    def __init__(self, name: str) -> None:
        super().__init__(f"column `{name}` is missing.")
        self.name = name

    def remedy(self, where: str) -> str:
        """What to do, where needs are declared `where`."""
        need = NEED_OF.get(self.name)
        if need is not None:
            return f"Add Need.{need.name} to {where}."
        return f"The credit rule must return `{self.name}` with its advantages."


Limited = TypeVar("Limited", bound="DeclaredColumns")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredColumns:
    """Columns by name; reading one that is not there raises `MissingColumn`."""

    known: Mapping[str, Tensor] = field(default_factory=dict)

    def column(self, name: str) -> Tensor:
        """The column of this name."""
        if name not in self.known:
            raise MissingColumn(name)
        return self.known[name]

    def limited_to(self: Limited, needs: frozenset[Need]) -> Limited:
        """The same without the columns of other needs."""
        known = {name: column for name, column in self.known.items() if NEED_OF.get(name) in (None, *needs)}
        return replace(self, known=known)

    @property
    def values(self) -> Float[Tensor, " token"]:
        """What a value head expects before each token."""
        return self.column("values")

    @property
    def entropies(self) -> Float[Tensor, " token"]:
        """Entropy of the policy's distribution of each token, in nats."""
        return self.column("entropies")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepColumns(DeclaredColumns):
    """Columns as they were before the updates of a step, when its rollouts had been collected."""

    @property
    def reference_logprobs(self) -> Float[Tensor, " token"]:
        """log-probs under the reference, in nats."""
        return self.column("reference_logprobs")

    @property
    def proximal_logprobs(self) -> Float[Tensor, " token"]:
        """log π of the policy that the step starts from, in nats."""
        return self.column("proximal_logprobs")

    @property
    def teacher_logprobs(self) -> Float[Tensor, " token"]:
        """log-probs under the teacher, in nats."""
        return self.column("teacher_logprobs")
