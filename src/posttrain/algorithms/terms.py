"""Loss terms: the loss of an update is Σ_t w_t Σ_k c_k L_k(t), a sum of named terms, each of which says what it needs.

Whoever computes the update reads `needs` and hands over a `TokenView` that has it; it asks nothing else of an
algorithm.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Literal

from jaxtyping import Bool, Float, Int64
from torch import Tensor

from posttrain.algorithms import kl
from posttrain.algorithms.checks import require_losses
from posttrain.algorithms.losses import ClipRange, RatioLevel, clipped_tokens, log_ratio
from posttrain.batch import TokenColumns
from posttrain.errors import RunError, UserError

RatioTo = Literal["behaviour", "reference"]
KlLevel = Literal["token", "completion"]


class Need(StrEnum):
    """What a term reads beside log π of the sampled tokens, their advantages and log μ."""

    REFERENCE_LOGPROBS = "reference_logprobs"
    """The reference's log-probs of the sampled tokens."""
    FULL_KL = "full_kl"
    """KL(π‖ref) of whole next-token distributions: a pass of policy and reference over the output layer."""
    ENTROPY = "entropy"
    """Entropy of the policy's next-token distributions: another pass over the output layer."""
    VALUES = "values"
    """What a value head expects now, beside what it expected and the returns.  Where it has a trunk of its own, log π
    comes without its gradient, for the two trunks are differentiated one after the other."""
    PROXIMAL_LOGPROBS = "proximal_logprobs"
    """Log-probs of the sampled tokens under the policy that the step starts from: a pass of its own where the step has
    several updates."""
    TEACHER_LOGPROBS = "teacher_logprobs"
    """Log-probs of the sampled tokens under a teacher, which may have seen another prompt."""
    TEACHER_KL = "teacher_kl"
    """KL(π‖teacher) of whole next-token distributions: a pass of policy and teacher over the output layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """What the terms of a loss may read of the tokens of a micro-batch, all on one device and in one precision."""

    logprobs: Float[Tensor, " token"]
    """log π(token) in nats, with its gradient."""
    rollout: Int64[Tensor, " token"]
    """Which completion each token belongs to; all tokens of a completion are here."""
    columns: TokenColumns
    full_kl: Float[Tensor, " token"] | None = None
    """With its gradient; there for a term that needs it, as the next three."""
    entropies: Float[Tensor, " token"] | None = None
    values: Float[Tensor, " token"] | None = None
    teacher_kl: Float[Tensor, " token"] | None = None

    def limited_to(self, needs: frozenset[Need]) -> "TokenView":
        """As a term with these needs sees it: what was computed for others may lack its gradient."""
        return replace(
            self,
            full_kl=self.full_kl if Need.FULL_KL in needs else None,
            entropies=self.entropies if Need.ENTROPY in needs else None,
            values=self.values if Need.VALUES in needs else None,
            teacher_kl=self.teacher_kl if Need.TEACHER_KL in needs else None,
        )


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
        listed = isinstance(self.needs, frozenset | set | tuple | list)
        if not listed or not all(need in list(Need) for need in self.needs):
            raise UserError(
                f"loss term {self.name}: needs = {self.needs!r}: give a set of what there is: {', '.join(Need)}."
            )
        object.__setattr__(self, "needs", frozenset(map(Need, self.needs)))

    @property
    def metric_name(self) -> str:
        """What its mean is called in metrics.jsonl."""
        return self.metric or f"loss/{self.name}"

    def losses(self, view: TokenView, *, owner: str) -> Float[Tensor, " token"]:
        """Its values, of what it says that it needs.  Raises RunError, of this owner, where they are none."""
        try:
            losses = self.per_token(view.limited_to(self.needs))
        except (TypeError, AttributeError) as error:
            # How every use of a column that is None ends.
            if "NoneType" not in str(error):
                raise
            raise RunError(
                f"{owner}: its loss term {self.name} reads a column that is not there ({error}).  It needs"
                f" {', '.join(sorted(self.needs)) or 'nothing'} and sees no more than that and what is always there;"
                f" `needs` may have {', '.join(Need)}, and returns are there if the credit rule gives them."
            ) from error
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
    chosen = view.columns.reference_logprobs if ratio_to == "reference" else view.columns.behaviour_logprobs
    assert chosen is not None, "a need that was not met"
    return chosen


def kl_term(term: KlTerm) -> LossTerm:
    """The KL to the reference as a term of the loss, estimated from the sampled token or completion, or in full."""
    full = term.estimator == "full"
    return LossTerm(
        name="kl",
        per_token=importance_weighed(
            given_full_kl if full else partial(estimated_kl, estimator=term.estimator, level=term.level),
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


def given_full_kl(view: TokenView) -> Float[Tensor, " token"]:
    """The KL of whole distributions, as it was computed with the log-probs."""
    assert view.full_kl is not None, "a need that was not met"
    return view.full_kl


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
