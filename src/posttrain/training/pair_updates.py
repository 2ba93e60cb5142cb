"""Log-probs and scores of pairs, and the gradient of a loss on them, one micro-batch at a time.

A pair is never split: its loss is not a sum over tokens.  A prompt is computed once for all pairs of a micro-batch if
the forward pass shares prompts, and an answer in several pairs is scored once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.algorithms import preference_losses
from posttrain.algorithms.preference_losses import OfPairs, PairObjective
from posttrain.batch import packed
from posttrain.errors import RunError
from posttrain.models.classifiers.heads import TextScorer
from posttrain.models.forward import Completions
from posttrain.models.policy import Policy
from posttrain.models.sharding import sharded
from posttrain.models.shared_prompt.fused import gradients_in_place
from posttrain.models.transfers import on_cpu
from posttrain.options.pairs import DpoOptions, RewardTrainingOptions
from posttrain.ranks.group import Dealt
from posttrain.records import Preference
from posttrain.runs.tensor_state import Tensors
from posttrain.training.reference import Reference, UncopiedPolicy, reference_of, refreshed

AnswerLengths = Callable[[Preference], tuple[int, int]]
"""Tokens of the chosen and the rejected answer that go through the model."""
Rows = list[int]
"""Numbers of pairs."""


def each_microbatch(
    policy: Policy,
    pairs: Sequence[Preference],
    max_tokens: int,
    lengths: AnswerLengths,
    compute: Callable[[Dealt[Rows]], tuple[Tensor, Tensor]],
) -> tuple[float, Float64[Tensor, "2 pair"]]:
    """The sum of the losses that `compute` returns for micro-batches, and its two numbers per pair, in order.

    Each rank takes a share of the micro-batches.  The CPU waits for a GPU once, after all of them.
    """
    ranks, padded = policy.ranks, policy.forward.padded
    budget = ranks.budget(sum(len(pair.prompt.tokens) + sum(lengths(pair)) for pair in pairs), max_tokens)
    dealt_out = [*pair_microbatches(pairs, budget, lengths=lengths, padded=padded)]
    computed = [(dealt, compute(dealt)) for dealt in ranks.deal(dealt_out, len)]
    read = iter(on_cpu([numbers for _, both in computed for numbers in both]))
    found = [(dealt, (dealt.item, next(read), next(read))) for dealt, _ in computed]
    total, seen = 0.0, torch.zeros(2, len(pairs), dtype=torch.float64)
    for rows, loss, both in ranks.in_order(found):
        total += loss.item()
        seen[:, rows] = both
    return total, seen


def pair_microbatches(
    pairs: Sequence[Preference], max_tokens: int, *, lengths: AnswerLengths, padded: bool = False
) -> Iterator[Rows]:
    """Micro-batches of pairs of similar length, as indices; each has at most `max_tokens` tokens in the forward pass.

    Pairs of one prompt are adjacent, and their prompt counts once.  With padded rows, a pair counts as two rows, as
    wide as the widest of the micro-batch.  A pair that is too long gets its own micro-batch.
    """
    answers = [lengths(pair) for pair in pairs]
    widths = [len(pair.prompt.tokens) + max(both) for pair, both in zip(pairs, answers, strict=True)]
    longest: dict[tuple[int, ...], int] = {}
    for pair, width in zip(pairs, widths, strict=True):
        longest[pair.prompt.tokens] = max(width, longest.get(pair.prompt.tokens, 0))
    order = sorted(
        range(len(pairs)), key=lambda row: (longest[pairs[row].prompt.tokens], pairs[row].prompt.tokens, widths[row])
    )

    def cost(row: int, before: int | None) -> int:
        prompt = pairs[row].prompt.tokens
        if padded:
            return 2 * widths[row]
        known = before is not None and pairs[before].prompt.tokens == prompt
        return sum(answers[row]) + (0 if known else len(prompt))

    return packed(order, max_tokens, cost=cost, padded=padded)


@dataclass(frozen=True, slots=True)
class PairScores:
    """A reward model's scores of some pairs, in their order."""

    chosen: Float64[Tensor, " pair"]
    rejected: Float64[Tensor, " pair"]

    @property
    def margins(self) -> Float64[Tensor, " pair"]:
        return self.chosen - self.rejected

    @property
    def right(self) -> Float64[Tensor, " pair"]:
        """1 if the chosen answer scores higher, 1/2 if both score the same, else 0."""
        return (1 + self.margins.sign()) / 2

    def metrics(self) -> dict[str, float]:
        both = torch.cat([self.chosen, self.rejected])
        return {
            "accuracy": self.right.mean().item(),
            "margin": self.margins.mean().item(),
            "mean_reward": both.mean().item(),
            "min_reward": both.min().item(),
            "max_reward": both.max().item(),
        }


