"""Reports of updates, and the metrics of a step from them: sums over tokens, divided once."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from jaxtyping import Float64
from torch import Tensor

from posttrain.runs.reports import UpdateTokens

FIRST_ALONE = "sampling/sampling_logp_difference/mean"
"""Taken from the first update, when sampler and trainer have the same weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """One optimiser step."""

    loss: float
    grad_norms: Mapping[str, float]
    """Norm of the gradient of each trained module before clipping."""
    learning_rate: float
    num_micro_batches: int
    num_tokens: int
    """Completion tokens trained on."""
    num_completions: int
    """Completions trained on."""
    sums: Mapping[str, float]
    """Sums over the tokens, by the metric that is their mean."""
    completion_sums: Mapping[str, float]
    """The same for metrics that are means over completions."""
    ratio_range: tuple[float, float]
    """Least and greatest ratio π/μ."""
    gaps: Float64[Tensor, " token"]
    """|log π - log μ| of each token, in nats."""
    tokens: UpdateTokens | None = None
    """The columns of the tokens, if they are kept."""
    taken: bool = True
    """Whether the step was taken; False if the KL limit was exceeded before it."""

    @property
    def kl_behaviour(self) -> float:
        return self.sums["kl_behaviour"] / self.num_tokens


def kl_limit(limit: float | None, before: Sequence[UpdateReport], *, noisy: bool) -> float | None:
    """The KL to the sampling policy beyond which the next update of a step is skipped; None takes it.

    With `noisy` an adapter's dropout adds noise to the KL, which the first update measures and the limit includes.
    """
    if limit is None or (noisy and not before):
        return None
    return limit + (before[0].kl_behaviour if noisy else 0.0)


def update_metrics(reports: Sequence[UpdateReport]) -> dict[str, float]:
    """One step's metrics: means over the tokens of all updates, and extremes; loss and norm are means over updates.

    The gap between sampler and trainer is that of the first update.
    """
    if not reports:
        return {}
    first, num_tokens = reports[0], sum(report.num_tokens for report in reports)
    num_completions = sum(report.num_completions for report in reports)
    means = {name: sum(report.sums[name] for report in reports) / num_tokens for name in first.sums}
    for name in first.completion_sums:
        means[name] = sum(report.completion_sums[name] for report in reports) / num_completions
    means[FIRST_ALONE] = first.sums[FIRST_ALONE] / first.num_tokens
    modules = first.grad_norms if len(first.grad_norms) > 1 else ()
    return {
        "loss": fmean(report.loss for report in reports),
        "grad_norm": fmean(math.hypot(*report.grad_norms.values()) for report in reports),
        **{f"grad_norm/{module}": fmean(report.grad_norms[module] for report in reports) for module in modules},
        "learning_rate": reports[-1].learning_rate,
        "num_micro_batches": float(sum(report.num_micro_batches for report in reports)),
        "tokens/trained": float(num_tokens),
        "completions/trained": float(num_completions),
        **means,
        "sampling/sampling_logp_difference/max": first.gaps.max().item(),
        "ratio/min": min(report.ratio_range[0] for report in reports),
        "ratio/max": max(report.ratio_range[1] for report in reports),
    }
