"""log-probs of pairs, and the gradient of a loss of pairs, a micro-batch at a time.

A pair is never split: its loss is not a sum over tokens.  A prompt is computed once for all pairs of a micro-batch if
the forward pass shares prompts.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.algorithms.preference_losses import OfPairs, PairObjective, implicit_rewards, log_ratios, ranked_right
from posttrain.errors import RunError
from posttrain.models.forward import Completions
from posttrain.models.policy import Policy
from posttrain.models.shared_prompt.fused import gradients_in_place
from posttrain.options.pairs import DpoOptions
from posttrain.records import Preference
from posttrain.runs.tensor_state import Tensors
from posttrain.training.reference import Reference, reference_of
from posttrain.training.reward_model.pair_scores import pair_microbatches

ROUNDING = 1e-6
"""Rounding of a log-prob in float32, as a share of it."""
Which = Literal["training", "held_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPairs:
    """Numbers of some pairs, in their order."""

    policy: OfPairs
    """log-probs of whole answers, in nats, float64."""
    reference: OfPairs
    lengths: OfPairs
    """Sampled tokens of the answers."""
    losses: Float64[Tensor, " pair"]
    rewards: OfPairs
    """Implicit rewards, β log π/π_ref of whole answers."""
    compared: OfPairs
    """The same as the loss compares them: per token if it is length-normalised."""

    @classmethod
    def of(cls, objective: PairObjective, policy: OfPairs, reference: OfPairs, lengths: OfPairs) -> "MeasuredPairs":
        return cls(
            policy=policy,
            reference=reference,
            lengths=lengths,
            losses=objective.losses(policy, reference, lengths),
            rewards=implicit_rewards(log_ratios(policy, reference), beta=objective.beta),
            compared=implicit_rewards(objective.log_ratios(policy, reference, lengths), beta=objective.beta),
        )

    @property
    def columns(self) -> dict[str, Float64[Tensor, " pair"]]:
        return {
            "pairs/accuracy": ranked_right(self.compared),
            "pairs/margin": self.compared.chosen - self.compared.rejected,
            "rewards/accuracies": self.ranked_higher,
            "rewards/margins": self.rewards.chosen - self.rewards.rejected,
            "rewards/chosen": self.rewards.chosen,
            "rewards/rejected": self.rewards.rejected,
            "logps/chosen": self.policy.chosen,
            "logps/rejected": self.policy.rejected,
        }

    @property
    def ranked_higher(self) -> Float64[Tensor, " pair"]:
        """1 if the chosen answer has more implicit reward, by more than rounding; else 0, as before any update."""
        ratios = log_ratios(self.policy, self.reference)
        rounding = ROUNDING * (self.policy.chosen.abs() + self.policy.rejected.abs())
        return (ratios.chosen - ratios.rejected > rounding).double()

    def means(self) -> dict[str, float]:
        return {name: column.mean().item() for name, column in self.columns.items()}


def pair_logprobs(policy: Policy, pairs: Sequence[Preference]) -> OfPairs:
    """log π of both answers of each pair, in nats, summed in float64 over the sampled tokens."""
    places: dict[tuple[int, ...], int] = {}
    prompt_of = [places.setdefault(pair.prompt.tokens, len(places)) for pair in pairs for _ in range(2)]
    answers = [answer.tokens for pair in pairs for answer in (pair.chosen, pair.rejected)]
    owner = torch.arange(len(answers)).repeat_interleave(torch.tensor([len(answer) for answer in answers]))
    sampled = torch.tensor([each for pair in pairs for mask in masks_of(pair) for each in mask])
    logprobs = policy.completion_logprobs(Completions([*places], answers, prompt_of, sampled=sampled)).double()
    sums = logprobs.new_zeros(len(answers)).index_add(0, owner[sampled].to(logprobs.device), logprobs)
    return OfPairs(sums[0::2], sums[1::2])


def masks_of(pair: Preference) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    return pair.chosen.sampled, pair.rejected.sampled


def answer_lengths(pairs: Sequence[Preference]) -> OfPairs:
    counts = torch.tensor([[sum(mask) for mask in masks_of(pair)] for pair in pairs], dtype=torch.float64)
    return OfPairs(counts[:, 0], counts[:, 1])


def predicting_lengths(pair: Preference) -> tuple[int, int]:
    """How many tokens of each answer go through the model: all but the last, which is only predicted."""
    return len(pair.chosen.tokens) - 1, len(pair.rejected.tokens) - 1


@torch.no_grad()
def logprobs_without_gradient(policy: Policy, pairs: Sequence[Preference], max_tokens: int) -> OfPairs:
    found = torch.zeros(2, len(pairs), dtype=torch.float64)
    for rows in pair_microbatches(pairs, max_tokens, lengths=predicting_lengths, padded=policy.forward.padded):
        logprobs = pair_logprobs(policy, [pairs[row] for row in rows])
        found[:, rows] = torch.stack(logprobs).cpu()
    return OfPairs(found[0], found[1])


def accumulate_pairs(
    policy: Policy, pairs: Sequence[Preference], reference: OfPairs, objective: PairObjective, max_tokens: int
) -> tuple[float, MeasuredPairs]:
    """Add the gradient of the batch's loss to the model's; returns the loss and the numbers of each pair.

        loss = Σ_i w_i L_i / Σ_i w_i        w: the pairs' weights; over the whole batch, never a micro-batch

    Raises RunError before the backward pass if a pair's loss is not finite.
    """
    lengths = answer_lengths(pairs)
    weights = torch.tensor([pair.weight for pair in pairs], dtype=torch.float64)
    weights = weights / weights.sum()
    seen = torch.zeros(2, len(pairs), dtype=torch.float64)
    total = 0.0
    for rows in pair_microbatches(pairs, max_tokens, lengths=predicting_lengths, padded=policy.forward.padded):
        with gradients_in_place():
            logprobs = pair_logprobs(policy, [pairs[row] for row in rows])
        device = logprobs.chosen.device
        others = (OfPairs(*(column[rows].to(device) for column in each)) for each in (reference, lengths))
        losses = objective.losses(logprobs, *others)
        require_finite_pairs(losses, [pairs[row] for row in rows], logprobs)
        share = (weights[rows].to(device) * losses).sum()
        share.backward()
        total += share.item()
        seen[:, rows] = torch.stack(logprobs).detach().cpu()
    return total, MeasuredPairs.of(objective, OfPairs(seen[0], seen[1]), reference, lengths)


def require_finite_pairs(losses: Float64[Tensor, " pair"], pairs: Sequence[Preference], logprobs: OfPairs) -> None:
    bad = (~torch.isfinite(losses.detach())).nonzero()
    if len(bad):
        row = int(bad[0, 0])
        raise RunError(
            f"pair {pairs[row].where}: its loss is {losses[row].item()}, where log π is"
            f" {logprobs.chosen[row].item():.4g} nats of the chosen answer and {logprobs.rejected[row].item():.4g} of"
            " the rejected one.  No step was taken.  Start again with a lower dpo.learning_rate."
        )


class PairReference:
    """The reference of a run on pairs.

    *Live*: the policy before training (a frozen copy, or its adapter off), or another model, computed for each batch.
    *Precomputed*: computed once for all pairs, and kept; before the first update the policy itself is the reference.
    """

    def __init__(self, policy: Policy, options: DpoOptions, given: Reference | None = None) -> None:
        self.policy, self.options = policy, options
        self.reference = given or (reference_of(policy) if options.keeps_reference else None)
        self.kept: dict[Which, OfPairs] = {}

    def begin(self, which: Which, pairs: Sequence[Preference]) -> None:
        if self.options.reference == "precomputed":
            self.kept[which] = self.now(pairs)

    def refresh(self) -> None:
        if self.reference is not None:
            self.reference = reference_of(self.policy)

    def logprobs(self, which: Which, numbers: Sequence[int], pairs: Sequence[Preference]) -> OfPairs:
        if which not in self.kept:
            return self.now(pairs)
        kept, rows = self.kept[which], list(numbers)
        return OfPairs(kept.chosen[rows], kept.rejected[rows])

    def now(self, pairs: Sequence[Preference]) -> OfPairs:
        with nullcontext(self.policy) if self.reference is None else self.reference.entered() as policy:
            return logprobs_without_gradient(policy, pairs, self.options.tokens_per_microbatch)

    def tensors(self) -> dict[str, Tensors]:
        """What of it a checkpoint has to hold: log-probs that are kept, and a reference that is not the first one."""
        saved: dict[str, Tensors] = {}
        if self.kept:
            saved["reference_logprobs"] = {
                f"{which}.{answer}": column
                for which, logprobs in self.kept.items()
                for answer, column in zip(OfPairs._fields, logprobs, strict=True)
            }
        if self.reference is not None and self.options.refresh_reference:
            saved["reference"] = self.reference.tensors()
        return saved

    def restore(self, saved: Mapping[str, Tensors]) -> None:
        """Be as the checkpoint was."""
        logprobs = saved.get("reference_logprobs", {})
        self.kept = {
            which: OfPairs(*(logprobs[f"{which}.{answer}"].to(torch.float64) for answer in OfPairs._fields))
            for which in get_args(Which)
            if f"{which}.chosen" in logprobs
        }
        if self.reference is not None and "reference" in saved:
            self.reference.restore(saved["reference"])
