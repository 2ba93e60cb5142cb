"""The table of policy-gradient algorithms: each is a composition of a credit rule, loss terms and a token weighting.

A function's signature is its config schema: `algorithm: {name: dapo, clip_high: 0.3}` calls `dapo(clip_high=0.3)`.
Training code reads the fields of `Algorithm` and never asks which one runs.  docs/algorithms/ has a page for each.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from posttrain.algorithms import advantages, losses
from posttrain.algorithms.advantages import PAPERS_OVERLONG, Overlong, overlong_punishment
from posttrain.algorithms.algorithm import DYNAMIC_SAMPLING, Algorithm, Resample
from posttrain.algorithms.correction import Correction, corrected
from posttrain.algorithms.credit import CreditLevel, Scale, credit_at, leave_one_out_credit, per_function, per_rollout
from posttrain.algorithms.distillation import distill
from posttrain.algorithms.losses import UNBOUNDED, WEIGHTINGS, ClipRange, NonNegative, RatioLevel, Weighting
from posttrain.algorithms.ppo import ppo
from posttrain.algorithms.terms import KlTerm, LossTerm, RatioTo, kl_term, policy_term
from posttrain.binding import bind, build_own, is_own
from posttrain.errors import UserError
from posttrain.options.bounds import NonNegativeFloat, PositiveFloat, Share, refuse_unread, within_bounds
from posttrain.schemas import did_you_mean

RewardAggregation = Literal["sum_then_normalize", "normalize_then_sum"]


def composed(
    name: str, *, policy: LossTerm, kl: KlTerm | None, correction: Correction | None, **fields: Any
) -> Algorithm:
    """A method from its policy term, corrected for older samples, the KL in its place, and fields of `Algorithm`."""
    in_loss = kl is not None and kl.place == "loss"
    terms = [corrected(policy, correction)]
    if kl is not None and in_loss:
        terms.append(kl_term(kl))
    return Algorithm(name=name, terms=tuple(terms), kl_penalty=None if in_loss else kl, **fields)


def decoupled(
    algorithm: Algorithm,
    aggregation: RewardAggregation,
    *,
    deviation: Literal["population", "sample", "none"] = "population",
    epsilon: float = 0.0,
    over: Literal["group", "batch"] = "group",
    overlong: Overlong | None = None,
) -> Algorithm:
    """The algorithm, with each reward function's scores normalised before they are summed under normalize_then_sum."""
    if aggregation == "sum_then_normalize":
        return algorithm
    for conflict, remedy in (
        (algorithm.kl_penalty is not None and "kl.place = reward", "Use kl.place = loss."),
        (overlong is not None and "overlong", "Write `overlong: null`, and add the reward soft_overlong."),
        (over != "group" and f"deviation_over = {over}", "Use deviation_over = group."),
        (deviation == "none" and "deviation = none", "Use population or sample."),
    ):
        if conflict:
            raise UserError(f"{conflict}: reward_aggregation = normalize_then_sum divides scores by group. {remedy}")
    assert deviation != "none"
    credit = per_function(partial(advantages.decoupled_zscore, deviation=deviation, epsilon=epsilon))
    return replace(algorithm, credit=credit, informative=advantages.scores_differ)


@within_bounds
def reinforce(
    *,
    baseline: Literal["none", "batch_mean"] = "none",
    credit: Literal["completion", "reward_to_go"] = "completion",
    token_weights: Weighting = "sum_over_sequence",
    correction: Correction | None = None,
    kl: KlTerm | None = None,
) -> Algorithm:
    """Williams 1992: the reward, or what it is above the step's mean, times the gradient of log π."""
    rule = centre = advantages.raw
    if baseline == "batch_mean":
        rule, centre = advantages.batch_centred, advantages.group_centred
    return composed(
        "reinforce",
        credit=credit_at(credit, rule, centre=centre, whole_step=baseline == "batch_mean"),
        policy=policy_term(losses.weighted_policy_gradient, clip=UNBOUNDED),
        token_weights=WEIGHTINGS[token_weights],
        kl=kl,
        correction=correction,
        credits_turns=credit != "completion",
        least_group_size=1,
    )


