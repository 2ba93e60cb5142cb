"""Which row a draw is: a function of (seed, step, draw), for one data set or for a mixture of several.

An epoch of a mixture has as many draws as there are rows (with weights at least 1000), of which each source has a
quota: its share by weight, rounded so that the quotas add up to the epoch (largest remainder).  Each epoch has a new
order of sources, so every epoch keeps to the weights, to within one draw.  Each source goes through its rows in its
epochs, without replacement.  Refills draw sources by the same quotas, in an order drawn for each step: a refill is of a
source with exactly the probability of its weight.
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from posttrain.errors import UserError

SHORTEST_EPOCH = 1000
"""Draws in an epoch of a mixture with weights, at least: a share is then honoured to a thousandth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawOrder:
    """What decides the order of draws; rows are numbered source after source."""

    seed: int
    size: int
    """Draws of a step that go through the epochs; those above are refills."""
    names: tuple[str, ...] = ("",)
    """Names of the sources, which have separate random streams."""
    counts: tuple[int, ...]
    """Rows of each source."""
    quotas: tuple[int, ...]
    """Draws of each source in an epoch."""
    shuffled: bool = True
    """Whether a source's rows come in a new order each epoch, or in file order."""

    def row(self, step: int, draw: int) -> int:
        """The row of a draw in a step; steps count from 1."""
        if draw >= self.size:
            # In place of an uninformative one: a row that the step has not drawn, if there is one.
            epoch, position = divmod(draw - self.size, sum(self.quotas))
            source, before = self.draw_of_source("sources of refills", step, position)
            rows = refill_order(self, step, source)
            return rows[(epoch * self.quotas[source] + before) % len(rows)]
        epoch, position = divmod((step - 1) * self.size + draw, sum(self.quotas))
        source, number = self.draw_of_source("epoch", epoch, position)
        source_epoch, place = divmod(epoch * self.quotas[source] + number, self.counts[source])
        return self.first_row(source) + int(self.order(source, "epoch", source_epoch)[place])

    def draw_of_source(self, purpose: str, index: int, position: int) -> tuple[int, int]:
        """The source at a position of an epoch, and the number of its earlier draws there."""
        sources, numbers = schedule(self.seed, purpose, index, self.quotas)
        return int(sources[position]), int(numbers[position])

    def order(self, source: int, purpose: str, index: int) -> Int64[ndarray, " row"]:
        """The order of a source's rows in one of its epochs, or for one step's refills."""
        if not self.shuffled:
            return np.arange(self.counts[source])
        stream = f"{purpose} of {self.names[source]}" if len(self.names) > 1 else purpose
        return permutation(self.seed, stream, index, self.counts[source])

    def first_row(self, source: int) -> int:
        return sum(self.counts[:source])


def quotas_of(counts: Sequence[int], weights: Sequence[float] | None) -> tuple[int, ...]:
    """Draws of each source in an epoch; without weights its rows, so that every row is drawn once.

    q_s = ⌊L w_s / Σ w⌋, and one more for those with the largest remainders until Σ q = L,   L = max(1000, Σ rows)
    """
    if weights is None:
        return tuple(counts)
    length = max(SHORTEST_EPOCH, sum(counts))
    exact = [length * weight / sum(weights) for weight in weights]
    quotas = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda source: quotas[source] - exact[source])
    for source in by_remainder[: length - sum(quotas)]:
        quotas[source] += 1
    if min(quotas) == 0:
        never = quotas.index(0)
        raise UserError(
            f"task.sources[{never}].weight = {weights[never]:g} of {sum(weights):g} is less than one draw in an epoch"
            f" of {length}; raise it, or leave the source out"
        )
    return tuple(quotas)


@functools.lru_cache(maxsize=16)
def refill_order(order: DrawOrder, step: int, source: int) -> list[int]:
    """A source's rows that can replace this step's uninformative ones, or all where the step drew all."""
    drawn = {order.row(step, draw) for draw in range(order.size)}
    first = order.first_row(source)
    rows = [first + row for row in order.order(source, "refill", step).tolist()]
    return [row for row in rows if row not in drawn] or rows


@functools.lru_cache(maxsize=4)
def schedule(
    seed: int, purpose: str, index: int, quotas: tuple[int, ...]
) -> tuple[Int64[ndarray, " draw"], Int64[ndarray, " draw"]]:
    """The source of each draw of an epoch, and its number among that source's draws there."""
    sources = np.repeat(np.arange(len(quotas)), quotas)
    if len(quotas) > 1:
        sources = sources[permutation(seed, f"{purpose} of the mixture", index, len(sources))]
    numbers = np.empty_like(sources)
    for source, quota in enumerate(quotas):
        numbers[sources == source] = np.arange(quota)
    return sources, numbers


@functools.lru_cache(maxsize=16)
def permutation(seed: int, purpose: str, index: int, num_rows: int) -> Int64[ndarray, " row"]:
    """The order of the rows in one epoch (or of one step's refills): a function of what it is for."""
    name = repr(("dataset", seed, purpose, index)).encode()
    key = np.frombuffer(hashlib.blake2b(name, digest_size=16).digest(), dtype="<u8").astype(np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(num_rows)
