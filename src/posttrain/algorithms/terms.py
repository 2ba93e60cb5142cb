"""Loss terms: the loss of an update is Σ_t w_t Σ_k c_k L_k(t), a sum of named terms; each declares its `needs`.

The update reads the needs and passes a `TokenView` that has these columns.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Annotated, Literal, TypeGuard, TypeVar

import torch
from annotated_types import Gt
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from posttrain.algorithms import kl
from posttrain.algorithms.losses import ClipRange, RatioLevel, clipped_tokens, log_ratio
from posttrain.batch import TokenColumns
from posttrain.errors import RunError, UserError
from posttrain.needs import DeclaredColumns, MissingColumn, Need
from posttrain.options.bounds import Bounded, PositiveFloat, Rule, Unused

RatioTo = Literal["behaviour", "reference"]
KlLevel = Literal["token", "completion"]
Read = TypeVar("Read")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView(DeclaredColumns):
    """The sampled tokens of a micro-batch, on one device and in one precision, for the terms of a loss.

    `known` has the columns of this update, with their gradients: `full_kl`, `entropies`, `values`, `teacher_kl`.
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
        """The columns of these needs only: those computed for others may lack a gradient."""
        return replace(self.limited_to(needs), columns=self.columns.limited_to(needs))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerm:
    """One summand of the loss of every token."""

    name: str
    """The mean over tokens of `per_token` is the metric `loss/<name>`."""
    per_token: Callable[[TokenView], Float[Tensor, " token"]]
    """Lower is better; times its coefficient it is in units of the advantage.  It reads one completion at a time, so
    that the split into micro-batches changes nothing: see `token_locality`."""
    coefficient: float = 1.0
    needs: frozenset[Need] = frozenset()
    """The columns that `per_token` reads; their names as text work too."""
    vanishes_without_advantage: bool = False
    """Whether it has no gradient on completions whose advantages are 0; the update then skips them."""
    clipped: Callable[[TokenView], Bool[Tensor, " token"]] | None = None
    """Tokens on which clipping acts, for metrics; None if nothing is clipped."""
    clips_completions: bool = False
    """Whether the clipped ratio is that of the whole completion: `clip_ratio/*` then counts completions."""
    measures: Callable[[TokenView], Mapping[str, Float[Tensor, " token"]]] | None = None
    """Further numbers of every token, by the name of the metric that is their mean."""
    reported: bool = True
    """Whether the mean is a metric."""
    metric: Literal["kl", "value/loss"] | None = None
    """The name of the metric, in place of `loss/<name>`."""

    def __post_init__(self) -> None:
        if self.metric not in (None, "kl", "value/loss"):
            allowed = f"use None (loss/{self.name}), 'kl' or 'value/loss'"
            raise UserError(f"loss term {self.name}: metric = {self.metric!r}: {allowed}.")
        needs = require_needs(self.needs, frozenset(Need), f"loss term {self.name}: needs")
        object.__setattr__(self, "needs", needs)

    @property
    def metric_name(self) -> str:
        return self.metric or f"loss/{self.name}"

    def losses(self, view: TokenView, *, owner: str) -> Float[Tensor, " token"]:
        """Its values.  Raises RunError, naming owner and term, if they are not a number for each token."""
        losses: object = self.read(self.per_token, view, owner=owner)
        if not is_column(losses, len(view.logprobs)):
            needed = f"return a floating-point tensor of one number for each token, [{len(view.logprobs)}] here"
            raise RunError(f"{owner}: its loss term {self.name} returned {value_text(losses)}; {needed}.")
        return losses

    def read(self, function: Callable[[TokenView], Read], view: TokenView, *, owner: str) -> Read:
        """The result of one of its functions.  Raises RunError if that reads a column outside of `needs`."""
        try:
            return function(view.seen_with(self.needs))
        except MissingColumn as missing:
            remedy = missing.remedy("its `needs`")
            raise RunError(f"{owner}: its loss term {self.name} cannot read `{missing.name}`.  {remedy}") from missing


