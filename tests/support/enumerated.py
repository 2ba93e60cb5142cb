"""All completions of three tokens (0 stops) within three positions, and policies over them: logits for every prefix."""

import itertools

import torch

LIMIT = 3
COMPLETIONS = [
    tokens
    for length in range(1, LIMIT + 1)
    for tokens in itertools.product(range(3), repeat=length)
    if 0 not in tokens[:-1] and (tokens[-1] == 0 or length == LIMIT)
]
assert len(COMPLETIONS) == 1 + 2 + 4 * 3


class Tree:
    """A policy over completions: one row of logits for each of the 7 prefixes that can be gone on from."""

    def __init__(self, seed: int) -> None:
        prefixes = [(), (1,), (2,), (1, 1), (1, 2), (2, 1), (2, 2)]
        self.row = {prefix: i for i, prefix in enumerate(prefixes)}
        rng = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(len(prefixes), 3, generator=rng, dtype=torch.float64, requires_grad=True)
        self.rewards = torch.randn(len(COMPLETIONS), generator=rng, dtype=torch.float64)

    def token_logprobs(self) -> list[torch.Tensor]:
        table = self.logits.log_softmax(1)
        return [
            torch.stack([table[self.row[tokens[:t]], token] for t, token in enumerate(tokens)])
            for tokens in COMPLETIONS
        ]
