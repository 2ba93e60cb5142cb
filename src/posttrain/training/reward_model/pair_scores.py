"""Scores of pairs, and the gradient of a reward model's loss, a micro-batch at a time.

A pair is never split.  A prompt is computed once for all pairs of a micro-batch if the forward pass shares prompts, and
an answer in several pairs is scored once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.algorithms.preference_losses import bradley_terry, centring
from posttrain.errors import RunError
from posttrain.models.classifiers.heads import TextScorer
from posttrain.models.shared_prompt.fused import gradients_in_place
from posttrain.options.pairs import RewardTrainingOptions
from posttrain.records import Preference

AnswerLengths = Callable[[Preference], tuple[int, int]]
"""Tokens of the chosen and of the rejected answer that go through the model."""


def pair_microbatches(
    pairs: Sequence[Preference], max_tokens: int, *, lengths: AnswerLengths, padded: bool = False
) -> Iterator[list[int]]:
    """Indices of pairs of similar length, of at most `max_tokens` tokens together as the forward pass computes them.

    Pairs of one prompt are adjacent, and their prompt counts once.  With padded rows a pair counts as two rows, as wide
    as the widest of the micro-batch.  A pair that is too long is a micro-batch by itself.
    """
    answers = [lengths(pair) for pair in pairs]
    widths = [len(pair.prompt.tokens) + max(both) for pair, both in zip(pairs, answers, strict=True)]
    longest: dict[tuple[int, ...], int] = {}
    for pair, width in zip(pairs, widths, strict=True):
        longest[pair.prompt.tokens] = max(width, longest.get(pair.prompt.tokens, 0))
    order = sorted(
        range(len(pairs)), key=lambda row: (longest[pairs[row].prompt.tokens], pairs[row].prompt.tokens, widths[row])
    )
    batch: list[int] = []
    held, widest = 0, 0
    prompts: set[tuple[int, ...]] = set()
    for row in order:
        prompt = pairs[row].prompt.tokens
        more = sum(answers[row]) + (0 if prompt in prompts else len(prompt))
        would = 2 * (len(batch) + 1) * max(widest, widths[row]) if padded else held + more
        if batch and would > max_tokens:
            yield batch
            batch, held, widest, prompts = [], 0, 0, set()
            more = sum(answers[row]) + len(prompt)
        batch.append(row)
        held, widest = held + more, max(widest, widths[row])
        prompts.add(prompt)
    if batch:
        yield batch


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
        """1 where the chosen answer scores higher, 1/2 where both score alike, else 0."""
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
    where = torch.tensor(places, device=scores.device).T  # [2 pair]
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
    seen = torch.zeros(2, len(pairs), dtype=torch.float64)
    total = 0.0
    budget, padded = options.tokens_per_microbatch, scorer.policy.forward.padded
    for rows in pair_microbatches(pairs, budget, lengths=read_lengths, padded=padded):
        some = [pairs[row] for row in rows]
        with gradients_in_place():
            scores = scores_of_pairs(scorer, some)
        require_finite_scores(scores, some)
        chosen, rejected = scores
        losses = bradley_terry(chosen, rejected, margins[rows].to(scores.device))
        if options.center_coefficient:
            losses = losses + options.center_coefficient * centring(chosen, rejected)
        loss = (weights[rows].to(scores.device) * losses).sum()
        loss.backward()
        total += loss.item()
        seen[:, rows] = scores.detach().cpu()
    return total, PairScores(*seen)


@torch.no_grad()
def pair_scores(scorer: TextScorer, pairs: Sequence[Preference], tokens_per_microbatch: int) -> PairScores:
    """Scores of any number of pairs, on the CPU, without gradients."""
    seen = torch.zeros(2, len(pairs), dtype=torch.float64)
    padded = scorer.policy.forward.padded
    for rows in pair_microbatches(pairs, tokens_per_microbatch, lengths=read_lengths, padded=padded):
        some = [pairs[row] for row in rows]
        scores = scores_of_pairs(scorer, some)
        require_finite_scores(scores, some)
        seen[:, rows] = scores.cpu()
    return PairScores(*seen)


def require_finite_scores(scores: Float64[Tensor, "2 pair"], pairs: Sequence[Preference]) -> None:
    bad = (~torch.isfinite(scores.detach())).any(dim=0).nonzero()
    if len(bad):
        row = int(bad[0, 0])
        chosen, rejected = scores[:, row].tolist()
        raise RunError(
            f"pair {pairs[row].where}: the scores of its answers are {chosen} and {rejected}.  No step was taken."
            "  Start again with a lower reward_model.learning_rate."
        )
