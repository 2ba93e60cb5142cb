"""Supervised learning of completions: the loss over completion tokens and one update on a batch of examples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from posttrain.models.decoder import Decoder
from posttrain.models.logprobs import token_logprobs
from posttrain.models.packed import PackedAttention, PackedLayout


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and the completion to learn, tokenised apart as in sampling; the completion ends with a stop token."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]

    @property
    def num_inputs(self) -> int:
        """Tokens that go through the model: all but the last, which is only predicted."""
        return len(self.prompt) + len(self.completion) - 1


def completion_logprobs(decoder: Decoder, examples: Sequence[Example]) -> Float[Tensor, " token"]:
    """log π of every completion token of the examples, in order, in nats."""
    layout = PackedLayout([example.num_inputs for example in examples])
    tokens = torch.tensor([t for e in examples for t in (*e.prompt, *e.completion)[:-1]])
    targets = torch.tensor([t for e in examples for t in e.completion])
    predicting = torch.cat(
        [
            torch.arange(start + len(e.prompt) - 1, start + e.num_inputs)
            for start, e in zip(layout.root_starts, examples, strict=True)
        ]
    )
    hidden = decoder.hidden(tokens, layout.positions, PackedAttention(layout))
    return token_logprobs(hidden.index_select(0, predicting), decoder.head, targets)


def accumulate(decoder: Decoder, examples: Sequence[Example], tokens_per_microbatch: int) -> float:
    """Add the gradient of the batch's loss to the model's, a micro-batch at a time; returns the loss in nats per token.

    L = -(1/n) Σ_completion tokens log π(token)      n: completion tokens of the whole batch
    """
    count = sum(len(example.completion) for example in examples)
    total = 0.0
    for micro in microbatches(examples, tokens_per_microbatch):
        loss = -completion_logprobs(decoder, micro).sum() / count
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


@torch.no_grad()
def mean_loss(decoder: Decoder, examples: Sequence[Example], tokens_per_microbatch: int) -> float:
    """Held-out loss: mean -log π over completion tokens, in nats per token."""
    total = sum(
        -completion_logprobs(decoder, micro).double().sum().item()
        for micro in microbatches(examples, tokens_per_microbatch)
    )
    return total / sum(len(example.completion) for example in examples)


def microbatches(examples: Sequence[Example], max_tokens: int) -> Iterator[list[Example]]:
    """Examples of like length together, at most `max_tokens` inputs each (a longer example stands alone)."""
    batch: list[Example] = []
    held = 0
    for example in sorted(examples, key=lambda e: e.num_inputs):
        if batch and held + example.num_inputs > max_tokens:
            yield batch
            batch, held = [], 0
        batch.append(example)
        held += example.num_inputs
    yield batch
