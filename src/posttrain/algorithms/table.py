"""The table of policy-gradient algorithms: each is a composition of a credit rule, loss terms and a token weighting.

A function's signature is its config schema: `algorithm: {name: dapo, clip_high: 0.3}` calls `dapo(clip_high=0.3)`.
Training code reads the fields of `Algorithm` and never asks which one runs.  docs/algorithms/ has a page for each.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

from torch import Tensor

from posttrain.algorithms.advantages import (
    batch_centred,
    group_centred,
    group_zscore,
    over_mean,
    raw,
    standardised,
)
from posttrain.algorithms.aggregation import (
    RewardAggregation,
    decoupled_zscore,
    per_function,
    scores_differ,
    totals_differ,
)
from posttrain.algorithms.algorithm import DYNAMIC_SAMPLING, Algorithm, Resample
from posttrain.algorithms.correction import Correction, corrected
from posttrain.algorithms.credit import (
    CreditLevel,
    CreditRule,
    Scale,
    credit_at,
    leave_one_out_credit,
    per_rollout,
    truncated_earn_nothing,
)
from posttrain.algorithms.distillation import distill
from posttrain.algorithms.losses import UNBOUNDED, ClipRange, RatioLevel, clipped_surrogate, weighted_policy_gradient
from posttrain.algorithms.ppo import ppo
from posttrain.algorithms.reward_shaping import PAPERS_OVERLONG, Overlong, overlong_punishment
from posttrain.algorithms.terms import KlTerm, LossTerm, RatioTo, kl_term, policy_term
from posttrain.algorithms.token_weights import (
    WEIGHTINGS,
    Weighting,
    constant_length,
    mean_over_sequences,
    mean_over_tokens,
)
from posttrain.binding import bind, build_own, is_own
from posttrain.errors import UserError
from posttrain.schemas import did_you_mean


def composed(
    name: str,
    *,
    credit: CreditRule,
    policy: LossTerm,
    token_weights: Callable[..., Tensor],
    kl: KlTerm | None,
    correction: Correction | None,
) -> Algorithm:
    """A policy-gradient method: its policy term, corrected for older samples, and the KL in the place asked for."""
    in_loss = kl is not None and kl.place == "loss"
    policy = corrected(policy, correction)
    return Algorithm(
        name=name,
        credit=credit,
        terms=(policy, kl_term(kl)) if kl is not None and in_loss else (policy,),
        token_weights=token_weights,
        kl_penalty=None if in_loss else kl,
    )


def decoupled(
    algorithm: Algorithm,
    aggregation: RewardAggregation,
    *,
    deviation: Literal["population", "sample", "none"] = "population",
    epsilon: float = 0.0,
    over: Literal["group", "batch"] = "group",
    overlong: Overlong | None = None,
) -> Algorithm:
    """The algorithm, with each reward function's scores normalised before they are summed where that is asked for.

    Raises UserError where something is taken off the sum of rewards, for there is none, or nothing is to be normalised.
    """
    if aggregation == "sum_then_normalize":
        return algorithm
    asked = "reward_aggregation = normalize_then_sum"
    if algorithm.kl_penalty is not None:
        raise UserError(
            f"{asked} has no sum of rewards that kl.place = reward could be taken off; use kl.place = loss."
        )
    if overlong is not None:
        raise UserError(
            f"{asked} has no sum of rewards that `overlong` could be taken off.  Write `overlong: null`, and for the"
            " same punishment add the reward soft_overlong, with a weight of its own."
        )
    if over != "group":
        raise UserError(f"{asked} divides by deviations of groups first, and deviation_over = {over}; use group.")
    if deviation == "none":
        raise UserError(f"{asked} divides by deviations, and deviation = none by none; use population or sample.")
    credit = per_function(partial(decoupled_zscore, deviation=deviation, epsilon=epsilon))
    return replace(algorithm, credit=credit, informative=scores_differ)


def require_credit_options(
    credit: CreditLevel, step_weight: float, aggregation: RewardAggregation, *, over: Literal["group", "batch"]
) -> None:
    """Refuse options of GRPO's that leave no room for a finer credit, or that no credit asked for reads."""
    if credit != "steps" and step_weight != 1.0:
        raise UserError(f"step_weight = {step_weight} with credit = {credit}: it weighs steps.  Use credit: steps.")
    if not 0 < step_weight < math.inf:
        raise UserError(f"step_weight = {step_weight}: it is a factor; use a number above 0.")
    if credit == "completion":
        return
    if aggregation != "sum_then_normalize":
        raise UserError(
            f"credit = {credit} sums what is earned from a token on, and reward_aggregation = {aggregation} normalises"
            " the scores of each function first.  Use sum_then_normalize."
        )
    if over != "group":
        raise UserError(f"credit = {credit} divides by the deviation of a group's tokens; use deviation_over: group.")