@dataclass(frozen=True, slots=True, kw_only=True)
class KlTerm(Bounded):
    """A pull towards the reference policy.  posttrain/algorithms/kl.py says what each estimator does in each place."""

    coefficient: PositiveFloat
    """Weight of the KL, in units of reward (or of advantage, in the loss) per nat.  For no KL write `kl: null`."""
    estimator: Literal["k1", "k2", "k3", "full"] = "k3"
    """k1, k2, k3: from the token that was sampled.  full: the KL of the whole distribution there, in the loss only."""
    place: Literal["loss", "reward"] = "loss"
    """loss: a term per token with the token's weight.  reward: subtracted from rewards of tokens before advantages."""
    importance: RatioLevel | None = None
    """In the loss: multiply the estimate by the ratio π/μ of its token (token) or completion (sequence_mean,
    sequence_product), with the ratio's own gradient.  Null multiplies by nothing."""
    level: KlLevel = "token"
    """token: an estimate for each token.  completion: one of the summed log-ratio, which all tokens of a completion
    share; in the loss only.  Under `mean_over_sequences` (grpo, gspo) it has the whole completion's weight."""

    rules = (
        Rule("estimator", lambda o: o.place == "loss" or o.estimator != "full", "is only for place = loss."),
        Unused("importance level", {"place": "loss", "estimator": ("k1", "k2", "k3")}),
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
    denominator = attrgetter(f"columns.{ratio_to}_logprobs")

    def per_token(view: TokenView) -> Float[Tensor, " token"]:
        columns = view.columns
        return surrogate(view.logprobs, denominator(view), columns.advantages, view.rollout, clip=clip, level=level)

    def clipped(view: TokenView) -> Bool[Tensor, " token"]:
        ratio = log_ratio(view.logprobs, denominator(view), view.rollout, level=level)
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


def kl_term(term: KlTerm) -> LossTerm:
    """The KL to the reference as a term of the loss, estimated from the sampled token or completion, or in full.

        L = ρ k,   ∇L = ρ (k ∇log π + ∇k)        DeepSeek-V3.2 (2025), arXiv:2512.02556; TRL's use_bias_correction_kl

    ρ = π/μ, with its gradient, if the term has an importance level, else 1.  Tokens from an older policy then estimate
    the KL of today's.  With k1 or k3 and token ratios the slope is that of KL(π‖ref), where plain k3 has that of
    KL(ref‖π): k3 + 1 - e⁻ˣ = x.
    """
    full, importance = term.estimator == "full", term.importance

    def estimate(view: TokenView) -> Float[Tensor, " token"]:
        if full:
            return view.full_kl
        reference = view.columns.reference_logprobs
        if term.level == "completion":
            return kl.of_completions(view.logprobs, reference, view.rollout, estimator=term.estimator)
        return kl.ESTIMATORS[term.estimator](view.logprobs, reference)

    def per_token(view: TokenView) -> Float[Tensor, " token"]:
        if importance is None:
            return estimate(view)
        ratio = log_ratio(view.logprobs, view.columns.behaviour_logprobs, view.rollout, level=importance)
        return ratio.exp() * estimate(view)

    return LossTerm(
        name="kl",
        per_token=per_token,
        coefficient=term.coefficient,
        needs=frozenset({Need.FULL_KL if full else Need.REFERENCE_LOGPROBS}),
        metric="kl" if term.level == "token" else None,  # `kl` is in nats per token, and that of completions is not
    )


def require_needs(needs: object, available: frozenset[Need], where: str) -> frozenset[Need]:
    """The needs as a set.  Raises UserError if one of them is unknown or not available here."""
    if not isinstance(needs, frozenset | set | tuple | list) or not all(need in list(available) for need in needs):
        raise UserError(f"{where} = {needs!r}: give a set of {', '.join(sorted(available))}.")
    return frozenset(map(Need, needs))


def is_column(value: object, length: int) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.shape == (length,) and value.is_floating_point()


def value_text(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return f"{value!r:.60} ({type(value).__name__})"


def needs_of(terms: Iterable[LossTerm]) -> frozenset[Need]:
    return frozenset(need for term in terms for need in term.needs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLossOptions(Bounded):
    """How the value head is fitted to the returns."""

    coefficient: PositiveFloat = 1.0
    """Weight of ½ (V - R)²; 1 is the weight .5 of the squared error in courses.  AdamW ignores the scale of a gradient,
    so this only matters for a shared trunk and the head's clipping."""
    clip: Annotated[float, Gt(0)] | None = None
    """How far a value may move in a step, in deviations of the step's returns; null means no limit.  Libraries use .2,
    in units of reward."""


DEFAULT_VALUE_LOSS = ValueLossOptions()


def value_loss(
    values: Float[Tensor, " token"],
    returns: Float[Tensor, " token"],
    *,
    earlier: Float[Tensor, " token"] | None = None,
    reach: Float[Tensor, " token"] | None = None,
) -> Float[Tensor, " token"]:
    """Half the squared error, in squared units of reward; with a reach the larger of two, as in PPO's code.

        L = ½ max((V - R)², (V_c - R)²),   V_c = V' + clip(V - V', -reach, reach)        V': the value at collection

    The maximum has no gradient where V is beyond the reach and closer to R than V_c: it has moved far enough.
    Schulman et al. 2017's code; Huang et al. 2022 ("The 37 implementation details of PPO") and Engstrom et al. 2020,
    arXiv:2005.12729, find no use in it, so that without a reach the loss is ½ (V - R)².
    """
    error = (values - returns).square()
    if reach is None:
        return error / 2
    assert earlier is not None, "values are clipped around those at collection"
    within_reach = earlier + torch.maximum(torch.minimum(values - earlier, reach), -reach)
    return torch.maximum(error, (within_reach - returns).square()) / 2


def value_term(options: ValueLossOptions) -> LossTerm:
    """The value loss of every token, with the tokens on which its clip acts as a metric."""

    def per_token(view: TokenView) -> Float[Tensor, " token"]:
        reach = view.columns.value_range
        earlier = None if reach is None else view.columns.values
        return value_loss(view.values, view.columns.returns, earlier=earlier, reach=reach)

    def held(view: TokenView) -> dict[str, Float[Tensor, " token"]]:
        acts = per_token(view) > value_loss(view.values, view.columns.returns)
        return {"value/clip_fraction": acts.to(view.values)}

    return LossTerm(
        name="value",
        per_token=per_token,
        coefficient=options.coefficient,
        needs=frozenset({Need.VALUES}),
        metric="value/loss",
        measures=None if options.clip is None else held,
    )


def entropy_term(coefficient: float) -> LossTerm:
    """A bonus for the entropy of the next-token distribution, per token: the loss is less by c · H, H in nats."""
    return LossTerm(
        name="entropy_bonus",
        per_token=lambda view: -view.entropies,
        coefficient=coefficient,
        needs=frozenset({Need.ENTROPY}),
        reported=False,  # `entropy` is
    )