def read_answers(pair: Preference) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return pair.chosen.tokens + pair.chosen_closing, pair.rejected.tokens + pair.rejected_closing


def read_lengths(pair: Preference) -> tuple[int, int]:
    chosen, rejected = read_answers(pair)
    return len(chosen), len(rejected)


def scores_of_pairs(scorer: TextScorer, pairs: Sequence[Preference]) -> Float64[Tensor, "2 pair"]:
    """Scores of chosen and rejected answers, with gradients, in float64 from the head on."""
    prompts: dict[tuple[int, ...], int] = {}
    texts: dict[tuple[int, tuple[int, ...]], int] = {}
    places = []
    for pair in pairs:
        prompt = prompts.setdefault(pair.prompt.tokens, len(prompts))
        places.append([texts.setdefault((prompt, answer), len(texts)) for answer in read_answers(pair)])
    scores = scorer.scores([*prompts], [answer for _, answer in texts], [prompt for prompt, _ in texts])
    where = torch.tensor(places).T.to(scores.device, non_blocking=True)  # [2 pair]
    return scores.double()[where]


def accumulate_scores(
    scorer: TextScorer, pairs: Sequence[Preference], options: RewardTrainingOptions
) -> tuple[float, PairScores]:
    """Add the gradient of the batch's loss to the parameters; returns the loss and the scores.

        L = Σ_i w_i [ -log σ(r_c - r_r - s·m) + c (r_c + r_r)² ] / Σ_i w_i

    w: the pairs' weights over the whole batch, so that no split changes the gradient; s, m: `margin_scale` and the
    rows' margins, 0 if missing.  Raises RunError if a score is not finite.
    """
    weights = torch.tensor([pair.weight for pair in pairs], dtype=torch.float64)
    weights = weights / weights.sum()
    margins = options.margin_scale * torch.tensor([pair.margin or 0.0 for pair in pairs], dtype=torch.float64)

    def accumulate(dealt: Dealt[Rows]) -> tuple[Tensor, Tensor]:
        rows = dealt.item
        with gradients_in_place():
            scores = scores_of_pairs(scorer, [pairs[row] for row in rows])
        chosen, rejected = scores
        losses = preference_losses.bradley_terry(chosen, rejected, margins[rows].to(scores.device, non_blocking=True))
        if options.center_coefficient:
            losses = losses + options.center_coefficient * preference_losses.centring(chosen, rejected)
        loss = (weights[rows].to(scores.device, non_blocking=True) * losses).sum()
        dealt.weighed(loss).backward()
        return loss.detach(), scores.detach()

    total, seen = each_microbatch(scorer.policy, pairs, options.tokens_per_microbatch, read_lengths, accumulate)
    require_finite_scores(seen, pairs)
    return total, PairScores(*seen)


@torch.no_grad()
def pair_scores(scorer: TextScorer, pairs: Sequence[Preference], tokens_per_microbatch: int) -> PairScores:
    """Scores of any number of pairs, on the CPU, without gradients."""

    def measured(dealt: Dealt[Rows]) -> tuple[Tensor, Tensor]:
        return torch.zeros(()), scores_of_pairs(scorer, [pairs[row] for row in dealt.item])

    seen = each_microbatch(scorer.policy, pairs, tokens_per_microbatch, read_lengths, measured)[1]
    require_finite_scores(seen, pairs)
    return PairScores(*seen)


