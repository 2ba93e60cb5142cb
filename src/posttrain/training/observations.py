"""The numbers of an update's tokens: kept micro-batch by micro-batch, read together, and summed for its report."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.algorithms import kl
from posttrain.algorithms.losses import ratio_statistics
from posttrain.algorithms.terms import LossTerm, TokenView
from posttrain.batch import Batch
from posttrain.models.transfers import on_cpu
from posttrain.runs.reports import UpdateTokens
from posttrain.training.metrics import STALENESS


@dataclass(slots=True)
class Observations:
    """Numbers of the update's tokens for its report, by micro-batch; on the model's device until `read`."""

    logprobs: list[Tensor] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    """Of each part that was differentiated."""
    finite: list[Tensor] | None = None
    """Whether each of those parts is finite for every token; None: a part that is not raises at once, after a wait."""
    clipped: list[Tensor] = field(default_factory=list)
    clips_completions: bool = False
    entropies: list[Tensor] = field(default_factory=list)
    values: list[Tensor] | None = None
    """The critic's, if they are kept."""
    terms: dict[str, list[Tensor]] = field(default_factory=dict)
    """Values of the reported terms, by metric."""

    @staticmethod
    def read(parts: Sequence["Observations"]) -> None:
        """Move all numbers to the CPU, which waits once for them."""
        lists = [each for part in parts for each in (part.logprobs, part.losses, part.clipped, part.entropies)]
        lists += [each for part in parts for each in (part.finite, part.values) if each is not None]
        lists += [each for part in parts for each in part.terms.values()]
        there = iter(on_cpu([number for each in lists for number in each]))
        for each in lists:
            each[:] = [next(there) for _ in each]

    @classmethod
    def joined(cls, parts: Sequence["Observations"]) -> "Observations":
        """Those of all micro-batches, in order."""
        whole = cls(values=[] if any(part.values is not None for part in parts) else None, finite=[])
        for part in parts:
            whole.logprobs += part.logprobs
            whole.losses += part.losses
            whole.finite = [*(whole.finite or []), *(part.finite or [])]
            whole.clipped += part.clipped
            whole.clips_completions |= part.clips_completions
            whole.entropies += part.entropies
            if whole.values is not None and part.values is not None:
                whole.values += part.values
            for name, values in part.terms.items():
                whole.terms.setdefault(name, []).extend(values)
        return whole


def observe(observed: Observations, view: TokenView, terms: Sequence[LossTerm], owner: str) -> None:
    """Keep the numbers for metrics."""
    detached = replace(view, logprobs=view.logprobs.detach())
    observed.logprobs.append(detached.logprobs.double())
    if "entropies" in view.known:
        observed.entropies.append(view.entropies.detach().double())
    clipped = [term.read(term.clipped, detached, owner=owner) for term in terms if term.clipped is not None]
    if clipped:
        observed.clipped.append(torch.stack(clipped).any(dim=0))
        observed.clips_completions = any(term.clips_completions for term in terms)
    observe_terms(observed, detached, terms, owner)


@torch.no_grad()
def observe_terms(observed: Observations, view: TokenView, terms: Sequence[LossTerm], owner: str) -> None:
    """Keep the values and measures of terms."""
    if "values" in view.known and observed.values is not None:
        observed.values.append(view.values.detach())
    for term in terms:
        found = {term.metric_name: term.read(term.per_token, view, owner=owner)} if term.reported else {}
        if term.measures is not None:
            found |= term.read(term.measures, view, owner=owner)
        for name, values in found.items():
            observed.terms.setdefault(name, []).append(values.detach().double())


def token_totals(micro_batches: Sequence[Batch], observed: Observations) -> dict[str, Any]:
    """Sums and extremes over all tokens of the update, in the order of the micro-batches."""
    logprobs = torch.cat(observed.logprobs)
    behaviour = torch.cat([micro.columns.behaviour_logprobs for micro in micro_batches])
    advantages = torch.cat([micro.columns.advantages for micro in micro_batches])
    ratios, gap = ratio_statistics(logprobs - behaviour), (logprobs - behaviour).abs()
    sums = {
        "sampling/sampling_logp_difference/mean": gap.sum().item(),
        "ratio/mean": ratios.total,
        "kl_behaviour": ratios.kl_total,
    }
    stale = torch.cat([micro.columns.known.get(STALENESS, torch.zeros(0)) for micro in micro_batches])
    completion_sums: dict[str, float] = {}
    if observed.clipped:
        counted = completion_sums if observed.clips_completions else sums
        clipped = torch.cat(observed.clipped).double()
        if observed.clips_completions:  # a completion's tokens count one together
            clipped *= torch.cat(
                [(1 / torch.tensor(micro.num_sampled).double())[micro.rollout.cpu()] for micro in micro_batches]
            )
        counted |= {
            "clip_ratio/low_mean": (clipped * (advantages < 0)).sum().item(),
            "clip_ratio/high_mean": (clipped * (advantages > 0)).sum().item(),
            "clip_ratio/region_mean": clipped.sum().item(),
        }
    if "kl" not in observed.terms and all("reference_logprobs" in micro.columns.known for micro in micro_batches):
        reference = torch.cat([micro.columns.reference_logprobs for micro in micro_batches])
        sums["kl"] = kl.k3(logprobs, reference).sum().item()
    sums |= {name: torch.cat(values).sum().item() for name, values in observed.terms.items()}
    if observed.entropies:
        sums["entropy"] = torch.cat(observed.entropies).sum().item()
    return {
        "num_tokens": len(logprobs),
        "num_completions": sum(len(micro.completions) for micro in micro_batches),
        "sums": sums,
        "completion_sums": completion_sums,
        "ratio_range": (ratios.lowest, ratios.highest),
        "gaps": gap[stale == 0] if len(stale) else gap,
        "effective_sample_size": effective_sample_size(logprobs - behaviour) if len(stale) else None,
    }


def effective_sample_size(log_ratios: Float64[Tensor, " token"]) -> float:
    """The effective share of weighted samples: how many samples of π they are worth, from 1/n to 1 (equal weights).

    (Σ w)² / (n Σ w²),   w = exp(log π - log μ)      Kong 1992
    """
    weights = (log_ratios - log_ratios.max()).exp()  # scaled, so that none overflows
    return (weights.sum().square() / (len(weights) * weights.square().sum())).item()


def update_tokens(batch: Batch, micro_batches: Sequence[Batch], observed: Observations) -> UpdateTokens:
    """All columns of the update's tokens, given and computed.  Micro-batches keep the order of the batch."""
    logprobs = torch.cat(observed.logprobs)
    parts = [micro.columns.named() for micro in micro_batches]
    given = {name: torch.cat([part[name] for part in parts]) for name in batch.columns.named()}
    found = {
        "entropy": observed.entropies,
        "new_values": observed.values,
        "clipped": observed.clipped,
        **observed.terms,
    }
    columns = {
        "policy_logprobs": logprobs,
        "ratio": (logprobs - given["behaviour_logprobs"]).exp(),
        **given,
        **{name: torch.cat(values) for name, values in found.items() if values},
    }
    rollouts = [(draw, *name) for draw, name in zip(batch.draws, batch.names, strict=True)]
    return UpdateTokens(rollouts=rollouts, lengths=batch.num_sampled, columns=columns)
