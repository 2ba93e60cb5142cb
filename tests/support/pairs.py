"""Pairs of random tokens for tiny models, and what their log-probs are one unpadded row at a time."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from posttrain.algorithms.preference_losses import OfPairs
from posttrain.models.policy import Policy
from posttrain.records import Preference, Prompt, TokenSequence
from tests.support.tiny import VOCAB, plain_logprobs

SHAPES = ((3, 4, 2), (5, 1, 6), (1, 3, 3), (5, 2, 7), (2, 5, 1))
"""Tokens of prompt, chosen and rejected answer."""


def some_pairs(
    shapes: Sequence[tuple[int, int, int]] = SHAPES, *, seed: int = 5, weights: Sequence[float] = ()
) -> list[Preference]:
    """Pairs of these lengths; those whose prompts are as long as each other share a prompt."""
    random = np.random.Generator(np.random.Philox(seed))

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(random.integers(VOCAB, size=count).tolist())

    prompts = {size: tokens(size) for size in sorted({shape[0] for shape in shapes})}
    return [
        Preference(
            prompt=Prompt(id=f"p{number}", text="", tokens=prompts[size]),
            chosen=TokenSequence.one_turn(tokens(chosen)),
            rejected=TokenSequence.one_turn(tokens(rejected)),
            weight=weights[number] if weights else 1.0,
            where=f"pairs:{number + 1}",
        )
        for number, (size, chosen, rejected) in enumerate(shapes)
    ]


def one_row_at_a_time(policy: Policy, pairs: Sequence[Preference]) -> OfPairs:
    """log π of both answers of each pair by the library's own forward pass, with gradients."""

    def of(pair: Preference, answer: TokenSequence) -> Tensor:
        return plain_logprobs(policy.model, pair.prompt.tokens, answer.tokens)[torch.tensor(answer.sampled)].sum()

    return OfPairs(
        torch.stack([of(pair, pair.chosen) for pair in pairs]),
        torch.stack([of(pair, pair.rejected) for pair in pairs]),
    )
