"""One optimiser step on a batch, a micro-batch at a time.  It does not know which algorithm runs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from posttrain.algorithms import kl
from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.losses import ratio_statistics
from posttrain.algorithms.terms import LossTerm, TokenView, needs_of
from posttrain.algorithms.token_locality import LocalityCheck
from posttrain.batch import Batch, CreditedGroups, completions_of
from posttrain.errors import RunError
from posttrain.models.adapters.in_force import drops
from posttrain.models.forward import ForwardNeeds
from posttrain.models.logprobs import NextTokens
from posttrain.models.policy import Policy
from posttrain.models.shared_prompt.gradients import gradients_in_place
from posttrain.needs import Need
from posttrain.options.training import UpdateOptions
from posttrain.records import Group
from posttrain.runs.progress import Clock
from posttrain.runs.reports import UpdateTokens
from posttrain.training.critic import Critic
from posttrain.training.optimizer import apply_gradients
from posttrain.training.reference import Reference
from posttrain.training.teacher import Teacher
from posttrain.training.update_metrics import UpdateReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What an update minimises, besides the batch itself."""

    algorithm: Algorithm
    temperature: float
    """The one that sampled: log-probs are taken at it."""
    reference: Reference | None = None
    """Needed here only by the full KL; other terms find its log-probs in the batch."""
    teacher: Teacher | None = None
    """The same of a teacher."""
    measure_entropy: bool = False
    """Report the policy's entropy; costs a pass over the output layer."""
    keep_tokens: bool = False
    """Put what is computed for each token into the report."""
    critic: Critic | None = None
    """What gives values to the terms that need them."""
    largest_kl: float | None = None
    """Nats per token from the policy that sampled beyond which no step is taken; None takes every step."""
    check_terms: LocalityCheck | None = None
    """Refuses terms by which the split into micro-batches would change the gradient; None trusts them."""
    policy_frozen: bool = False
    """Whether the policy gets no gradient: while the critic alone learns."""

    def needs_for(self, terms: Sequence[LossTerm] | None = None) -> frozenset[Need]:
        needs = self.algorithm.needs if terms is None else needs_of(terms)
        return needs | ({Need.ENTROPY} if self.measure_entropy else set())


@dataclass(slots=True)
class Observations:
    """What the micro-batches of an update saw, token by token; its report is made of it at the end."""

    logprobs: list[Tensor] = field(default_factory=list)
    clipped: list[Tensor] = field(default_factory=list)
    clips_completions: bool = False
    entropies: list[Tensor] = field(default_factory=list)
    values: list[Tensor] | None = None
    """The critic's, where they are kept."""
    terms: dict[str, list[Tensor]] = field(default_factory=dict)
    """Of each term that is reported, by its metric, its values."""


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    objective: Objective,
    options: UpdateOptions,
    rate: float,
) -> UpdateReport:
    """Take one optimiser step; micro-batches bound memory and never change the gradient.

        loss = Σ_t w_t Σ_k c_k L_k(t)      w: the batch's token weights; k: the algorithm's terms

    Where the policy is already further from the one that sampled than `objective.largest_kl`, no step is taken and the
    report says so, as in Spinning Up and Stable-Baselines3.

    Raises RunError before the step where the loss or the gradient is not finite; the weights are then as they were.
    """
    optimizer.zero_grad(set_to_none=True)  # an update that failed may have left some of its gradient
    total = 0.0
    observed = Observations(values=[] if objective.keep_tokens else None)
    micro_batches = list(batch.split(options.tokens_per_microbatch, padded=policy.forward.padded))
    for micro in micro_batches:
        for share in micro_losses(policy, micro, objective, observed):
            share.backward()
            total += share.item()
    totals = token_totals(micro_batches, observed)
    largest = math.inf if objective.largest_kl is None else objective.largest_kl
    taken = totals["sums"]["kl_behaviour"] <= largest * totals["num_tokens"]
    norms = apply_gradients(optimizer, rate, options.max_grad_norm) if taken else {}
    if not taken:
        optimizer.zero_grad(set_to_none=True)
    for module, norm in norms.items():
        if not math.isfinite(norm):
            raise RunError(f"the gradient's norm ({module}) is {norm} although the loss is {total:.4g}.  {REMEDY}")
    return UpdateReport(
        loss=total,
        grad_norms=norms,
        learning_rate=rate,
        num_micro_batches=len(micro_batches),
        taken=taken,
        tokens=update_tokens(batch, micro_batches, observed) if objective.keep_tokens else None,
        **totals,
    )


def trial_gradient(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    objective: Objective,
    options: UpdateOptions,
    clock: Clock,
) -> None:
    """Compute the gradient of the largest of a step's batches and throw it away: its seconds stand for all of them.

    The others count by their tokens.  Nothing is done where all are empty.
    """
    first = max(batches, key=lambda batch: len(batch.tokens))
    if not first.completions:
        return
    with clock("update"):
        for micro in first.split(options.tokens_per_microbatch, padded=policy.forward.padded):
            for share in micro_losses(policy, micro, objective, Observations()):
                share.backward()
        optimizer.zero_grad(set_to_none=True)
        if policy.device.type == "cuda":
            torch.cuda.synchronize(policy.device)
    clock.seconds["update"] *= sum(len(batch.tokens) for batch in batches) / len(first.tokens)


