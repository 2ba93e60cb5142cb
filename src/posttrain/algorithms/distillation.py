"""On-policy distillation: a teacher's next-token distributions are learned on completions that the student sampled.

    full      L_t = KL(π(·|x, y_<t) ‖ π_T(·|x', y_<t)), of whole distributions          Agarwal et al. 2024 (GKD)
    sampled   A_t = log π_T(y_t) - log μ(y_t): the sampled token's estimate of that KL, as a reward; with a correction
              for older samples log π_prox(y_t), of the policy at the start of the step, replaces log μ(y_t)

x' is the teacher's prompt: x itself, or x with an answer that only the teacher sees.  Both pull in the direction of
KL(π‖π_T) at every visited prefix; `full` has no variance from the token sampled there.  Both ignore how earlier tokens
change which prefixes are visited, except `sampled` with horizon = completion: its expected gradient is that of the
divergence between whole completions.  tests/laws/test_distillation.py enumerates all three.
"""

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Literal

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from posttrain.algorithms.advantages import group_zscore
from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.correction import Correction, corrected
from posttrain.algorithms.credit import Credit, CreditRule, Evidence, per_rollout
from posttrain.algorithms.losses import WEIGHTINGS, ClipRange, NonNegative, Weighting, clipped_surrogate
from posttrain.algorithms.terms import KlTerm, LossTerm, TokenView, kl_term, policy_term
from posttrain.errors import UserError
from posttrain.needs import Need
from posttrain.options.algorithm import TeacherOptions
from posttrain.options.bounds import NonNegativeFloat, PositiveFloat, Share, refuse_unread, within_bounds

Horizon = Literal["token", "completion"]

CLIP = 0.2
RIGHT_SIBLING = TeacherOptions(sees="sibling")
"""The student itself, which sees a sibling's right answer: needs neither another model nor given answers."""


@within_bounds
def distill(
    *,
    teacher: TeacherOptions = RIGHT_SIBLING,
    signal: Literal["full", "sampled"] = "full",
    horizon: Horizon = "token",
    coefficient: PositiveFloat = 1.0,
    reward_weight: NonNegativeFloat = 0.0,
    clip_low: Share = CLIP,
    clip_high: NonNegative = CLIP,
    token_weights: Weighting = "mean_over_tokens",
    correction: Correction | None = None,
    kl: KlTerm | None = None,
) -> Algorithm:
    """Agarwal et al. 2024, arXiv:2306.13649; self-taught: Hübotter et al. 2026 (SDPO), arXiv:2601.20802.

    `reward_weight` times GRPO's advantages are added to the teacher's signal (SDPG, arXiv:2606.04036).
    """
    full, is_corrected = signal == "full", correction is not None
    if full and horizon != "token":
        raise UserError(f"horizon = {horizon}: signal = full has no sum over later tokens. Use signal = sampled.")
    if kl is not None and kl.place == "reward":
        raise UserError("kl.place = reward: a teacher's signal is not a reward. Use kl.place = loss.")
    if full and not reward_weight:
        given = {"correction": is_corrected, "clip_low": clip_low != CLIP, "clip_high": clip_high != CLIP}
        refuse_unread("signal = sampled or a reward_weight", given)
    policy = corrected(policy_term(clipped_surrogate, clip=ClipRange(low=clip_low, high=clip_high)), correction)

    def with_kl(view: TokenView) -> Mapping[str, Tensor]:
        others = {} if policy.measures is None else policy.measures(view)
        return {**others, "kl_teacher": view.logprobs - view.columns.teacher_logprobs}

    terms = [replace(policy, needs=policy.needs | {Need.TEACHER_LOGPROBS}, measures=with_kl)]
    if full:
        of_teacher = LossTerm(  # KL(π‖π_T) of whole distributions, in nats per token
            name="distill",
            per_token=attrgetter("teacher_kl"),
            coefficient=coefficient,
            needs=frozenset({Need.TEACHER_KL}),
            reported=False,
            measures=lambda view: {"kl_teacher": view.teacher_kl},
        )
        terms = [of_teacher, *([policy] if reward_weight else [])]
    needs = () if full else (Need.TEACHER_LOGPROBS, *([Need.PROXIMAL_LOGPROBS] if is_corrected else []))
    return Algorithm(
        name="distill",
        credit=taught(0.0 if full else coefficient, horizon, reward_weight, corrected=is_corrected),
        credit_needs=frozenset(needs),
        terms=(*terms, *([] if kl is None else [kl_term(kl)])),
        token_weights=WEIGHTINGS[token_weights],
        least_group_size=2 if reward_weight or teacher.sees == "sibling" else 1,
        teacher=teacher,
    )


def taught(coefficient: float, horizon: Horizon, reward_weight: float, *, corrected: bool = False) -> CreditRule:
    """Advantages from a teacher's log-probs and from rewards.

        A_t = c g_t + w z                  g_t = log π_T(y_t) - log μ(y_t), in nats; z: the z-score of the reward
        A_t = c Σ_{s≥t} g_s + w z          horizon = completion: a token answers for all that follow

    For a token that is as likely under π_T as under μ, g is 0.  With a correction for older samples, π_prox replaces μ
    in g: the loss is weighed by π_prox/μ, so that its expectation is one under π_prox.
    """
    by_reward = per_rollout(group_zscore)

    def credit(evidence: Evidence) -> Credit:
        advantages = reward_weight * by_reward(evidence).advantages
        if coefficient:
            start = evidence.proximal_logprobs if corrected else evidence.behaviour_logprobs
            gaps = evidence.teacher_logprobs - start
            advantages = advantages + coefficient * (gaps if horizon == "token" else to_go(gaps, evidence.lengths))
        return Credit(advantages)

    return credit


def to_go(tokens: Float64[Tensor, " token"], lengths: Int64[Tensor, "prompt group"]) -> Float64[Tensor, " token"]:
    """The sum of each token's number and those of all that follow in its completion."""
    return torch.cat([part.flip(0).cumsum(0).flip(0) for part in tokens.split(lengths.flatten().tolist())])