def reinforce(
    *,
    baseline: Literal["none", "batch_mean"] = "none",
    credit: Literal["completion", "reward_to_go"] = "completion",
    token_weights: Weighting = "sum_over_sequence",
    correction: Correction | None = None,
    kl: KlTerm | None = None,
) -> Algorithm:
    """Williams 1992: the reward, or what it is above the step's mean, times the gradient of log π."""
    rule, centre = (raw, raw) if baseline == "none" else (batch_centred, group_centred)
    made = composed(
        "reinforce",
        credit=credit_at(credit, rule, centre=centre, whole_step=baseline == "batch_mean"),
        policy=policy_term(weighted_policy_gradient, clip=UNBOUNDED),
        token_weights=WEIGHTINGS[token_weights],
        kl=kl,
        correction=correction,
    )
    return replace(made, least_group_size=1)


def rloo(
    *,
    token_weights: Weighting = "sum_over_sequence",
    clip_low: float | None = None,
    clip_high: float | None = None,
    reward_range: tuple[float, float] | None = None,
    normalize_advantages: bool = False,
    mask_truncated: bool = False,
    count_unscored: bool = False,
    correction: Correction | None = None,
    credit: Literal["completion", "reward_to_go"] = "completion",
    kl: KlTerm | None = None,
) -> Algorithm:
    """Ahmadian et al. 2024, arXiv:2402.14740: REINFORCE with the mean of a rollout's siblings as baseline.

    With `clip_low` the ratio of the whole completion is clipped as PPO clips a token's, for several updates on one
    batch: TRL's RLOOTrainer, with `token_weights: mean_over_sequences`.  `reward_range` bounds the sum of rewards.
    """
    if clip_low is not None and token_weights != "mean_over_sequences":
        raise UserError(
            f"clip_low = {clip_low} with token_weights = {token_weights}: the ratio is that of a whole completion, and"
            " would count once for each token.  Use token_weights: mean_over_sequences."
        )
    rule = leave_one_out_credit(credit, reward_range=reward_range, normalize_advantages=normalize_advantages)
    policy = policy_term(weighted_policy_gradient, clip=UNBOUNDED)
    if clip_low is not None:
        clip = ClipRange(low=clip_low, high=clip_low if clip_high is None else clip_high)
        policy = policy_term(clipped_surrogate, clip=clip, level="sequence_product")
    made = composed(
        "rloo",
        credit=truncated_earn_nothing(rule) if mask_truncated else rule,
        policy=policy,
        token_weights=WEIGHTINGS[token_weights],
        kl=kl,
        correction=correction,
    )
    return replace(made, masks_truncated=mask_truncated, counts_unscored=count_unscored)


def grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_level: RatioLevel = "token",
    deviation: Literal["population", "sample", "none"] = "population",
    deviation_over: Literal["group", "batch"] = "group",
    deviation_epsilon: float = 0.0,
    reward_aggregation: RewardAggregation = "sum_then_normalize",
    credit: CreditLevel = "completion",
    step_weight: float = 1.0,
    token_weights: Weighting = "mean_over_sequences",
    mask_truncated: bool = False,
    count_unscored: bool = False,
    ratio_to: RatioTo = "behaviour",
    correction: Correction | None = None,
    kl: KlTerm | None = None,
) -> Algorithm:
    """Shao et al. 2024, arXiv:2402.03300: rewards standardised within each prompt's group, PPO's clipped surrogate.

    `deviation` says what the centred reward is divided by; "none" leaves it in units of reward.  With the options it
    is every loss of TRL's that has a clipped ratio: docs/algorithms/grpo.md has the table.  `credit` says what a token
    is credited with where rewards mark tokens or spans, and `step_weight` what normalised steps count.
    """
    require_credit_options(credit, step_weight, reward_aggregation, over=deviation_over)
    rule = standardised(deviation, over=deviation_over, epsilon=deviation_epsilon)
    scale = Scale(deviation=deviation, epsilon=deviation_epsilon)
    clip = ClipRange(low=clip_low, high=clip_high, dual=math.inf if dual_clip is None else dual_clip)
    made = composed(
        "grpo",
        credit=credit_at(credit, rule, centre=group_centred, scale=scale, step_weight=step_weight),
        policy=policy_term(clipped_surrogate, clip=clip, level=ratio_level, ratio_to=ratio_to),
        token_weights=WEIGHTINGS[token_weights],
        kl=kl,
        correction=correction,
    )
    made = replace(made, masks_truncated=mask_truncated, counts_unscored=count_unscored)
    return decoupled(made, reward_aggregation, deviation=deviation, epsilon=deviation_epsilon, over=deviation_over)


def dr_grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio_to: RatioTo = "behaviour",
    correction: Correction | None = None,
    credit: Literal["completion", "reward_to_go"] = "completion",
    kl: KlTerm | None = None,
) -> Algorithm:
    """Liu et al. 2025, arXiv:2503.20783: GRPO without its two biases, the deviation and the length in the divisor."""
    return composed(
        "dr_grpo",
        credit=credit_at(credit, group_centred, centre=group_centred),
        policy=policy_term(clipped_surrogate, clip=ClipRange(low=clip_low, high=clip_high), ratio_to=ratio_to),
        token_weights=constant_length,
        kl=kl,
        correction=correction,
    )


