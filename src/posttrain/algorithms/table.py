"""The table of policy-gradient algorithms: each is a composition of an advantage, a loss and a token weighting.

A function's signature is its config schema: `algorithm: {name: dapo, clip_high: 0.3}` calls `dapo(clip_high=0.3)`.
Training code reads the fields of `Algorithm` and never asks which one runs.  docs/algorithms/ has a page for each.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from jaxtyping import Bool, Float, Int64
from torch import Tensor

from posttrain.algorithms.advantages import batch_centred, group_centred, group_zscore, leave_one_out, raw
from posttrain.algorithms.losses import (
    UNBOUNDED,
    ClipRange,
    RatioLevel,
    clipped_surrogate,
    clipped_tokens,
    log_ratio,
    weighted_policy_gradient,
)
from posttrain.algorithms.token_weights import constant_length, mean_over_sequences, mean_over_tokens, sum_over_sequence
from posttrain.binding import bind, build_own, is_own
from posttrain.errors import UserError
from posttrain.schemas import did_you_mean

RatioTo = Literal["behaviour", "reference"]
Weighting = Literal["mean_over_tokens", "mean_over_sequences", "sum_over_sequence", "constant_length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KlTerm:
    """A pull towards the reference policy.  posttrain/kl.py says what each estimator does in each place."""

    coefficient: float
    """Weight of the KL, in units of reward (or of advantage, in the loss) per nat."""
    estimator: Literal["k1", "k2", "k3", "full"] = "k3"
    """k1, k2, k3: from the token that was sampled.  full: the KL of the whole distribution there, in the loss only."""
    place: Literal["loss", "reward"] = "loss"
    """loss: a term per token with the token's weight.  reward: each rollout's total, taken off before advantages."""

    def __post_init__(self) -> None:
        if not self.coefficient > 0:
            raise UserError(f"coefficient = {self.coefficient}: must be above 0; for no KL term write `kl: null`.")
        if self.estimator == "full" and self.place == "reward":
            raise UserError(
                "estimator = full with place = reward: the full KL belongs to a position, not to the token that was "
                "sampled there, so a reward cannot carry it.  Use k1 in the reward, or full in the loss."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resample:
    """Dynamic sampling: groups whose rewards, before any shaping, are all equal make room for other prompts' groups."""

    max_rounds: int = 3
    """Extra sampling rounds per step at most; what is uninformative after the last stays."""

    def __post_init__(self) -> None:
        if self.max_rounds < 1:
            raise UserError(f"max_rounds = {self.max_rounds}: use 1 or more; for no resampling write `resample: null`.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlong:
    """DAPO's soft overlong punishment: the last stretch before the length limit costs reward, more with every token."""

    buffer: float = 0.2
    """Length of that stretch, as a fraction of max_completion_tokens."""
    penalty: float = 1.0
    """What a completion of max_completion_tokens loses, in units of reward."""

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= 1:
            raise UserError(f"buffer = {self.buffer}: a fraction of max_completion_tokens, above 0 and at most 1.")
        if not self.penalty > 0:
            raise UserError(f"penalty = {self.penalty}: must be above 0; for no punishment write `overlong: null`.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """All that sampling, batching and the update need to know about a method."""

    name: str
    advantage: Callable[[Tensor], Tensor]
    """Rewards to advantages, both "prompt group"; NaN rewards mean unscored."""
    surrogate: Callable[..., Tensor]
    """A loss of posttrain/losses.py."""
    clip: ClipRange
    ratio_level: RatioLevel = "token"
    ratio_to: RatioTo = "behaviour"
    """Whose log-probs the caller passes as the ratio's denominator."""
    token_weights: Callable[..., Tensor]
    """A rule of posttrain/token_weights.py."""
    kl: KlTerm | None
    shape_reward: Callable[..., Tensor] | None = None
    """(rewards, lengths, *, max_completion_tokens) -> rewards, all "prompt group", before the advantage."""
    resample: Resample | None = None

    @property
    def uses_reference(self) -> bool:
        """Whether a reference policy must be kept."""
        return self.kl is not None or self.ratio_to == "reference"

    @property
    def uses_reference_logprobs(self) -> bool:
        """Whether its log-probs of the sampled tokens are needed; the full KL compares whole distributions instead."""
        return self.ratio_to == "reference" or (self.kl is not None and self.kl.estimator != "full")

    @property
    def keeps_zero_advantages(self) -> bool:
        """Whether a completion without advantage still has a gradient, from a KL term in the loss."""
        return self.kl is not None and self.kl.place == "loss"

    def token_loss(
        self,
        logprobs: Float[Tensor, " token"],
        denominator_logprobs: Float[Tensor, " token"],
        advantages: Float[Tensor, " token"],
        rollout: Int64[Tensor, " token"],
    ) -> Float[Tensor, " token"]:
        """The policy's loss per token, without the KL term."""
        return self.surrogate(
            logprobs, denominator_logprobs, advantages, rollout, clip=self.clip, level=self.ratio_level
        )

    def clipped(
        self,
        logprobs: Float[Tensor, " token"],
        denominator_logprobs: Float[Tensor, " token"],
        advantages: Float[Tensor, " token"],
        rollout: Int64[Tensor, " token"],
    ) -> Bool[Tensor, " token"]:
        """Tokens on which clipping acts; above the range where A > 0, below it where A < 0."""
        ratio = log_ratio(logprobs, denominator_logprobs, rollout, level=self.ratio_level)
        return clipped_tokens(ratio, advantages, clip=self.clip)


def overlong_punishment(
    rewards: Float[Tensor, "prompt group"],
    lengths: Int64[Tensor, "prompt group"],
    *,
    max_completion_tokens: int,
    overlong: Overlong,
) -> Float[Tensor, "prompt group"]:
    """Rewards less DAPO's length penalty, linear over the buffer before the length limit.

        r - penalty · clip((|y| - (L - C)) / C, 0, 1),   L = max_completion_tokens, C = buffer · L

    Yu et al. 2025, arXiv:2503.14476.  Unscored (NaN) stays unscored.
    """
    buffer_tokens = overlong.buffer * max_completion_tokens
    into_buffer = (lengths.to(rewards.dtype) - (max_completion_tokens - buffer_tokens)) / buffer_tokens
    return rewards - overlong.penalty * into_buffer.clamp(0, 1)


def reinforce(
    *,
    baseline: Literal["none", "batch_mean"] = "none",
    token_weights: Weighting = "sum_over_sequence",
    kl: KlTerm | None = None,
) -> Algorithm:
    """Williams 1992: the reward, or what it is above the step's mean, times the gradient of log π."""
    return Algorithm(
        name="reinforce",
        advantage={"none": raw, "batch_mean": batch_centred}[baseline],
        surrogate=weighted_policy_gradient,
        clip=UNBOUNDED,
        token_weights=WEIGHTINGS[token_weights],
        kl=kl,
    )


def rloo(*, token_weights: Weighting = "sum_over_sequence", kl: KlTerm | None = None) -> Algorithm:
    """Ahmadian et al. 2024, arXiv:2402.14740: REINFORCE with the mean of a rollout's siblings as baseline."""
    return Algorithm(
        name="rloo",
        advantage=leave_one_out,
        surrogate=weighted_policy_gradient,
        clip=UNBOUNDED,
        token_weights=WEIGHTINGS[token_weights],
        kl=kl,
    )


def grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    deviation: Literal["population", "sample", "none"] = "population",
    token_weights: Weighting = "mean_over_sequences",
    ratio_to: RatioTo = "behaviour",
    kl: KlTerm | None = None,
) -> Algorithm:
    """Shao et al. 2024, arXiv:2402.03300: rewards standardised within each prompt's group, PPO's clipped surrogate.

    `deviation` says what the centred reward is divided by; "none" leaves it in units of reward.
    """
    return Algorithm(
        name="grpo",
        advantage=group_centred if deviation == "none" else partial(group_zscore, deviation=deviation),
        surrogate=clipped_surrogate,
        clip=ClipRange(low=clip_low, high=clip_high),
        ratio_to=ratio_to,
        token_weights=WEIGHTINGS[token_weights],
        kl=kl,
    )


def dr_grpo(
    *, clip_low: float = 0.2, clip_high: float = 0.2, ratio_to: RatioTo = "behaviour", kl: KlTerm | None = None
) -> Algorithm:
    """Liu et al. 2025, arXiv:2503.20783: GRPO without its two biases, the deviation and the length in the divisor."""
    return Algorithm(
        name="dr_grpo",
        advantage=group_centred,
        surrogate=clipped_surrogate,
        clip=ClipRange(low=clip_low, high=clip_high),
        ratio_to=ratio_to,
        token_weights=constant_length,
        kl=kl,
    )


def dapo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    overlong: Overlong | None = Overlong(),
    resample: Resample | None = Resample(),
    ratio_to: RatioTo = "behaviour",
    kl: KlTerm | None = None,
) -> Algorithm:
    """Yu et al. 2025, arXiv:2503.14476: clip-higher, token mean, dynamic sampling, soft overlong punishment."""
    return Algorithm(
        name="dapo",
        advantage=group_zscore,
        surrogate=clipped_surrogate,
        clip=ClipRange(low=clip_low, high=clip_high),
        ratio_to=ratio_to,
        token_weights=mean_over_tokens,
        kl=kl,
        shape_reward=None if overlong is None else partial(overlong_punishment, overlong=overlong),
        resample=resample,
    )


