"""Loss terms: the loss of an update is Σ_t w_t Σ_k c_k L_k(t), a sum of named terms, each of which says what it needs.

Whoever computes the update reads `needs` and hands over a `TokenView` that has it; it asks nothing else of an
algorithm.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Literal

from jaxtyping import Bool, Float, Int64
from torch import Tensor

from posttrain.algorithms import kl
from posttrain.algorithms.checks import require_losses, require_needs
from posttrain.algorithms.losses import ClipRange, RatioLevel, clipped_tokens, log_ratio
from posttrain.batch import TokenColumns
from posttrain.errors import RunError, UserError
from posttrain.needs import DeclaredColumns, MissingColumn, Need

RatioTo = Literal["behaviour", "reference"]
KlLevel = Literal["token", "completion"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView(DeclaredColumns):
    """What the terms of a loss may read of the sampled tokens of a micro-batch, on one device and in one precision.

    `known` has what was computed in this update, with its gradient: `full_kl`, `entropies`, `values`, `teacher_kl`.
    """

    logprobs: Float[Tensor, " token"]
    """log π(token) in nats, with its gradient."""
    rollout: Int64[Tensor, " token"]
    """Which completion each token belongs to; all sampled tokens of a completion are here."""
    columns: TokenColumns

    @property
    def full_kl(self) -> Float[Tensor, " token"]:
        """KL(π‖ref) of each token's distribution, in nats."""
        return self.column("full_kl")

    @property
    def teacher_kl(self) -> Float[Tensor, " token"]:
        """KL(π‖teacher) of each token's distribution, in nats."""
        return self.column("teacher_kl")

    def seen_with(self, needs: frozenset[Need]) -> "TokenView":
        """As a term with these needs sees it: what was computed for others may lack its gradient."""
        return replace(self.limited_to(needs), columns=self.columns.limited_to(needs))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerm:
    """One summand of the loss of every token."""

    name: str
    """The mean over tokens of `per_token` is the metric `loss/<name>`."""
    per_token: Callable[[TokenView], Float[Tensor, " token"]]
    """Lower is better; in the unit that its coefficient turns into that of the advantage.  It reads one completion at a
    time, so that the split into micro-batches changes nothing: see `token_locality`."""
    coefficient: float = 1.0
    needs: frozenset[Need] = frozenset()
    """What `per_token` reads; names of `Need` do too."""
    vanishes_without_advantage: bool = False
    """Whether it has no gradient on completions whose advantages are 0, which are then left out of the update."""
    clipped: Callable[[TokenView], Bool[Tensor, " token"]] | None = None
    """Tokens on which clipping acts, for metrics; None where nothing is clipped."""
    clips_completions: bool = False
    """Whether the ratio that is clipped is one of the whole completion: `clip_ratio/*` then counts completions."""
    measures: Callable[[TokenView], Mapping[str, Float[Tensor, " token"]]] | None = None
    """Further numbers of every token, of what it needs, by the name of the metric that is their mean."""
    reported: bool = True
    """Whether the mean is a metric at all."""
    metric: Literal["kl", "value/loss"] | None = None
    """A metric of the package's own that the mean is in place of `loss/<name>`."""

    def __post_init__(self) -> None:
        if self.metric not in (None, "kl", "value/loss"):
            raise UserError(
                f"loss term {self.name}: metric = {self.metric!r}: use None, for loss/{self.name}, or"
                " 'kl' or 'value/loss'."
            )
        needs = require_needs(self.needs, frozenset(Need), f"loss term {self.name}: needs")
        object.__setattr__(self, "needs", needs)

    @property
    def metric_name(self) -> str:
        """What its mean is called in metrics.jsonl."""
        return self.metric or f"loss/{self.name}"

    def losses(self, view: TokenView, *, owner: str) -> Float[Tensor, " token"]:
        """Its values, of what it says that it needs.  Raises RunError, of this owner, where they are none."""
        try:
            losses = self.per_token(view.seen_with(self.needs))
        except MissingColumn as missing:
            remedy = missing.remedy("its `needs`")
            raise RunError(f"{owner}: its loss term {self.name} cannot read `{missing.name}`.  {remedy}") from missing
        return require_losses(losses, view.logprobs, self.name, owner=owner)