def dapo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    overlong: Overlong | None = PAPERS_OVERLONG,
    resample: Resample | None = DYNAMIC_SAMPLING,
    reward_aggregation: RewardAggregation = "sum_then_normalize",
    mask_truncated: bool = False,
    ratio_to: RatioTo = "behaviour",
    correction: Correction | None = None,
    kl: KlTerm | None = None,
) -> Algorithm:
    """Yu et al. 2025, arXiv:2503.14476: clip-higher, token mean, dynamic sampling, soft overlong punishment."""
    shaping = None if overlong is None else partial(overlong_punishment, overlong=overlong)
    made = composed(
        "dapo",
        credit=per_rollout(group_zscore, shaping=shaping),
        policy=policy_term(clipped_surrogate, clip=ClipRange(low=clip_low, high=clip_high), ratio_to=ratio_to),
        token_weights=mean_over_tokens,
        kl=kl,
        correction=correction,
    )
    made = replace(made, informative=totals_differ, resample=resample, masks_truncated=mask_truncated)
    return decoupled(made, reward_aggregation, overlong=overlong)


def maxrl(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    token_weights: Weighting = "sum_over_sequence",
    ratio_to: RatioTo = "behaviour",
    correction: Correction | None = None,
    kl: KlTerm | None = None,
) -> Algorithm:
    """Tajwar et al. 2026, arXiv:2602.02710: the centred reward over its group's mean, up to the log of its chance.

    For rewards of 0 and more; a KL may be in the loss only.
    """
    if kl is not None and kl.place == "reward":
        raise UserError(
            "maxrl divides by a group's mean reward, which a KL with place = reward may bring to 0 or below; use"
            " kl.place = loss."
        )
    return composed(
        "maxrl",
        credit=per_rollout(over_mean),
        policy=policy_term(clipped_surrogate, clip=ClipRange(low=clip_low, high=clip_high), ratio_to=ratio_to),
        token_weights=WEIGHTINGS[token_weights],
        kl=kl,
        correction=correction,
    )


def gspo(
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    sequence_ratio: Literal["mean", "product"] = "mean",
    reward_aggregation: RewardAggregation = "sum_then_normalize",
    ratio_to: RatioTo = "behaviour",
    correction: Correction | None = None,
    kl: KlTerm | None = None,
) -> Algorithm:
    """Zheng et al. 2025, arXiv:2507.18071: one ratio per completion, the geometric mean of its tokens' ratios.

    "product" is the completion's whole importance weight; it moves about |y| times as far, so widen the clip with it.
    """
    level: RatioLevel = "sequence_mean" if sequence_ratio == "mean" else "sequence_product"
    clip = ClipRange(low=clip_low, high=clip_high)
    made = composed(
        "gspo",
        credit=per_rollout(group_zscore),
        policy=policy_term(clipped_surrogate, clip=clip, level=level, ratio_to=ratio_to),
        token_weights=mean_over_sequences,
        kl=kl,
        correction=correction,
    )
    return decoupled(made, reward_aggregation)


def cispo(
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    ratio_level: RatioLevel = "token",
    deviation: Literal["population", "sample", "none"] = "population",
    deviation_over: Literal["group", "batch"] = "group",
    deviation_epsilon: float = 0.0,
    reward_aggregation: RewardAggregation = "sum_then_normalize",
    mask_truncated: bool = False,
    count_unscored: bool = False,
    ratio_to: RatioTo = "behaviour",
    correction: Correction | None = None,
    kl: KlTerm | None = None,
) -> Algorithm:
    """MiniMax 2025, arXiv:2506.13585: the importance weight is clipped, the gradient of no token is dropped."""
    clip = ClipRange(low=clip_low, high=clip_high)
    made = composed(
        "cispo",
        credit=per_rollout(standardised(deviation, over=deviation_over, epsilon=deviation_epsilon)),
        policy=policy_term(weighted_policy_gradient, clip=clip, level=ratio_level, ratio_to=ratio_to),
        token_weights=mean_over_tokens,
        kl=kl,
        correction=correction,
    )
    made = replace(made, masks_truncated=mask_truncated, counts_unscored=count_unscored)
    return decoupled(made, reward_aggregation, deviation=deviation, epsilon=deviation_epsilon, over=deviation_over)


ALGORITHMS: Mapping[str, Callable[..., Algorithm]] = {
    "reinforce": reinforce,
    "rloo": rloo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "ppo": ppo,
    "maxrl": maxrl,
    "distill": distill,
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
                " posttrain.algorithms.algorithm.Algorithm, as the functions of that file do."
            )
        return built
    if "name" not in config:
        raise UserError(f"algorithm.name is missing.  There are: {', '.join(ALGORITHMS)}.")
    name = config["name"]
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise UserError(f"algorithm.name = {name!r}: no such algorithm.  {did_you_mean(name, ALGORITHMS)}")
    options = {key: value for key, value in config.items() if key != "name"}
    return bind(ALGORITHMS[name], options, where="algorithm")