REMEDY = "No step was taken.  Start again with a lower update.learning_rate."


def micro_loss(policy: Policy, micro: Batch, objective: Objective, observed: Observations) -> Float[Tensor, ""]:
    """The micro-batch's share of the update's loss, for `backward` alone; see `models.gradients`."""
    return torch.stack(list(micro_losses(policy, micro, objective, observed))).sum()


def micro_losses(policy: Policy, micro: Batch, objective: Objective, observed: Observations) -> Iterator[Tensor]:
    """The same in parts, each to be differentiated before the next is asked for: one for each trunk.

    A critic with a trunk of its own comes last, when the graph of the policy is gone.
    """
    terms, critic = objective.algorithm.terms, objective.critic
    apart = [term for term in terms if Need.VALUES in term.needs] if critic is not None and critic.own_trunk else []
    together = [term for term in terms if term not in apart]
    view = token_view(policy, micro, objective, together)
    share = share_of(together, view, micro, objective) if together else None
    observe(observed, view, together)
    if share is not None:
        yield share
    if apart and critic is not None:
        view = replace(view, logprobs=view.logprobs.detach(), known={})
        view = replace(view, known={"values": critic.values_of(micro).to(view.logprobs)})
        share = share_of(apart, view, micro, objective)
        observe_terms(observed, view, apart)
        yield share


def share_of(terms: Sequence[LossTerm], view: TokenView, micro: Batch, objective: Objective) -> Float[Tensor, ""]:
    """Σ_t w_t Σ_k c_k L_k(t) of some terms.  Raises RunError where a token's is no number."""
    algorithm = replace(objective.algorithm, terms=tuple(terms))
    if objective.check_terms is not None:
        objective.check_terms(terms, view, owner=f"algorithm {algorithm.name}")
    losses = algorithm.loss(view)
    require_finite_losses(losses, micro, algorithm, view)
    return (view.columns.weights * losses).sum()


def token_view(
    policy: Policy, micro: Batch, objective: Objective, terms: Sequence[LossTerm] | None = None
) -> TokenView:
    """The micro-batch's tokens with all that the objective's terms, or some of them, need of them."""
    needs = objective.needs_for(terms)
    wanted = forward_needs(objective, needs, micro)
    with gradients_in_place():
        parts = policy.forward.completion_logprobs(micro, wanted)
    logprobs = parts.logprobs
    assert logprobs is not None
    columns = micro.columns.map(lambda column: column.to(logprobs))
    if Need.PROXIMAL_LOGPROBS in needs and "proximal_logprobs" not in columns.known:
        # Of a step's only update: what is trained is what the step starts from.
        columns = replace(columns, known={**columns.known, "proximal_logprobs": logprobs.detach()})
    known = {str(name): divergence for name, divergence in parts.divergences.items()}
    if parts.entropies is not None:
        known["entropies"] = parts.entropies
    if parts.values is not None:
        known["values"] = parts.values.to(logprobs)
    return TokenView(logprobs=logprobs, rollout=micro.rollout.to(logprobs.device), columns=columns, known=known)


def forward_needs(objective: Objective, needs: frozenset[Need], micro: Batch) -> ForwardNeeds:
    """What the policy's forward pass computes of a micro-batch; reference and teacher run here, before it."""
    others = {Need.FULL_KL: reference_distributions, Need.TEACHER_KL: teacher_distributions}
    assert Need.VALUES not in needs or objective.critic is not None, "a need that was not met"
    return ForwardNeeds(
        temperature=objective.temperature,
        gradient=not objective.policy_frozen,
        divergences={need: made(objective, micro) for need, made in others.items() if need in needs},
        entropies=Need.ENTROPY in needs,
        entropy_gradient=Need.ENTROPY in objective.algorithm.needs,
        values=None if Need.VALUES not in needs or objective.critic is None else objective.critic.values,
    )


def observe(observed: Observations, view: TokenView, terms: Sequence[LossTerm]) -> None:
    """Keep what metrics are made of."""
    detached = replace(view, logprobs=view.logprobs.detach())
    observed.logprobs.append(detached.logprobs.double().cpu())
    if "entropies" in view.known:
        observed.entropies.append(view.entropies.detach().double().cpu())
    clipped = [term.clipped(detached.seen_with(term.needs)) for term in terms if term.clipped is not None]
    if clipped:
        observed.clipped.append(torch.stack(clipped).any(dim=0).cpu())
        observed.clips_completions = any(term.clips_completions for term in terms)
    observe_terms(observed, detached, terms)


