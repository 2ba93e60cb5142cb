"""Supervised learning of completions: the loss over completion tokens and its gradient on a batch of examples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from posttrain.models.gradients import gradients_in_place
from posttrain.models.logprobs import token_logprobs
from posttrain.models.policy import Policy


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and the completion to learn, tokenised apart as in sampling; the completion ends with a stop token."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]

    @property
    def num_inputs(self) -> int:
        """Tokens that go through the model: all but the last, which is only predicted."""
        return len(self.prompt) + len(self.completion) - 1


def completion_logprobs(policy: Policy, examples: Sequence[Example]) -> Float[Tensor, " token"]:
    """log π of every completion token of the examples, in order, in nats."""
    hidden = policy.forward.completion_hidden(
        [e.prompt for e in examples], [e.completion for e in examples], range(len(examples))
    )
    targets = torch.tensor([token for e in examples for token in e.completion], device=hidden.device)
    return token_logprobs(hidden, policy.output_layer, targets)


def accumulate(policy: Policy, examples: Sequence[Example], tokens_per_microbatch: int) -> float:
    """Add the gradient of the batch's loss to the model's, a micro-batch at a time; returns the loss in nats per token.

    L = -(1/n) Σ_completion tokens log π(token)      n: completion tokens of the whole batch
    """
    count = sum(len(example.completion) for example in examples)
    total = 0.0
    for micro in microbatches(examples, tokens_per_microbatch):
        with gradients_in_place():
            loss = -completion_logprobs(policy, micro).sum() / count
        loss.backward()
        total += loss.item()
    return total


@torch.no_grad()
def mean_loss(policy: Policy, examples: Sequence[Example], tokens_per_microbatch: int) -> float:
    """Held-out loss: mean -log π over completion tokens, in nats per token."""
    total = sum(
        -completion_logprobs(policy, micro).double().sum().item()
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
    if batch:
        yield batch
