"""One optimiser step on a batch, one micro-batch at a time, for any algorithm."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.terms import LossTerm, TokenView, needs_of
from posttrain.algorithms.token_locality import LocalityCheck
from posttrain.batch import Batch, CreditedGroups, completions_of
from posttrain.errors import RunError
from posttrain.models.forward import ForwardNeeds
from posttrain.models.logprobs import NextTokens
from posttrain.models.native.native_decoder import native_decoder
from posttrain.models.native.native_layers import training_forward
from posttrain.models.native.native_scoring import native_logprobs
from posttrain.models.policy import Policy
from posttrain.models.shared_prompt.fused import gradients_in_place
from posttrain.needs import NEED_OF, Need
from posttrain.options.training import UpdateOptions
from posttrain.records import Group
from posttrain.runs.reports import UpdateTokens
from posttrain.training.critic import Critic
from posttrain.training.metrics import UpdateReport
from posttrain.training.observations import Observations, observe, observe_terms, token_totals, update_tokens
from posttrain.training.optimizer import apply_gradients
from posttrain.training.reference import Reference, Teacher

REMEDY = "No step was taken.  Start again with a lower update.learning_rate."


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What an update minimises, except its batch."""

    algorithm: Algorithm
    temperature: float
    """The sampling temperature, at which log-probs are computed."""
    reference: Reference | None = None
    """For the full KL; other terms read its log-probs in the batch."""
    teacher: Teacher | None = None
    """For the full KL to it."""
    measure_entropy: bool = False
    """Report the policy's entropy, at the cost of a pass over the output layer."""
    keep_tokens: bool = False
    """Report the numbers computed per token."""
    critic: Critic | None = None
    """Computes values for the terms that need them."""
    largest_kl: float | None = None
    """KL to the sampling policy, in nats per token, above which the step is skipped; None: never skipped."""
    check_terms: LocalityCheck | None = None
    """Rejects terms whose gradient depends on the split into micro-batches; None: not checked."""
    policy_frozen: bool = False
    """Whether only the critic learns, and the policy gets no gradient."""

    @property
    def owner(self) -> str:
        """The algorithm, for messages."""
        return f"algorithm {self.algorithm.name}"


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    objective: Objective,
    options: UpdateOptions,
    rate: float,
) -> UpdateReport:
    """Take one optimiser step; micro-batches limit memory and never change the gradient.

        loss = Σ_t w_t Σ_k c_k L_k(t)      w: the batch's token weights; k: the algorithm's terms

    If the policy is further from the sampling policy than `objective.largest_kl`, the step is skipped and the report
    says so, as in Spinning Up and Stable-Baselines3.

    Raises RunError before the step, with weights unchanged, if the loss or the gradient is not finite.
    """
    optimizer.zero_grad(set_to_none=True)  # a failed update may have left some of its gradient
    ranks, found = policy.ranks, []
    split = batch.split(options.tokens_per_microbatch, padded=policy.forward.padded, ranks=ranks)
    micro_batches = list(split)
    for dealt in ranks.deal(micro_batches, Batch.num_read):
        seen = Observations(values=[] if objective.keep_tokens else None, finite=[])
        for share in micro_losses(policy, dealt.item, objective, seen):
            dealt.weighed(share).backward()
            seen.losses.append(share.detach())
        found.append((dealt, seen))
    Observations.read([seen for _, seen in found])
    observed = Observations.joined(ranks.in_order(found))
    if not all(observed.finite or ()):
        raise_non_finite(policy, micro_batches, objective)
    total = 0.0
    for loss in observed.losses:
        total += loss.item()
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


@torch.no_grad()
def raise_non_finite(policy: Policy, micro_batches: Sequence[Batch], objective: Objective) -> NoReturn:
    """Compute the losses again, on all ranks, and raise RunError with the first token whose loss is not finite."""
    for micro in micro_batches:
        for _ in micro_losses(policy, micro, objective, Observations()):
            """Reading a part checks it."""
    raise RunError(f"the loss of a token is not finite, but is when computed again ({objective.owner}).  {REMEDY}")


def micro_loss(policy: Policy, micro: Batch, objective: Objective, observed: Observations) -> Float[Tensor, ""]:
    """The micro-batch's share of the update's loss, only for `backward`; see `gradients_in_place`."""
    return torch.stack(list(micro_losses(policy, micro, objective, observed))).sum()


def micro_losses(policy: Policy, micro: Batch, objective: Objective, observed: Observations) -> Iterator[Tensor]:
    """The same in parts, one per trunk; differentiate each part before taking the next.

    A critic with a separate trunk comes last, after the policy's graph is freed.
    """
    terms, critic = objective.algorithm.terms, objective.critic
    apart = [term for term in terms if Need.VALUES in term.needs] if critic is not None and critic.own_trunk else []
    together = [term for term in terms if term not in apart]
    view = token_view(policy, micro, objective, together)
    share = share_of(together, view, micro, objective, observed) if together else None
    observe(observed, view, together, objective.owner)
    if share is not None:
        yield share
    if apart and critic is not None:
        view = replace(view, logprobs=view.logprobs.detach(), known={})
        view = replace(view, known={"values": critic.values_of(micro).to(view.logprobs)})
        share = share_of(apart, view, micro, objective, observed)
        observe_terms(observed, view, apart, objective.owner)
        yield share


