"""Sampling without a cache: whole rows again for every token.

Right for every causal model, whatever state it keeps (convolutions, recurrences, compressed attention), because a
causal model's answer does not depend on what comes later; slow, as n tokens cost n passes over the row.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from posttrain.generation.stepping import PrefilledPrompts
from posttrain.models.forward import Completions, ForwardNeeds
from posttrain.models.policy import Policy

CHUNK_TOKENS = 16384
"""Tokens that go through the model at a time, padding included."""


class RowTokens:
    """The tokens of the rows being decoded, in place of a cache."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []

    def add(self, cached: Sequence[Tensor], lengths: Int64[Tensor, " row"]) -> None:
        """Append rows of which `lengths` tokens are known, padded on the right."""
        (tokens,) = cached
        pairs = zip(tokens.tolist(), lengths.tolist(), strict=True)
        self.rows += [tuple(row[:length]) for row, length in pairs]

    def row(self, row: int) -> tuple[list[Tensor], int]:
        """A copy of one row, as `add` takes it, and the tokens that it holds."""
        return [torch.tensor([self.rows[row]])], len(self.rows[row])

    def move(self, source: Int64[Tensor, " moved"], target: Int64[Tensor, " moved"], num_left: int) -> None:
        for one, other in zip(source.tolist(), target.tolist(), strict=True):
            self.rows[other] = self.rows[one]
        del self.rows[num_left:]


class RecomputedSteps:
    """Sampling through the policy's forward pass as training uses it, a token at a time."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def refresh(self) -> None:
        """Nothing to do: the forward pass reads the policy's weights."""

    def release(self) -> None:
        """Nothing to do: it made no copies."""

    def slots(self) -> RowTokens:
        return RowTokens()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> PrefilledPrompts:
        device = self.policy.device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        time = int(lengths.max())
        tokens = torch.tensor([(*prompt, *(0,) * (time - len(prompt))) for prompt in prompts], device=device)
        return PrefilledPrompts(logits=self._logits(prompts), cached=[tokens], lengths=lengths)

    def step(self, tokens: Int64[Tensor, " row"], slots: RowTokens) -> Float[Tensor, "row vocab"]:
        """Run every row again with one more token."""
        slots.rows = [(*row, token) for row, token in zip(slots.rows, tokens.tolist(), strict=True)]
        return self._logits(slots.rows)

    def _logits(self, rows: Sequence[Sequence[int]]) -> Float[Tensor, "row vocab"]:
        """Logits of the token that follows each row."""
        places, parts = [], []
        for chunk in chunks([len(row) for row in rows], CHUNK_TOKENS):
            # One completion a prompt, of a token that predicts nothing and is not read.
            prompts = [rows[place] for place in chunk]
            batch = Completions(prompts, [(0,)] * len(chunk), range(len(chunk)))
            found = self.policy.forward.completion_logprobs(batch, ForwardNeeds(logprobs=False, distributions=True))
            assert found.distributions is not None
            parts.append(found.distributions.logits())
            places += chunk
        logits = torch.cat(parts)
        return torch.empty_like(logits).index_copy_(0, torch.tensor(places, device=logits.device), logits)


def chunks(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Places of rows of these lengths, the shortest first, in runs that go through the model together.

    Padded to its longest row, a run holds at most `max_tokens`, and no row more padding than tokens; a row of more than
    that is a run by itself.
    """
    run: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: lengths[place]):
        width = lengths[place]
        if run and (width * (len(run) + 1) > max_tokens or width > 2 * lengths[run[0]]):
            yield run
            run = []
        run.append(place)
    yield run