def require_finite_scores(scores: Float64[Tensor, "2 pair"], pairs: Sequence[Preference]) -> None:
    bad = (~torch.isfinite(scores)).any(dim=0).nonzero()
    if len(bad):
        row = int(bad[0, 0])
        chosen, rejected = scores[:, row].tolist()
        raise RunError(
            f"pair {pairs[row].where}: the scores of its answers are {chosen} and {rejected}.  No step was taken."
            "  Start again with a lower reward_model.learning_rate."
        )


ROUNDING = 1e-6
"""Relative rounding error of a log-prob in float32."""
Which = Literal["training", "held_out"]


@dataclass(frozen=True, slots=True)
class MeasuredPairs:
    """Numbers of some pairs, in their order."""

    losses: Float64[Tensor, " pair"]
    columns: Mapping[str, Float64[Tensor, " pair"]]
    """Sums by metric.  Log-probs and implicit rewards, β log π/π_ref, are for whole answers; `pairs/*` compare the same
    numbers as the loss, per token if it is length-normalised."""

    @classmethod
    def of(cls, objective: PairObjective, policy: OfPairs, reference: OfPairs, lengths: OfPairs) -> "MeasuredPairs":
        """The numbers from log-probs of whole answers, in nats, float64; `lengths` are the answers' sampled tokens."""
        ratios = preference_losses.log_ratios(policy, reference)
        rewards = preference_losses.implicit_rewards(ratios, beta=objective.beta)
        in_loss = objective.log_ratios(policy, reference, lengths)
        compared = preference_losses.implicit_rewards(in_loss, beta=objective.beta)
        rounding = ROUNDING * (policy.chosen.abs() + policy.rejected.abs())  # no pair is right before any update
        columns = {
            "pairs/accuracy": preference_losses.ranked_right(compared),
            "pairs/margin": compared.chosen - compared.rejected,
            "rewards/accuracies": (ratios.chosen - ratios.rejected > rounding).double(),
            "rewards/margins": rewards.chosen - rewards.rejected,
            "rewards/chosen": rewards.chosen,
            "rewards/rejected": rewards.rejected,
            "logps/chosen": policy.chosen,
            "logps/rejected": policy.rejected,
        }
        return cls(objective.losses(policy, reference, lengths), columns)

    def means(self) -> dict[str, float]:
        return {name: column.mean().item() for name, column in self.columns.items()}


def pair_logprobs(policy: Policy, pairs: Sequence[Preference]) -> OfPairs:
    """log π of both answers of each pair, in nats, summed in float64 over the sampled tokens."""
    places: dict[tuple[int, ...], int] = {}
    prompt_of = [places.setdefault(pair.prompt.tokens, len(places)) for pair in pairs for _ in range(2)]
    answers = [answer.tokens for pair in pairs for answer in (pair.chosen, pair.rejected)]
    owner = torch.arange(len(answers)).repeat_interleave(torch.tensor([len(answer) for answer in answers]))
    sampled = torch.tensor([each for pair in pairs for side in (pair.chosen, pair.rejected) for each in side.sampled])
    logprobs = policy.completion_logprobs(Completions([*places], answers, prompt_of, sampled=sampled)).double()
    sums = logprobs.new_zeros(len(answers)).index_add(
        0, owner[sampled].to(logprobs.device, non_blocking=True), logprobs
    )
    return OfPairs(sums[0::2], sums[1::2])


def answer_lengths(pairs: Sequence[Preference]) -> OfPairs:
    counts = [[pair.chosen.num_sampled, pair.rejected.num_sampled] for pair in pairs]
    return OfPairs(*torch.tensor(counts, dtype=torch.float64).T)


def predicting_lengths(pair: Preference) -> tuple[int, int]:
    """How many tokens of each answer go through the model: all but the last, which is only predicted."""
    return len(pair.chosen.tokens) - 1, len(pair.rejected.tokens) - 1


@torch.no_grad()
def logprobs_without_gradient(policy: Policy, pairs: Sequence[Preference], max_tokens: int) -> OfPairs:
    def computed(dealt: Dealt[Rows]) -> tuple[Tensor, Tensor]:
        return torch.zeros(()), torch.stack(pair_logprobs(policy, [pairs[row] for row in dealt.item]))

    return OfPairs(*each_microbatch(policy, pairs, max_tokens, predicting_lengths, computed)[1])


