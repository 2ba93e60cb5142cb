"""Loss terms: the loss of an update is Σ_t w_t Σ_k c_k L_k(t), a sum of named terms, each of which says what it needs.

Whoever computes the update reads `needs` and hands over a `TokenView` that has it; it asks nothing else of an
algorithm.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Literal

from jaxtyping import Bool, Float, Int64
from torch import Tensor

from posttrain.algorithms import kl
from posttrain.algorithms.losses import ClipRange, RatioLevel, clipped_tokens, log_ratio
from posttrain.batch import TokenColumns
from posttrain.errors import UserError

RatioTo = Literal["behaviour", "reference"]


class Need(StrEnum):
    """What a term reads beside log π of the sampled tokens, their advantages and log μ."""

    REFERENCE_LOGPROBS = "reference_logprobs"
    """The reference's log-probs of the sampled tokens."""
    FULL_KL = "full_kl"
    """KL(π‖ref) of whole next-token distributions: a pass of policy and reference over the output layer."""
    ENTROPY = "entropy"
    """Entropy of the policy's next-token distributions: another pass over the output layer."""
    VALUES = "values"
    """What a value head expects now, beside what it expected and the returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """What the terms of a loss may read of the tokens of a micro-batch, all on one device and in one precision."""

    logprobs: Float[Tensor, " token"]
    """log π(token) in nats, with its gradient."""
    rollout: Int64[Tensor, " token"]
    """Which completion each token belongs to; all tokens of a completion are here."""
    columns: TokenColumns
    full_kl: Float[Tensor, " token"] | None = None
    """With its gradient; there if a term needs it, as the next two."""
    entropies: Float[Tensor, " token"] | None = None
    values: Float[Tensor, " token"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerm:
    """One summand of the loss of every token."""

    name: str
    """Metrics of the term have this name."""
    per_token: Callable[[TokenView], Float[Tensor, " token"]]
    """Lower is better; in the unit that its coefficient turns into that of the advantage."""
    coefficient: float = 1.0
    needs: frozenset[Need] = frozenset()
    vanishes_without_advantage: bool = False
    """Whether it has no gradient on completions whose advantages are 0, which are then left out of the update."""
    clipped: Callable[[TokenView], Bool[Tensor, " token"]] | None = None
    """Tokens on which clipping acts, for metrics; None where nothing is clipped."""
    reported: bool = True
    """Whether the mean over tokens of `per_token` is a metric of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KlTerm:
    """A pull towards the reference policy.  posttrain/algorithms/kl.py says what each estimator does in each place."""

    coefficient: float
    """Weight of the KL, in units of reward (or of advantage, in the loss) per nat."""
    estimator: Literal["k1", "k2", "k3", "full"] = "k3"
    """k1, k2, k3: from the token that was sampled.  full: the KL of the whole distribution there, in the loss only."""
    place: Literal["loss", "reward"] = "loss"
    """loss: a term per token with the token's weight.  reward: taken off each token's reward before advantages."""

    def __post_init__(self) -> None:
        if not self.coefficient > 0:
            raise UserError(f"coefficient = {self.coefficient}: must be above 0; for no KL term write `kl: null`.")
        if self.estimator == "full" and self.place == "reward":
            raise UserError(
                "estimator = full with place = reward: the full KL belongs to a position, not to the token that was "
                "sampled there, so a reward cannot carry it.  Use k1 in the reward, or full in the loss."
            )


def policy_term(
    surrogate: Callable[..., Tensor],
    *,
    clip: ClipRange,
    level: RatioLevel = "token",
    ratio_to: RatioTo = "behaviour",
) -> LossTerm:
    """A loss of posttrain/algorithms/losses.py, whose ratio is to the policy that sampled or to the reference."""

    def per_token(view: TokenView) -> Float[Tensor, " token"]:
        denominator = ratio_denominator(view, ratio_to)
        return surrogate(view.logprobs, denominator, view.columns.advantages, view.rollout, clip=clip, level=level)

    def clipped(view: TokenView) -> Bool[Tensor, " token"]:
        ratio = log_ratio(view.logprobs, ratio_denominator(view, ratio_to), view.rollout, level=level)
        return clipped_tokens(ratio, view.columns.advantages, clip=clip)

    return LossTerm(
        name="policy",
        per_token=per_token,
        needs=frozenset({Need.REFERENCE_LOGPROBS}) if ratio_to == "reference" else frozenset(),
        vanishes_without_advantage=True,
        clipped=clipped,
        reported=False,
    )


def ratio_denominator(view: TokenView, ratio_to: RatioTo) -> Float[Tensor, " token"]:
    """The log-probs that a ratio has in its denominator."""
    chosen = view.columns.reference_logprobs if ratio_to == "reference" else view.columns.behaviour_logprobs
    assert chosen is not None, "a need that was not met"
    return chosen


def kl_term(term: KlTerm) -> LossTerm:
    """The KL to the reference as a term of the loss, estimated from the sampled token or in full."""
    full = term.estimator == "full"
    return LossTerm(
        name="kl",
        per_token=given_full_kl if full else partial(estimated_kl, estimator=term.estimator),
        coefficient=term.coefficient,
        needs=frozenset({Need.FULL_KL if full else Need.REFERENCE_LOGPROBS}),
    )


def given_full_kl(view: TokenView) -> Float[Tensor, " token"]:
    """The KL of whole distributions, as it was computed with the log-probs."""
    assert view.full_kl is not None, "a need that was not met"
    return view.full_kl


def estimated_kl(view: TokenView, *, estimator: str) -> Float[Tensor, " token"]:
    """The estimate of the KL that the sampled token gives."""
    return kl.ESTIMATORS[estimator](view.logprobs, ratio_denominator(view, "reference"))


def needs_of(terms: Iterable[LossTerm]) -> frozenset[Need]:
    """What any of the terms needs."""
    return frozenset(need for term in terms for need in term.needs)


def total_loss(terms: Iterable[LossTerm], view: TokenView) -> Float[Tensor, " token"]:
    """Σ_k c_k L_k of every token."""
    losses = [
        term.per_token(view) if term.coefficient == 1 else term.coefficient * term.per_token(view) for term in terms
    ]
    total = losses[0]
    for more in losses[1:]:
        total = total + more
    return total
