"""Supervised learning: the loss over the learned tokens of examples, its gradient, and the loss of held-out ones.

There is no option to pack rows: the shared-prompt forward pass packs every micro-batch anyway, each row attending to
itself alone, and the plain one pads.  Neither changes the loss or its gradient.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from posttrain.models.gradients import gradients_in_place
from posttrain.models.logprobs import token_logprobs
from posttrain.models.policy import Policy
from posttrain.records import Example
from posttrain.runs.intervals import RESAMPLES

ROWS_AT_ONCE = 256
"""Positions whose logits over the whole vocabulary are held at a time."""


class Predicted(NamedTuple):
    """What predicts the learned tokens of some examples, one after the other."""

    hidden: Float[Tensor, "token hidden"]
    targets: Int64[Tensor, " token"]


def predicted(policy: Policy, examples: Sequence[Example]) -> Predicted:
    """The hidden states before the learned tokens, and those tokens.

    To the forward pass an example is what comes before its first learned token, continued up to its last one.
    """
    firsts = [example.learned.index(True) for example in examples]
    hidden = policy.forward.completion_hidden(
        [example.tokens[:first] for example, first in zip(examples, firsts, strict=True)],
        [example.tokens[first:] for example, first in zip(examples, firsts, strict=True)],
        range(len(examples)),
    )
    continued = [
        (example.tokens[first:], example.learned[first:]) for example, first in zip(examples, firsts, strict=True)
    ]
    targets = torch.tensor([token for tokens, _ in continued for token in tokens], device=hidden.device)
    learned = torch.tensor([each for _, mask in continued for each in mask], device=hidden.device)
    return Predicted(hidden, targets) if bool(learned.all()) else Predicted(hidden[learned], targets[learned])


def accumulate(
    policy: Policy, examples: Sequence[Example], tokens_per_microbatch: int, *, measure_entropy: bool = False
) -> dict[str, float]:
    """Add the gradient of the batch's loss to the model's, a micro-batch at a time; returns metrics of its tokens.

    L = -(1/n) Σ_learned tokens log π(token)      n: learned tokens of the whole batch, never of a micro-batch

    The loss is in nats per token; with `measure_entropy` come the mean entropy and the share of likeliest tokens.
    """
    count = sum(example.num_learned for example in examples)
    total, likeliest, entropy = 0.0, 0, 0.0
    for micro in microbatches(examples, tokens_per_microbatch, padded=policy.forward.padded):
        with gradients_in_place():
            hidden, targets = predicted(policy, micro)
            loss = -token_logprobs(hidden, policy.output_layer, targets).sum() / count
        loss.backward()
        total += loss.item()
        if measure_entropy:
            found = token_statistics(policy, hidden.detach(), targets)
            likeliest, entropy = likeliest + found.likeliest, entropy + found.entropy
    if not measure_entropy:
        return {"loss": total}
    return {"loss": total, "entropy": entropy / count, "mean_token_accuracy": likeliest / count}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutLoss:
    """How well examples that are not trained on are known."""

    loss: float
    """Mean -log π over learned tokens, in nats per token."""
    interval: tuple[float, float]
    """95% bootstrap interval over examples, which are what was drawn at random."""
    accuracy: float
    """Share of learned tokens that are the likeliest."""
    entropy: float
    """Mean entropy of what predicts them, in nats per token."""

    def metrics(self) -> dict[str, float]:
        """Under the names of docs/metrics.md."""
        low, high = self.interval
        return {
            "eval/loss": self.loss,
            "eval/loss_low": low,
            "eval/loss_high": high,
            "eval/mean_token_accuracy": self.accuracy,
            "eval/entropy": self.entropy,
        }

    def summary(self) -> dict[str, object]:
        """As summary.json has it."""
        return {"loss": self.loss, "loss_interval": list(self.interval), "mean_token_accuracy": self.accuracy}


@torch.no_grad()
def held_out_loss(policy: Policy, examples: Sequence[Example], tokens_per_microbatch: int) -> HeldOutLoss:
    """Measure the policy on examples, of which there is at least one."""
    losses: list[float] = []
    counts: list[int] = []
    total, right, entropy = 0.0, 0, 0.0
    for micro in microbatches(examples, tokens_per_microbatch, padded=policy.forward.padded):
        hidden, targets = predicted(policy, micro)
        found = -token_logprobs(hidden, policy.output_layer, targets).double()
        total += found.sum().item()
        statistics = token_statistics(policy, hidden, targets)
        right, entropy = right + statistics.likeliest, entropy + statistics.entropy
        sizes = [example.num_learned for example in micro]
        losses += [part.sum().item() for part in found.split(sizes)]
        counts += sizes
    return HeldOutLoss(
        loss=total / sum(counts),
        interval=ratio_interval(losses, counts),
        accuracy=right / sum(counts),
        entropy=entropy / sum(counts),
    )


class TokenStatistics(NamedTuple):
    """Sums over some targets."""

    likeliest: int
    """How many are the likeliest token."""
    entropy: float
    """Of the distributions that predict them, in nats."""


@torch.no_grad()
def token_statistics(
    policy: Policy, hidden: Float[Tensor, "token hidden"], targets: Int64[Tensor, " token"]
) -> TokenStatistics:
    """How many targets are the likeliest token, and the entropy -Σ_v π log π before them."""
    likeliest, entropy = 0, 0.0
    for rows, wanted in zip(hidden.split(ROWS_AT_ONCE), targets.split(ROWS_AT_ONCE), strict=True):
        logits = policy.output_layer.logits(rows)
        logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
        likeliest += int((logprobs.argmax(dim=-1) == wanted).sum().item())
        entropy -= (logprobs.exp() * logprobs).sum(dtype=torch.float64).item()
    return TokenStatistics(likeliest, entropy)


def ratio_interval(losses: Sequence[float], counts: Sequence[int]) -> tuple[float, float]:
    """95% percentile interval of Σ loss / Σ tokens over resampled examples; the same numbers give the same one."""
    summed, tokens = np.asarray(losses), np.asarray(counts)
    draws = np.random.default_rng(0).integers(len(summed), size=(RESAMPLES, len(summed)))
    low, high = np.percentile(summed[draws].sum(axis=1) / tokens[draws].sum(axis=1), [2.5, 97.5])
    return float(low), float(high)


def microbatches(examples: Sequence[Example], max_tokens: int, *, padded: bool = False) -> Iterator[list[Example]]:
    """Examples of like length together, at most `max_tokens` inputs each (a longer example stands alone).

    For a pass of padded rows each counts as many inputs as the longest of its micro-batch.
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
