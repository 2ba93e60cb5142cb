"""On-policy distillation: a teacher's next-token distributions are learned on completions that the student sampled.

    full      L_t = KL(π(·|x, y_<t) ‖ π_T(·|x', y_<t)), of whole distributions          Agarwal et al. 2024 (GKD)
    sampled   A_t = log π_T(y_t) - log μ(y_t): what the sampled token says of that KL, as its reward; with a correction
              for older samples log π_prox(y_t), the policy's as the step finds it, stands for log μ(y_t)

x' is what the teacher goes on from: the prompt x, or x with an answer that only it sees.  Both pull in the direction of
KL(π‖π_T) at every visited prefix; `full` has no variance from the token sampled there.  How earlier tokens change which
prefixes are visited is left out, but for `sampled` with horizon = completion, whose expected gradient is that of the
divergence between whole completions.  tests/laws/test_distillation.py enumerates all three.
"""

from collections.abc import Mapping
from operator import attrgetter
from typing import Literal

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from posttrain.algorithms.advantages import group_zscore
from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.correction import Correction, corrected
from posttrain.algorithms.credit import Credit, CreditRule, Evidence, per_rollout
from posttrain.algorithms.losses import ClipRange, clipped_surrogate
from posttrain.algorithms.terms import KlTerm, LossTerm, TokenView, kl_term, policy_term
from posttrain.algorithms.token_weights import WEIGHTINGS, Weighting
from posttrain.errors import UserError
from posttrain.needs import Need
from posttrain.options.teacher import TeacherOptions

Horizon = Literal["token", "completion"]

CLIP = 0.2
RIGHT_SIBLING = TeacherOptions(sees="sibling")
"""The student itself, that sees how a sibling got it right: what needs neither another model nor answers."""


def distill(
    *,
    teacher: TeacherOptions = RIGHT_SIBLING,
    signal: Literal["full", "sampled"] = "full",
    horizon: Horizon = "token",
    coefficient: float = 1.0,
    reward_weight: float = 0.0,
    clip_low: float = CLIP,
    clip_high: float = CLIP,
    token_weights: Weighting = "mean_over_tokens",
    correction: Correction | None = None,
    kl: KlTerm | None = None,
) -> Algorithm:
    """Agarwal et al. 2024, arXiv:2306.13649; self-taught: Hübotter et al. 2026 (SDPO), arXiv:2601.20802.

    With a `reward_weight` GRPO's advantages, so many times, stand beside the teacher (SDPG, arXiv:2606.04036).
    """
    full = signal == "full"
    require_sense(coefficient, reward_weight, full=full, horizon=horizon, kl=kl)
    if full and not reward_weight:
        refuse_unused(correction, clip_low, clip_high)
    clip = ClipRange(low=clip_low, high=clip_high)
    policy = corrected(policy_term(clipped_surrogate, clip=clip), correction)
    if full:
        terms = [full_term(coefficient), *([policy] if reward_weight else [])]
    else:
        terms = [sampled_term(policy)]
    return Algorithm(
        name="distill",
        credit=taught(0.0 if full else coefficient, horizon, reward_weight, corrected=correction is not None),
        credit_needs=credit_needs(full=full, corrected=correction is not None),
        terms=(*terms, *([] if kl is None else [kl_term(kl)])),
        token_weights=WEIGHTINGS[token_weights],
        least_group_size=2 if reward_weight or teacher.sees == "sibling" else 1,
        teacher=teacher,
    )


def require_sense(coefficient: float, reward_weight: float, *, full: bool, horizon: Horizon, kl: KlTerm | None) -> None:
    """Refuse options that say nothing, or that cannot be together."""
    if not coefficient > 0:
        raise UserError(f"coefficient = {coefficient}: how much the teacher counts; use more than 0, or another row.")
    if not reward_weight >= 0:
        raise UserError(f"reward_weight = {reward_weight}: how much rewards count beside the teacher; use 0 or more.")
    if full and horizon != "token":
        raise UserError(
            f"horizon = {horizon} with signal = full: the full KL is of a position, and has no sum over those that"
            " follow.  Use signal = sampled, or leave horizon out."
        )
    if kl is not None and kl.place == "reward":
        raise UserError("kl.place = reward is taken off rewards, and a teacher's signal is none; use kl.place = loss.")


def refuse_unused(correction: Correction | None, clip_low: float, clip_high: float) -> None:
    """Refuse what belongs to the term with advantages, where there is none."""
    given = {
        "correction": correction is not None,
        "clip_low": clip_low != CLIP,
        "clip_high": clip_high != CLIP,
    }
    unused = [name for name, said in given.items() if said]
    if unused:
        raise UserError(
            f"{unused[0]}: belongs to the term with advantages, and signal = full with reward_weight = 0 has none: the"
            " full KL is computed of whatever tokens were sampled.  Use signal = sampled, give a reward_weight, or"
            " leave it out."
        )


def full_term(coefficient: float) -> LossTerm:
    """KL(π‖π_T) of whole distributions, in nats per token."""

    return LossTerm(
        name="distill",
        per_token=attrgetter("teacher_kl"),
        coefficient=coefficient,
        needs=frozenset({Need.TEACHER_KL}),
        reported=False,
        measures=lambda view: {"kl_teacher": view.teacher_kl},
    )


def sampled_term(policy: LossTerm) -> LossTerm:
    """The policy's term, for advantages that a teacher's log-probs are in; it tells the KL that they estimate."""

    def measures(view: TokenView) -> Mapping[str, Tensor]:
        told = {} if policy.measures is None else policy.measures(view)
        return {**told, "kl_teacher": view.logprobs - view.columns.teacher_logprobs}

    return LossTerm(
        name=policy.name,
        per_token=policy.per_token,
        needs=policy.needs | {Need.TEACHER_LOGPROBS},
        vanishes_without_advantage=True,
        clipped=policy.clipped,
        reported=False,
        measures=measures,
    )


def credit_needs(*, full: bool, corrected: bool) -> frozenset[Need]:
    """What the rule of credit reads: nothing where the teacher is only in the loss."""
    if full:
        return frozenset()
    return frozenset({Need.TEACHER_LOGPROBS, *([Need.PROXIMAL_LOGPROBS] if corrected else [])})


def taught(coefficient: float, horizon: Horizon, reward_weight: float, *, corrected: bool = False) -> CreditRule:
    """Advantages of a teacher's log-probs, and of rewards beside them.

        A_t = c g_t + w z                  g_t = log π_T(y_t) - log μ(y_t), in nats; z: the z-score of the reward
        A_t = c Σ_{s≥t} g_s + w z          horizon = completion: a token answers for all that follow

    A token that π_T finds as likely as μ does has nothing of the first.  Where older samples are corrected for, π_prox
    stands for μ in g: the loss is weighed by π_prox/μ, so that its expectation is one under π_prox.
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
    """Of each token the sum of its own number and those of all that follow in its completion."""
    return torch.cat([part.flip(0).cumsum(0).flip(0) for part in tokens.split(lengths.flatten().tolist())])