@dataclass(frozen=True, slots=True, kw_only=True)
class KlTerm:
    """A pull towards the reference policy.  posttrain/algorithms/kl.py says what each estimator does in each place."""

    coefficient: float
    """Weight of the KL, in units of reward (or of advantage, in the loss) per nat."""
    estimator: Literal["k1", "k2", "k3", "full"] = "k3"
    """k1, k2, k3: from the token that was sampled.  full: the KL of the whole distribution there, in the loss only."""
    place: Literal["loss", "reward"] = "loss"
    """loss: a term per token with the token's weight.  reward: taken off each token's reward before advantages."""
    importance: RatioLevel | None = None
    """In the loss: multiply the estimate by the ratio π/μ of its token (token) or completion (sequence_mean,
    sequence_product), with the ratio's own gradient.  Null multiplies by nothing."""
    level: KlLevel = "token"
    """token: an estimate for each token.  completion: one of the summed log-ratio, which all tokens of a completion
    share; in the loss only, and of the whole completion's weight under `mean_over_sequences` (grpo, gspo)."""

    def __post_init__(self) -> None:
        if not self.coefficient > 0:
            raise UserError(f"coefficient = {self.coefficient}: must be above 0; for no KL term write `kl: null`.")
        if self.estimator == "full" and self.place == "reward":
            raise UserError(
                "estimator = full with place = reward: the full KL belongs to a position, not to the token that was "
                "sampled there, so a reward cannot carry it.  Use k1 in the reward, or full in the loss."
            )
        if self.importance is not None and (self.place == "reward" or self.estimator == "full"):
            why = (
                "a reward has no ratio yet" if self.place == "reward" else "the full KL is not that of a sampled token"
            )
            raise UserError(f"importance = {self.importance}: {why}.  Leave it out, or use k1, k2 or k3 in the loss.")
        if self.level == "completion" and self.place == "reward":
            raise UserError(
                "level = completion with place = reward: rewards of tokens are summed over a completion anyway, and"
                " with estimator = k1 that sum is the log-ratio of the whole.  Leave level out, or use place = loss."
            )
        if self.level == "completion" and self.estimator == "full":
            raise UserError(
                "level = completion with estimator = full: the full KL belongs to a position, and no sum of log-ratios"
                " gives it.  Use k1, k2 or k3, or level = token."
            )


def policy_term(
    surrogate: Callable[..., Tensor],
    *,
    clip: ClipRange,
    level: RatioLevel = "token",
    ratio_to: RatioTo = "behaviour",
    name: str = "policy",
) -> LossTerm:
    """A loss of posttrain/algorithms/losses.py, whose ratio is to the policy that sampled or to the reference."""

    def per_token(view: TokenView) -> Float[Tensor, " token"]:
        denominator = ratio_denominator(view, ratio_to)
        return surrogate(view.logprobs, denominator, view.columns.advantages, view.rollout, clip=clip, level=level)

    def clipped(view: TokenView) -> Bool[Tensor, " token"]:
        ratio = log_ratio(view.logprobs, ratio_denominator(view, ratio_to), view.rollout, level=level)
        return clipped_tokens(ratio, view.columns.advantages, clip=clip)

    return LossTerm(
        name=name,
        per_token=per_token,
        needs=frozenset({Need.REFERENCE_LOGPROBS}) if ratio_to == "reference" else frozenset(),
        vanishes_without_advantage=True,
        clipped=clipped,
        clips_completions=level != "token",
        reported=False,
    )


def ratio_denominator(view: TokenView, ratio_to: RatioTo) -> Float[Tensor, " token"]:
    """The log-probs that a ratio has in its denominator."""
    return view.columns.reference_logprobs if ratio_to == "reference" else view.columns.behaviour_logprobs


def kl_term(term: KlTerm) -> LossTerm:
    """The KL to the reference as a term of the loss, estimated from the sampled token or completion, or in full."""
    full = term.estimator == "full"
    return LossTerm(
        name="kl",
        per_token=importance_weighed(
            attrgetter("full_kl") if full else partial(estimated_kl, estimator=term.estimator, level=term.level),
            term.importance,
        ),
        coefficient=term.coefficient,
        needs=frozenset({Need.FULL_KL if full else Need.REFERENCE_LOGPROBS}),
        metric="kl" if term.level == "token" else None,  # `kl` is in nats per token, and that of completions is not
    )


def importance_weighed(
    estimate: Callable[[TokenView], Tensor], level: RatioLevel | None
) -> Callable[[TokenView], Tensor]:
    """The estimate times π/μ, both with their gradients; as it is where there is no level.

        L = ρ k,   ∇L = ρ (k ∇log π + ∇k)        DeepSeek-V3.2 (2025), arXiv:2512.02556; TRL's use_bias_correction_kl

    Tokens from an older policy then estimate the KL of today's.  With k1 or k3 and token ratios the slope is that of
    KL(π‖ref), where k3 alone has that of KL(ref‖π): k3 + 1 - e⁻ˣ = x.
    """
    if level is None:
        return estimate

    def per_token(view: TokenView) -> Float[Tensor, " token"]:
        ratio = log_ratio(view.logprobs, view.columns.behaviour_logprobs, view.rollout, level=level)
        return ratio.exp() * estimate(view)

    return per_token


def estimated_kl(view: TokenView, *, estimator: str, level: KlLevel = "token") -> Float[Tensor, " token"]:
    """The estimate of the KL that the sampled token gives, or the whole completion that it is of."""
    reference = ratio_denominator(view, "reference")
    if level == "completion":
        return kl.of_completions(view.logprobs, reference, view.rollout, estimator=estimator)
    return kl.ESTIMATORS[estimator](view.logprobs, reference)


def needs_of(terms: Iterable[LossTerm]) -> frozenset[Need]:
    """What any of the terms needs."""
    return frozenset(need for term in terms for need in term.needs)


def total_loss(terms: Iterable[LossTerm], view: TokenView, *, owner: str) -> Float[Tensor, " token"]:
    """Σ_k c_k L_k of every token; a message about a term begins with its owner."""
    losses = [
        term.losses(view, owner=owner) if term.coefficient == 1 else term.coefficient * term.losses(view, owner=owner)
        for term in terms
    ]
    total = losses[0]
    for more in losses[1:]:
        total = total + more
    return total
