"""Supervised learning: the loss over the learned tokens of examples, its gradient, and the loss of held-out ones.

The shared-prompt forward pass packs every micro-batch, each row attending to itself only; the plain one pads.  Neither
changes the loss or its gradient.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from posttrain.models.forward import Completions, ForwardNeeds, TokenParts
from posttrain.models.policy import Policy
from posttrain.models.shared_prompt.gradients import gradients_in_place
from posttrain.records import Example
from posttrain.runs.intervals import RESAMPLES


def learned_tokens(policy: Policy, examples: Sequence[Example], *, statistics: bool = False) -> TokenParts:
    """Log-probs of the learned tokens, and with `statistics` their entropies and accuracy.

    To the forward pass, a prompt ends before the first learned token.
    """
    firsts = [example.sampled.index(True) for example in examples]
    pairs = list(zip(examples, firsts, strict=True))
    batch = Completions(
        [example.tokens[:first] for example, first in pairs],
        [example.tokens[first:] for example, first in pairs],
        range(len(examples)),
        sampled=torch.tensor([learned for example, first in pairs for learned in example.sampled[first:]]),
    )
    return policy.forward.completion_logprobs(batch, ForwardNeeds(statistics=statistics))


def accumulate_examples(
    policy: Policy, examples: Sequence[Example], tokens_per_microbatch: int, *, measure_entropy: bool = False
) -> dict[str, float]:
    """Add the gradient of the batch's loss, a micro-batch at a time; returns the loss in nats per token.

    L = -(1/n) Σ_learned tokens log π(token)      n: learned tokens of the whole batch, never of a micro-batch

    With `measure_entropy` also the mean entropy and the share of tokens that are the likeliest.
    """
    count = sum(example.num_sampled for example in examples)
    sums: dict[str, float] = {}
    total = 0.0
    for micro in microbatches(examples, tokens_per_microbatch, padded=policy.forward.padded):
        with gradients_in_place():
            parts = learned_tokens(policy, micro, statistics=measure_entropy)
            assert parts.logprobs is not None
            loss = -parts.logprobs.sum() / count
        loss.backward()
        total += loss.item()
        for name, value in statistics_of(parts).items():
            sums[name] = sums.get(name, 0.0) + value
    return {"loss": total, **{name: value / count for name, value in sums.items()}}


def statistics_of(parts: TokenParts) -> dict[str, float]:
    if parts.entropies is None or parts.likeliest is None:
        return {}
    return {"entropy": parts.entropies.sum().item(), "mean_token_accuracy": parts.likeliest.sum().item()}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutLoss:
    """The loss of examples that are not trained on."""

    loss: float
    """Mean -log π over learned tokens, in nats per token."""
    interval: tuple[float, float]
    """95% bootstrap interval over examples."""
    accuracy: float
    """Share of learned tokens that are the likeliest."""
    entropy: float
    """Mean entropy of the distributions of learned tokens, in nats."""

    def metrics(self) -> dict[str, float]:
        low, high = self.interval
        ends = {"eval/loss": self.loss, "eval/loss_low": low, "eval/loss_high": high}
        return {**ends, "eval/mean_token_accuracy": self.accuracy, "eval/entropy": self.entropy}

    def summary(self) -> dict[str, object]:
        return {"loss": self.loss, "loss_interval": list(self.interval), "mean_token_accuracy": self.accuracy}


@torch.no_grad()
def held_out_loss(policy: Policy, examples: Sequence[Example], tokens_per_microbatch: int) -> HeldOutLoss:
    """Measure the policy on examples, of which there is at least one."""
    losses: list[float] = []
    counts: list[int] = []
    total, right, entropy = 0.0, 0.0, 0.0
    for micro in microbatches(examples, tokens_per_microbatch, padded=policy.forward.padded):
        parts = learned_tokens(policy, micro, statistics=True)
        assert parts.logprobs is not None
        found = -parts.logprobs.double()
        total += found.sum().item()
        sums = statistics_of(parts)
        right, entropy = right + sums["mean_token_accuracy"], entropy + sums["entropy"]
        sizes = [example.num_sampled for example in micro]
        losses += [part.sum().item() for part in found.split(sizes)]
        counts += sizes
    return HeldOutLoss(
        loss=total / sum(counts),
        interval=ratio_interval(losses, counts),
        accuracy=right / sum(counts),
        entropy=entropy / sum(counts),
    )


def ratio_interval(losses: Sequence[float], counts: Sequence[int]) -> tuple[float, float]:
    summed, tokens = np.asarray(losses), np.asarray(counts)
    draws = np.random.default_rng(0).integers(len(summed), size=(RESAMPLES, len(summed)))
    low, high = np.percentile(summed[draws].sum(axis=1) / tokens[draws].sum(axis=1), [2.5, 97.5])
    return float(low), float(high)


def microbatches(examples: Sequence[Example], max_tokens: int, *, padded: bool = False) -> Iterator[list[Example]]:
    """Examples of similar length, at most `max_tokens` inputs together; a longer example is by itself.

    With padded rows each example counts as many inputs as the longest of its micro-batch.
    """
    batch: list[Example] = []
    held = 0
    for example in sorted(examples, key=lambda e: e.num_inputs):
        before = len(batch) * example.num_inputs if padded else held  # in this order the newest is the longest
        if batch and before + example.num_inputs > max_tokens:
            yield batch
            batch, held = [], 0
        batch.append(example)
        held += example.num_inputs
    if batch:
        yield batch
