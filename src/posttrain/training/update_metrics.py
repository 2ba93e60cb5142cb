"""What updates report, and the metrics of a step that several of them make: sums over tokens, divided once."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

FIRST_ALONE = "sampling/sampling_logp_difference/mean"
"""Of the first update only, when sampler and trainer have the same weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What one optimiser step did."""

    loss: float
    grad_norms: Mapping[str, float]
    """Norm of the gradient of each trained module before clipping."""
    learning_rate: float
    num_micro_batches: int
    num_tokens: int
    """Completion tokens trained on."""
    sums: Mapping[str, float]
    """By metric, the sum over those tokens of what the metric is the mean of."""
    ratio_range: tuple[float, float]
    """Least and greatest ratio π/μ."""
    largest_gap: float
    """Greatest difference of the sampler's and the trainer's log-prob of a token, in nats."""

    @property
    def kl_behaviour(self) -> float:
        """How far the policy was from the one that sampled when the update began, in nats per token."""
        return self.sums["kl_behaviour"] / self.num_tokens


def update_metrics(reports: Sequence[UpdateReport]) -> dict[str, float]:
    """One step's metrics from the reports of its updates.

    Means over tokens are taken over the tokens of all updates together, extremes over all, loss and norm are means over
    updates, and the gap between sampler and trainer is that of the first update, when both have the same weights.
    """
    if not reports:
        return {}
    first, num_tokens = reports[0], sum(report.num_tokens for report in reports)
    means = {name: sum(report.sums[name] for report in reports) / num_tokens for name in first.sums}
    means[FIRST_ALONE] = first.sums[FIRST_ALONE] / first.num_tokens
    modules = first.grad_norms if len(first.grad_norms) > 1 else ()
    return {
        "loss": fmean(report.loss for report in reports),
        "grad_norm": fmean(math.hypot(*report.grad_norms.values()) for report in reports),
        **{f"grad_norm/{module}": fmean(report.grad_norms[module] for report in reports) for module in modules},
        "learning_rate": reports[-1].learning_rate,
        "num_micro_batches": float(sum(report.num_micro_batches for report in reports)),
        "tokens/trained": float(num_tokens),
        **means,
        "sampling/sampling_logp_difference/max": first.largest_gap,
        "ratio/min": min(report.ratio_range[0] for report in reports),
        "ratio/max": max(report.ratio_range[1] for report in reports),
    }