def gspo(
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    sequence_ratio: Literal["mean", "product"] = "mean",
    ratio_to: RatioTo = "behaviour",
    kl: KlTerm | None = None,
) -> Algorithm:
    """Zheng et al. 2025, arXiv:2507.18071: one ratio per completion, the geometric mean of its tokens' ratios.

    "product" is the completion's whole importance weight; it moves about |y| times as far, so widen the clip with it.
    """
    return Algorithm(
        name="gspo",
        advantage=group_zscore,
        surrogate=clipped_surrogate,
        clip=ClipRange(low=clip_low, high=clip_high),
        ratio_level="sequence_mean" if sequence_ratio == "mean" else "sequence_product",
        ratio_to=ratio_to,
        token_weights=mean_over_sequences,
        kl=kl,
    )


def cispo(
    *, clip_low: float = 1.0, clip_high: float = 4.0, ratio_to: RatioTo = "behaviour", kl: KlTerm | None = None
) -> Algorithm:
    """MiniMax 2025, arXiv:2506.13585: the importance weight is clipped, the gradient of no token is dropped."""
    return Algorithm(
        name="cispo",
        advantage=group_zscore,
        surrogate=weighted_policy_gradient,
        clip=ClipRange(low=clip_low, high=clip_high),
        ratio_to=ratio_to,
        token_weights=mean_over_tokens,
        kl=kl,
    )