def accumulate_pairs(
    policy: Policy, pairs: Sequence[Preference], reference: OfPairs, objective: PairObjective, max_tokens: int
) -> tuple[float, MeasuredPairs]:
    """Add the gradient of the batch's loss to the model's; returns the loss and the numbers of each pair.

        loss = Σ_i w_i L_i / Σ_i w_i        w: the pairs' weights; over the whole batch, never a micro-batch

    Raises RunError, and leaves no gradient, if a pair's loss is not finite.
    """
    lengths = answer_lengths(pairs)
    weights = torch.tensor([pair.weight for pair in pairs], dtype=torch.float64)
    weights = weights / weights.sum()

    def accumulate(dealt: Dealt[Rows]) -> tuple[Tensor, Tensor]:
        rows = dealt.item
        with gradients_in_place():
            logprobs = pair_logprobs(policy, [pairs[row] for row in rows])
        device = logprobs.chosen.device
        others = (
            OfPairs(*(column[rows].to(device, non_blocking=True) for column in each)) for each in (reference, lengths)
        )
        losses = objective.losses(logprobs, *others)
        share = (weights[rows].to(device, non_blocking=True) * losses).sum()
        dealt.weighed(share).backward()
        return share.detach(), torch.stack(logprobs).detach()

    total, seen = each_microbatch(policy, pairs, max_tokens, predicting_lengths, accumulate)
    logprobs = OfPairs(seen[0], seen[1])
    measured = MeasuredPairs.of(objective, logprobs, reference, lengths)
    bad = (~torch.isfinite(measured.losses)).nonzero()
    if len(bad):
        policy.model.zero_grad(set_to_none=True)
        row = int(bad[0, 0])
        raise RunError(
            f"pair {pairs[row].where}: its loss is {measured.losses[row].item()}; log π is"
            f" {logprobs.chosen[row].item():.4g} nats of the chosen answer and {logprobs.rejected[row].item():.4g} of"
            " the rejected one.  No step was taken.  Start again with a lower dpo.learning_rate."
        )
    return total, measured


class PairReference:
    """The reference of a run on pairs.

    *Live*: the policy before training (a frozen copy, or its adapter off), or another model, computed for each batch.
    *Precomputed*: computed once for all pairs, and kept; before the first update the policy itself is the reference.
    """

    def __init__(self, policy: Policy, options: DpoOptions, given: Reference | None = None) -> None:
        self.policy, self.options = policy, options
        if isinstance(given, UncopiedPolicy):
            given = UncopiedPolicy(sharded(replace(given.policy, ranks=policy.ranks)))
        self.reference = given or (reference_of(policy) if options.keeps_reference else None)
        self.kept: dict[Which, OfPairs] = {}

    def begin(self, which: Which, pairs: Sequence[Preference]) -> None:
        if self.options.reference == "precomputed":
            self.kept[which] = self.now(pairs)

    def refresh(self) -> None:
        if self.reference is not None:
            self.reference = refreshed(self.reference, self.policy)

    def logprobs(self, which: Which, numbers: Sequence[int], pairs: Sequence[Preference]) -> OfPairs:
        if which not in self.kept:
            return self.now(pairs)
        kept, rows = self.kept[which], list(numbers)
        return OfPairs(kept.chosen[rows], kept.rejected[rows])

    def now(self, pairs: Sequence[Preference]) -> OfPairs:
        with nullcontext(self.policy) if self.reference is None else self.reference.entered() as policy:
            return logprobs_without_gradient(policy, pairs, self.options.tokens_per_microbatch)

    def tensors(self) -> dict[str, Tensors]:
        """The part that a checkpoint must hold: precomputed log-probs, and a reference that is not the first one."""
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
        """Restore the state of a checkpoint."""
        logprobs = saved.get("reference_logprobs", {})
        self.kept = {
            which: OfPairs(*(logprobs[f"{which}.{answer}"].to(torch.float64) for answer in OfPairs._fields))
            for which in get_args(Which)
            if f"{which}.chosen" in logprobs
        }
        if self.reference is not None and "reference" in saved:
            self.reference.restore(saved["reference"])
