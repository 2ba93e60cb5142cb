"""From the scores of several reward functions to one advantage: summed and then normalised, or the other way round."""

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from posttrain.algorithms.advantages import ROUNDING, group_zscore, informative
from posttrain.algorithms.credit import Credit, CreditRule, Evidence
from posttrain.errors import RunError
from posttrain.records import Grades

RewardAggregation = Literal["sum_then_normalize", "normalize_then_sum"]


def decoupled_zscore(
    scores: Float[Tensor, "function prompt group"],
    weights: Float[Tensor, " function"],
    *,
    deviation: Literal["population", "sample"] = "population",
    epsilon: float = 0.0,
) -> Float[Tensor, "prompt group"]:
    """Each function's scores standardised in their group, then their weighted sum in units of its deviation.

        z_kij = (s_kij - mean_l s_kil) / (std_l s_kil + ε)  each function by itself, over the rollouts that it scored
        S_ij  = Σ_k w_k z_kij                               A_ij = S_ij / (std_lm S_lm + ε)

    Liu et al. 2026 (GDPO), arXiv:2601.05242, which also subtracts the mean of S over the step: that mean is 0, as each
    function's z adds up to 0 in every group, and subtracting its rounding would give groups without information an
    advantage.  Which function's scores spread wider no longer matters, only weights do; with the sum, (1, 0) and (0, 1)
    would be worth the same.  std_lm goes over all rollouts that a function of non-zero weight scored; both deviations
    divide by their number (population), or by one less (sample), and have ε added, 0 in the paper and 1e-4 in TRL.
    S that is only rounding, as of two functions that cancel, is exactly 0, and so is a rollout that nothing scored.
    """
    counted = ~scores.isnan() & (weights != 0)[:, None, None]
    z = torch.stack([group_zscore(column, deviation=deviation, epsilon=epsilon) for column in scores])
    parts = torch.where(counted, weights[:, None, None] * z, 0.0)
    total, unit = parts.sum(dim=0), torch.finfo(scores.dtype).eps * parts.abs().sum(dim=0)
    total = torch.where(total.abs() > ROUNDING * unit, total, 0.0)
    largest = total.abs().amax()
    scaled = total / largest  # at most 1, so that the squares of tiny sums do not underflow
    num_scored = counted.any(dim=0).sum()
    spread = (scaled.square().sum() / (num_scored - 1 if deviation == "sample" else num_scored)).sqrt()
    return torch.where(largest > 0, scaled / (spread + epsilon / largest), 0.0)


def per_function(
    advantage: Callable[[Float64[Tensor, "function prompt group"], Float64[Tensor, " function"]], Tensor],
) -> CreditRule:
    """Lift a rule of scores and weights, to one advantage for each completion, to every one of its tokens."""

    def credit(evidence: Evidence) -> Credit:
        if evidence.token_rewards is not None:
            raise RunError(
                "reward_aggregation = normalize_then_sum normalises scores, and a reward also gave token rewards or"
                " spans. Use sum_then_normalize."
            )
        advantages = advantage(evidence.scores, evidence.weights)
        return Credit(advantages.flatten().repeat_interleave(evidence.lengths.flatten()))

    return credit


def sums_differ(grades: Grades) -> Bool[Tensor, " prompt"]:
    """Whether a group holds two scored rollouts with different rewards, or one whose steps earned something."""
    scored = ~grades.rewards.isnan()
    stepwise = (scored & (grades.marked != 0)[grades.weights != 0].any(dim=0)).any(dim=1)
    return informative(grades.rewards) | stepwise if grades.marks else informative(grades.rewards)


def totals_differ(grades: Grades) -> Bool[Tensor, " prompt"]:
    return informative(grades.totals)


def scores_differ(grades: Grades) -> Bool[Tensor, " prompt"]:
    """Whether a function of non-zero weight scores two rollouts of a group differently."""
    columns = grades.clipped[grades.weights != 0]
    return torch.stack([informative(column) for column in columns]).any(dim=0) if len(columns) else sums_differ(grades)