@torch.no_grad()
def observe_terms(observed: Observations, view: TokenView, terms: Sequence[LossTerm]) -> None:
    if "values" in view.known and observed.values is not None:
        observed.values.append(view.values.detach().cpu())
    for term in terms:
        if term.reported:
            values = term.per_token(view.seen_with(term.needs))
            observed.terms.setdefault(term.metric_name, []).append(values.detach().double().cpu())
        if term.measures is not None:
            for name, values in term.measures(view.seen_with(term.needs)).items():
                observed.terms.setdefault(name, []).append(values.detach().double().cpu())


def reference_distributions(objective: Objective, micro: Batch) -> NextTokens:
    assert objective.reference is not None
    with objective.reference.entered() as reference:
        return distributions(reference, micro)


def teacher_distributions(objective: Objective, micro: Batch) -> NextTokens:
    assert objective.teacher is not None
    with objective.teacher.entered() as teacher:
        return distributions(teacher, micro.behind_teacher_prompts)


@torch.no_grad()
def distributions(policy: Policy, micro: Batch) -> NextTokens:
    found = policy.forward.completion_logprobs(micro, ForwardNeeds(logprobs=False, distributions=True)).distributions
    assert found is not None
    return found


def require_finite_losses(losses: Float[Tensor, " token"], micro: Batch, algorithm: Algorithm, view: TokenView) -> None:
    bad = (~torch.isfinite(losses.detach())).nonzero()
    if len(bad):
        token, owner = int(bad[0, 0]), f"algorithm {algorithm.name}"
        prompt, sample = micro.names[int(micro.rollout[token])]
        of_each = {term.name: term.losses(view, owner=owner)[token].item() for term in algorithm.terms}
        parts = ", ".join(f"{value:.4g} by its term {term}" for term, value in of_each.items())
        raise RunError(
            f"prompt {prompt}, sample {sample}: the loss of a token is {losses[token].item()} ({owner}: {parts}), where"
            f" log π is {view.logprobs[token].item():.4g} nats.  {REMEDY}"
        )


def token_totals(micro_batches: Sequence[Batch], observed: Observations) -> dict[str, Any]:
    """Sums and extremes over all tokens of the update, in the order that the micro-batches saw them."""
    logprobs = torch.cat(observed.logprobs)
    behaviour = torch.cat([micro.columns.behaviour_logprobs for micro in micro_batches])
    advantages = torch.cat([micro.columns.advantages for micro in micro_batches])
    ratios, gap = ratio_statistics(logprobs - behaviour), (logprobs - behaviour).abs()
    sums = {
        "sampling/sampling_logp_difference/mean": gap.sum().item(),
        "ratio/mean": ratios.total,
        "kl_behaviour": ratios.kl_total,
    }
    completion_sums: dict[str, float] = {}
    if observed.clipped:
        counted = completion_sums if observed.clips_completions else sums
        of_each = 1 / token_counts(micro_batches) if observed.clips_completions else torch.ones(len(logprobs))
        clipped = torch.cat(observed.clipped).double() * of_each
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
        "gaps": gap,
    }


def update_tokens(batch: Batch, micro_batches: Sequence[Batch], observed: Observations) -> UpdateTokens:
    """All that an update computed for each of its tokens, and what it was given of them.

    The micro-batches hold the completions of the batch in its order.
    """
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


def token_counts(micro_batches: Sequence[Batch]) -> Float64[Tensor, " token"]:
    counts = [torch.tensor(micro.num_sampled) for micro in micro_batches]
    return torch.cat([of[micro.rollout.cpu()] for of, micro in zip(counts, micro_batches, strict=True)]).double()


@torch.no_grad()
def group_logprobs(
    policy: Policy,
    groups: Sequence[Group],
    *,
    temperature: float,
    max_tokens: int,
    teacher_prompts: Sequence[Sequence[tuple[int, ...]]] | None = None,
) -> Float64[Tensor, " token"]:
    """log-probs of every sampled token of the groups under another policy, in order, in nats.

    Behind `teacher_prompts`, where they are given, in place of the groups' own.
    """
    parts: list[Tensor] = []
    batch = completions_of(groups, teacher_prompts).behind_teacher_prompts
    for micro in batch.split(max_tokens, padded=policy.forward.padded):
        parts.append(policy.completion_logprobs(micro, temperature=temperature).double().cpu())
    return torch.cat(parts)


def undropped_gaps(policy: Policy, groups: CreditedGroups, *, temperature: float, max_tokens: int) -> Tensor | None:
    """|log π - log μ| of tokens before a step's first update, without dropout; None where updates drop nothing.

    Of all tokens where log π is known, else of the first group, which is scored for this alone.
    """
    if not drops(policy.model):
        return None
    logprobs = groups.columns.known.get("proximal_logprobs")
    if logprobs is None:
        logprobs = group_logprobs(policy, groups.groups[:1], temperature=temperature, max_tokens=max_tokens)
    return (logprobs - groups.columns.behaviour_logprobs[: len(logprobs)]).abs()