@within_bounds
def rloo(
    *,
    token_weights: Weighting = "sum_over_sequence",
    clip_low: Share | None = None,
    clip_high: NonNegative | None = None,
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
        raise UserError(f"clip_low = {clip_low}: clips ratios of completions. Use token_weights: mean_over_sequences.")
    policy = policy_term(losses.weighted_policy_gradient, clip=UNBOUNDED)
    if clip_low is not None:
        clip = ClipRange(low=clip_low, high=clip_low if clip_high is None else clip_high)
        policy = policy_term(losses.clipped_surrogate, clip=clip, level="sequence_product")
    return composed(
        "rloo",
        credit=leave_one_out_credit(
            credit, reward_range=reward_range, normalize_advantages=normalize_advantages, mask_truncated=mask_truncated
        ),
        policy=policy,
        token_weights=WEIGHTINGS[token_weights],
        kl=kl,
        correction=correction,
        credits_turns=credit != "completion",
        masks_truncated=mask_truncated,
        counts_unscored=count_unscored,
    )


@within_bounds
def grpo(
    *,
    clip_low: Share = 0.2,
    clip_high: NonNegative = 0.2,
    dual_clip: float | None = None,
    ratio_level: RatioLevel = "token",
    deviation: Literal["population", "sample", "none"] = "population",
    deviation_over: Literal["group", "batch"] = "group",
    deviation_epsilon: NonNegativeFloat = 0.0,
    reward_aggregation: RewardAggregation = "sum_then_normalize",
    credit: CreditLevel = "completion",
    step_weight: PositiveFloat = 1.0,
    token_weights: Weighting = "mean_over_sequences",
    mask_truncated: bool = False,
    count_unscored: bool = False,
    ratio_to: RatioTo = "behaviour",
    correction: Correction | None = None,
    kl: KlTerm | None = None,
) -> Algorithm:
    """Shao et al. 2024, arXiv:2402.03300: rewards standardised within each prompt's group, PPO's clipped surrogate.

    `deviation` is the divisor of the centred reward; "none" leaves it in units of reward.  With the options it is every
    loss of TRL's that has a clipped ratio: docs/algorithms/grpo.md has the table.  `credit` says how rewards of tokens
    or spans are credited, and `step_weight` weighs normalised steps.
    """
    if credit != "steps":
        refuse_unread("credit = steps", {"step_weight": step_weight != 1})
    if credit != "completion" and reward_aggregation != "sum_then_normalize":
        raise UserError(f"credit = {credit} sums token rewards. Use reward_aggregation: sum_then_normalize.")
    if credit != "completion" and deviation_over != "group":
        raise UserError(f"credit = {credit} divides by the deviation of a group. Use deviation_over: group.")
    rule = advantages.standardised(deviation, over=deviation_over, epsilon=deviation_epsilon)
    scale = Scale(deviation=deviation, epsilon=deviation_epsilon)
    clip = ClipRange(low=clip_low, high=clip_high, dual=math.inf if dual_clip is None else dual_clip)
    made = composed(
        "grpo",
        credit=credit_at(credit, rule, centre=advantages.group_centred, scale=scale, step_weight=step_weight),
        policy=policy_term(losses.clipped_surrogate, clip=clip, level=ratio_level, ratio_to=ratio_to),
        token_weights=WEIGHTINGS[token_weights],
        kl=kl,
        correction=correction,
        credits_turns=credit != "completion",
        masks_truncated=mask_truncated,
        counts_unscored=count_unscored,
    )
    return decoupled(made, reward_aggregation, deviation=deviation, epsilon=deviation_epsilon, over=deviation_over)


@within_bounds
def dr_grpo(
    *,
    clip_low: Share = 0.2,
    clip_high: NonNegative = 0.2,
    ratio_to: RatioTo = "behaviour",
    correction: Correction | None = None,
    credit: Literal["completion", "reward_to_go"] = "completion",
    kl: KlTerm | None = None,
) -> Algorithm:
    """Liu et al. 2025, arXiv:2503.20783: GRPO without its two biases, the deviation and the length in the divisor."""
    return composed(
        "dr_grpo",
        credit=credit_at(credit, advantages.group_centred, centre=advantages.group_centred),
        policy=policy_term(losses.clipped_surrogate, clip=ClipRange(low=clip_low, high=clip_high), ratio_to=ratio_to),
        token_weights=losses.constant_length,
        credits_turns=credit != "completion",
        kl=kl,
        correction=correction,
    )


@within_bounds
def dapo(
    *,
    clip_low: Share = 0.2,
    clip_high: NonNegative = 0.28,
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
        credit=per_rollout(advantages.group_zscore, shaping=shaping),
        policy=policy_term(losses.clipped_surrogate, clip=ClipRange(low=clip_low, high=clip_high), ratio_to=ratio_to),
        token_weights=losses.mean_over_tokens,
        kl=kl,
        correction=correction,
        informative=advantages.totals_differ,
        resample=resample,
        masks_truncated=mask_truncated,
    )
    return decoupled(made, reward_aggregation, overlong=overlong)


@within_bounds
def maxrl(
    *,
    clip_low: Share = 0.2,
    clip_high: NonNegative = 0.2,
    token_weights: Weighting = "sum_over_sequence",
    ratio_to: RatioTo = "behaviour",
    correction: Correction | None = None,
    kl: KlTerm | None = None,
) -> Algorithm:
    """Tajwar et al. 2026, arXiv:2602.02710: the centred reward over its group's mean, up to the log of its chance.

    For rewards of at least 0; a KL may be in the loss only.
    """
    if kl is not None and kl.place == "reward":
        raise UserError("kl.place = reward: maxrl divides by mean rewards, which must stay above 0. Use place = loss.")
    return composed(
        "maxrl",
        credit=per_rollout(advantages.over_mean),
        policy=policy_term(losses.clipped_surrogate, clip=ClipRange(low=clip_low, high=clip_high), ratio_to=ratio_to),
        token_weights=WEIGHTINGS[token_weights],
        kl=kl,
        correction=correction,
    )


@within_bounds
def gspo(
    *,
    clip_low: Share = 3e-4,
    clip_high: NonNegative = 4e-4,
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
        credit=per_rollout(advantages.group_zscore),
        policy=policy_term(losses.clipped_surrogate, clip=clip, level=level, ratio_to=ratio_to),
        token_weights=losses.mean_over_sequences,
        kl=kl,
        correction=correction,
    )
    return decoupled(made, reward_aggregation)


@within_bounds
def cispo(
    *,
    clip_low: Share = 1.0,
    clip_high: NonNegative = 4.0,
    ratio_level: RatioLevel = "token",
    deviation: Literal["population", "sample", "none"] = "population",
    deviation_over: Literal["group", "batch"] = "group",
    deviation_epsilon: NonNegativeFloat = 0.0,
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
        credit=per_rollout(advantages.standardised(deviation, over=deviation_over, epsilon=deviation_epsilon)),
        policy=policy_term(losses.weighted_policy_gradient, clip=clip, level=ratio_level, ratio_to=ratio_to),
        token_weights=losses.mean_over_tokens,
        kl=kl,
        correction=correction,
        masks_truncated=mask_truncated,
        counts_unscored=count_unscored,
    )
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
    """The algorithm of a recipe's `algorithm` section: a row by its `name`, or FILE.py:FUNCTION by its `path`."""
    if is_own("algorithm", config):
        built = build_own("algorithm", config)
        if not isinstance(built, Algorithm):
            found = f"{built!r:.60} ({type(built).__name__})"
            raise UserError(f"algorithm: {config['path']} returned {found}; return a posttrain.Algorithm.")
        return built
    if "name" not in config:
        raise UserError(f"algorithm.name is missing.  There are: {', '.join(ALGORITHMS)}.")
    name = config["name"]
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise UserError(f"algorithm.name = {name!r}: no such algorithm.  {did_you_mean(name, ALGORITHMS)}")
    options = {key: value for key, value in config.items() if key != "name"}
    return bind(ALGORITHMS[name], options, where="algorithm")
