"""One optimiser step on a batch, a micro-batch at a time.  It does not know which algorithm runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from posttrain.algorithms import kl
from posttrain.algorithms.losses import ratio_statistics
from posttrain.algorithms.table import Algorithm
from posttrain.batch import Batch, everything
from posttrain.errors import RunError
from posttrain.models.gradients import gradients_in_place
from posttrain.models.logprobs import full_kl, token_entropies, token_logprobs
from posttrain.models.policy import Policy
from posttrain.options.training import UpdateOptions
from posttrain.records import Group
from posttrain.training.optimizer import apply_gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What an update minimises, besides the batch itself."""

    algorithm: Algorithm
    temperature: float
    """The one that sampled: log-probs are taken at it."""
    reference: Policy | None = None
    """Needed here only by the full KL; other terms find its log-probs in the batch."""
    measure_entropy: bool = False
    """Report the policy's entropy; costs a pass over the output layer."""


@dataclass(slots=True)
class Observed:
    """What the micro-batches of an update saw, token by token; metrics are made of it at the end."""

    logprobs: list[Tensor] = field(default_factory=list)
    clipped: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)
    entropies: list[Tensor] = field(default_factory=list)


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    objective: Objective,
    options: UpdateOptions,
    rate: float,
) -> dict[str, float]:
    """Take one optimiser step; micro-batches bound memory and never change the gradient.  Returns its metrics.

        loss = Σ_t w_t (token loss_t + β KL_t)      w: the batch's token weights

    Raises RunError before the step where the loss or the gradient is not finite; the weights are then as they were.
    """
    optimizer.zero_grad(set_to_none=True)  # an update that failed may have left some of its gradient
    total = 0.0
    observed = Observed()
    micro_batches = list(batch.split(options.tokens_per_microbatch))
    for micro in micro_batches:
        loss = micro_loss(policy, micro, objective, observed)
        loss.backward()
        total += loss.item()
    grad_norm = apply_gradients(optimizer, rate, options.max_grad_norm)
    if not math.isfinite(grad_norm):
        raise RunError(f"the gradient's norm is {grad_norm} although the loss is {total:.4g}.  {REMEDY}")
    return {
        "loss": total,
        "grad_norm": grad_norm,
        "learning_rate": rate,
        "num_micro_batches": float(len(micro_batches)),
        "tokens/trained": float(len(batch.tokens)),
        **observed_metrics(batch, micro_batches, observed, objective),
    }


REMEDY = "No step was taken.  Start again with a lower update.learning_rate."


def micro_loss(policy: Policy, micro: Batch, objective: Objective, observed: Observed) -> Float[Tensor, ""]:
    """The micro-batch's share of the update's loss, for `backward` alone; see `models.gradients`."""
    algorithm, temperature = objective.algorithm, objective.temperature
    with gradients_in_place():
        hidden = policy.forward.completion_hidden(micro.prompts, micro.completions, micro.prompt_of)
        logprobs = token_logprobs(hidden, policy.head, micro.tokens.to(hidden.device), temperature=temperature)
    here = micro_on(logprobs, micro)
    denominator = here.reference_logprobs if algorithm.ratio_to == "reference" else here.behaviour_logprobs
    assert denominator is not None
    losses = algorithm.token_loss(logprobs, denominator, here.advantages, here.rollout)
    observed.logprobs.append(logprobs.detach().double().cpu())
    observed.clipped.append(algorithm.clipped(logprobs.detach(), denominator, here.advantages, here.rollout).cpu())
    if algorithm.kl is not None and algorithm.kl.place == "loss":
        if algorithm.kl.estimator == "full":
            term = full_kl(hidden, policy.head, reference_hidden(objective, micro), temperature=temperature)
        else:
            assert here.reference_logprobs is not None
            term = kl.ESTIMATORS[algorithm.kl.estimator](logprobs, here.reference_logprobs)
        losses = losses + algorithm.kl.coefficient * term
        observed.kl.append(term.detach().double().cpu())
    if objective.measure_entropy:
        observed.entropies.append(token_entropies(hidden, policy.head, temperature=temperature).double().cpu())
    require_finite_losses(losses, micro)
    return (here.token_weights * losses).sum()