def share_of(
    terms: Sequence[LossTerm], view: TokenView, micro: Batch, objective: Objective, observed: Observations
) -> Float[Tensor, ""]:
    """Σ_t w_t Σ_k c_k L_k(t) of some terms.  Raises RunError if a token's loss is not finite, or notes it for later."""
    owner = objective.owner
    if objective.check_terms is not None:
        objective.check_terms(terms, view, owner=owner)
    losses = replace(objective.algorithm, terms=tuple(terms)).loss(view)
    finite = torch.isfinite(losses.detach())
    if observed.finite is not None:
        observed.finite.append(finite.all())
    elif not bool(finite.all()):
        token = int((~finite).nonzero()[0, 0])
        prompt, sample = micro.names[int(micro.rollout[token])]
        of_each = {term.name: term.losses(view, owner=owner)[token].item() for term in terms}
        parts = ", ".join(f"{value:.4g} by its term {term}" for term, value in of_each.items())
        raise RunError(
            f"prompt {prompt}, sample {sample}: the loss of a token is {losses[token].item()} ({owner}: {parts}), where"
            f" log π is {view.logprobs[token].item():.4g} nats.  {REMEDY}"
        )
    return (view.columns.weights * losses).sum()


def token_view(
    policy: Policy, micro: Batch, objective: Objective, terms: Sequence[LossTerm] | None = None
) -> TokenView:
    """The micro-batch's tokens with the columns that the terms, or some of them, need.

    Reference and teacher run first, then the policy.
    """
    needs = needs_of(objective.algorithm.terms if terms is None else terms)
    needs |= {Need.ENTROPY} if objective.measure_entropy else set()
    divergences: dict[str, NextTokens] = {}
    if Need.FULL_KL in needs:
        divergences[Need.FULL_KL] = distributions(objective.reference, micro)
    if Need.TEACHER_KL in needs:
        divergences[Need.TEACHER_KL] = distributions(objective.teacher, micro.behind_teacher_prompts)
    assert Need.VALUES not in needs or objective.critic is not None, "a need that was not met"
    wanted = ForwardNeeds(
        temperature=objective.temperature,
        gradient=not objective.policy_frozen,
        divergences=divergences,
        entropies=Need.ENTROPY in needs,
        entropy_gradient=Need.ENTROPY in objective.algorithm.needs,
        values=None if Need.VALUES not in needs or objective.critic is None else objective.critic.values,
    )
    with gradients_in_place():
        parts = training_forward(policy).completion_logprobs(micro, wanted)
    logprobs = parts.logprobs
    assert logprobs is not None
    columns = micro.columns.map(lambda column: column.to(logprobs, non_blocking=True))
    if Need.PROXIMAL_LOGPROBS in needs and "proximal_logprobs" not in columns.known:
        # In a step's only update the trained policy is the one that the step starts from.
        columns = replace(columns, known={**columns.known, "proximal_logprobs": logprobs.detach()})
    known = {str(name): divergence for name, divergence in parts.divergences.items()}
    if parts.entropies is not None:
        known["entropies"] = parts.entropies
    if parts.values is not None:
        known["values"] = parts.values.to(logprobs)
    rollout = micro.rollout.to(logprobs.device, non_blocking=True)
    return TokenView(logprobs=logprobs, rollout=rollout, columns=columns, known=known)


@torch.no_grad()
def distributions(other: Reference | Teacher | None, micro: Batch) -> NextTokens:
    """The predictions of another policy at each sampled token."""
    assert other is not None, "a need that was not met"
    with other.entered() as policy:
        needs = ForwardNeeds(logprobs=False, distributions=True)
        found = policy.forward.completion_logprobs(micro, needs).distributions
    assert found is not None
    return found


def updated_tokens(policy: Policy, groups: CreditedGroups, objective: Objective, max_tokens: int) -> UpdateTokens:
    """log π of all sampled tokens after a step's updates, the ratio, and where clipping would act in one more update.

    `clipped` is left out if a term's clipping needs a column that was not computed before the updates.
    """
    logprobs = group_logprobs(policy, groups.groups, temperature=objective.temperature, max_tokens=max_tokens)
    completions = completions_of(groups.groups)
    columns = {"policy_logprobs": logprobs, "ratio": (logprobs - groups.columns.behaviour_logprobs).exp()}
    clipping = [term for term in objective.algorithm.terms if term.clipped is not None]
    if clipping and needs_of(clipping) <= {NEED_OF.get(name) for name in groups.columns.known}:
        view = TokenView(logprobs=logprobs, rollout=completions.rollout, columns=groups.columns)
        clipped = [term.read(term.clipped, view, owner=objective.owner) for term in clipping if term.clipped]
        columns["clipped"] = torch.stack(clipped).any(dim=0)
    rollouts = [(draw, *name) for draw, name in zip(completions.draws, completions.names, strict=True)]
    return UpdateTokens(rollouts=rollouts, lengths=completions.num_sampled, columns=columns)


@torch.no_grad()
def group_logprobs(
    policy: Policy,
    groups: Sequence[Group],
    *,
    temperature: float,
    max_tokens: int,
    teacher_prompts: Sequence[Sequence[tuple[int, ...]]] | None = None,
) -> Float64[Tensor, " token"]:
    """log π of every sampled token of the groups in order, in nats; after `teacher_prompts` if they are given."""

    native = native_decoder(policy)

    def logprobs(micro: Batch) -> Tensor:
        if native is not None:
            return native_logprobs(native, micro, temperature)
        return policy.completion_logprobs(micro, temperature=temperature).double().cpu()

    batch = completions_of(groups, teacher_prompts).behind_teacher_prompts
    micro_batches = list(batch.split(max_tokens, padded=policy.forward.padded, ranks=policy.ranks))
    return torch.cat(policy.ranks.each(micro_batches, Batch.num_read, logprobs))