WEIGHTINGS: Mapping[str, Callable[..., Tensor]] = {
    "mean_over_tokens": mean_over_tokens,
    "mean_over_sequences": mean_over_sequences,
    "sum_over_sequence": sum_over_sequence,
    "constant_length": constant_length,
}

ALGORITHMS: Mapping[str, Callable[..., Algorithm]] = {
    "reinforce": reinforce,
    "rloo": rloo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
}


def build_algorithm(config: Mapping[str, object]) -> Algorithm:
    """The algorithm that a recipe's `algorithm` section describes: its name, and options of the function so named.

    A function of the user's own is named by `path`, as FILE.py:FUNCTION, instead.
    """
    if is_own("algorithm", config):
        built = build_own("algorithm", config)
        if not isinstance(built, Algorithm):
            raise UserError(
                f"algorithm: {config['path']} returned {built!r:.60} ({type(built).__name__}); return a"
                " posttrain.algorithms.table.Algorithm, as the functions of that file do."
            )
        return built
    if "name" not in config:
        raise UserError(f"algorithm.name is missing.  There are: {', '.join(ALGORITHMS)}.")
    name = config["name"]
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise UserError(f"algorithm.name = {name!r}: no such algorithm.  {did_you_mean(name, ALGORITHMS)}")
    options = {key: value for key, value in config.items() if key != "name"}
    return bind(ALGORITHMS[name], options, where="algorithm")
