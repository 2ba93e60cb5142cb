"""Randomness without state: every uniform number is a function of its purpose and place."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, UInt64
from numpy import ndarray

NUMBERS_PER_BLOCK = 4
"""Philox4x64 turns one counter into this many 64-bit numbers."""


@dataclass(frozen=True, slots=True)
class StreamKey:
    """Names a family of streams: one stream per (draw, sample), one number per position."""

    seed: int
    """The run's seed."""
    purpose: str
    """What the numbers decide ("rollout", "evaluation", ...); each purpose has different streams."""
    step: int
    """Training step, or 0 where there is none."""


def philox_key(key: StreamKey) -> UInt64[ndarray, " 2"]:
    """The 128-bit key of the generator: a hash of (seed, purpose, step), so that near steps share nothing."""
    name = repr((key.seed, key.purpose, key.step)).encode()
    return np.frombuffer(hashlib.blake2b(name, digest_size=16).digest(), dtype="<u8").astype(np.uint64)


def uniform_table(
    key: StreamKey, rows: Sequence[tuple[int, int, int]], *, count: int
) -> Float64[ndarray, "row position"]:
    """Uniform numbers in [0, 1) for the rows (draw, sample, start), at positions start .. start + count - 1.

        u = (x >> 11) / 2^53,   x = word (position mod 4) of Philox4x64-10(counter = (position div 4, draw, sample, 0))

    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".  Numpy adds 1 to the counter before it uses
    it, which is the same for all and kept.  Any position is reached directly; a row depends on no other row.
    """
    generator = np.random.Philox(key=philox_key(key))
    state = generator.state
    counter = state["state"]["counter"]
    table = np.empty((len(rows), count))
    draw_uniforms = np.random.Generator(generator).random
    for row, (draw, sample, start) in zip(table, rows, strict=True):
        block, skipped = divmod(start, NUMBERS_PER_BLOCK)
        counter[:] = (block, draw, sample, 0)
        generator.state = state  # its buffer is marked as used up, so nothing of the last row remains
        if skipped:
            draw_uniforms(skipped)
        draw_uniforms(out=row)
    return table


def uniforms(key: StreamKey, draw: int, sample: int, start: int, count: int) -> Float64[ndarray, " position"]:
    """The uniform numbers of one completion at positions start .. start + count - 1; see `uniform_table`."""
    return uniform_table(key, [(draw, sample, start)], count=count).reshape(count)