def micro_on(like: Float[Tensor, " token"], micro: Batch) -> Batch:
    """The micro-batch's token columns on the device and in the precision of its log-probs."""
    reference = micro.reference_logprobs
    return replace(
        micro,
        rollout=micro.rollout.to(like.device),
        advantages=micro.advantages.to(like),
        token_weights=micro.token_weights.to(like),
        behaviour_logprobs=micro.behaviour_logprobs.to(like),
        reference_logprobs=None if reference is None else reference.to(like),
    )


@torch.no_grad()
def reference_hidden(objective: Objective, micro: Batch) -> tuple[Tensor, Tensor]:
    """The reference's hidden states and output matrix for the full KL."""
    assert objective.reference is not None
    hidden = objective.reference.forward.completion_hidden(micro.prompts, micro.completions, micro.prompt_of)
    return hidden, objective.reference.head


def require_finite_losses(losses: Float[Tensor, " token"], micro: Batch) -> None:
    """Stop before the backward pass where a token's loss is not a number, naming the completion."""
    bad = (~torch.isfinite(losses.detach())).nonzero()
    if len(bad):
        prompt, sample = micro.names[int(micro.rollout[int(bad[0, 0])])]
        raise RunError(
            f"prompt {prompt}, sample {sample}: the loss of a token is {losses[bad[0, 0]].item()}.  {REMEDY}"
        )


def observed_metrics(
    batch: Batch, micro_batches: Sequence[Batch], observed: Observed, objective: Objective
) -> dict[str, float]:
    """Metrics over all tokens of the update, in the order that the micro-batches saw them."""
    logprobs, behaviour = torch.cat(observed.logprobs), torch.cat([m.behaviour_logprobs for m in micro_batches])
    advantages, clipped = torch.cat([m.advantages for m in micro_batches]), torch.cat(observed.clipped)
    ratios = ratio_statistics(logprobs - behaviour)
    gap = (logprobs - behaviour).abs()
    metrics = {
        "sampling/sampling_logp_difference/mean": gap.mean().item(),
        "sampling/sampling_logp_difference/max": gap.max().item(),
        "ratio/mean": ratios.mean,
        "ratio/min": ratios.lowest,
        "ratio/max": ratios.highest,
        "kl_behaviour": ratios.kl,
        "clip_ratio/low_mean": (clipped & (advantages < 0)).double().mean().item(),
        "clip_ratio/high_mean": (clipped & (advantages > 0)).double().mean().item(),
        "clip_ratio/region_mean": clipped.double().mean().item(),
    }
    if observed.kl:
        metrics["kl"] = torch.cat(observed.kl).mean().item()
    elif batch.reference_logprobs is not None:
        reference = torch.cat([m.reference_logprobs for m in micro_batches if m.reference_logprobs is not None])
        metrics["kl"] = kl.k3(logprobs, reference).mean().item()
    if observed.entropies:
        metrics["entropy"] = torch.cat(observed.entropies).mean().item()
    return metrics


@torch.no_grad()
def group_logprobs(
    policy: Policy, groups: Sequence[Group], *, temperature: float, max_tokens: int
) -> Float64[Tensor, " token"]:
    """log-probs of every completion token of the groups under another policy, in order, in nats."""
    parts: list[Tensor] = []
    for micro in everything(groups).split(max_tokens):
        hidden = policy.forward.completion_hidden(micro.prompts, micro.completions, micro.prompt_of)
        logprobs = token_logprobs(hidden, policy.head, micro.tokens.to(hidden.device), temperature=temperature)
        parts.append(logprobs.double().cpu())
    return torch.cat(parts)
