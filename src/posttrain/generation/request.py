"""What to sample: the settings of a sampling, the tokens that each completion continues, and the uniform numbers.

Randomness has no state: every uniform number is a function of its purpose and place.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, UInt64
from numpy import ndarray

from posttrain.options.rollout import SamplingParams
from posttrain.records import Alternatives, Finish


@dataclass(frozen=True, slots=True)
class StreamKey:
    """Names a family of streams: one stream per (draw, sample), one number per position."""

    seed: int
    purpose: str
    """What the numbers decide ("rollout", "evaluation", ...); each purpose has different streams."""
    step: int
    """Training step, or 0 outside training."""


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
        block, skipped = divmod(start, 4)  # Philox4x64 turns one counter into four numbers
        counter[:] = (block, draw, sample, 0)
        generator.state = state  # its buffer is marked as used up, so nothing of the last row remains
        if skipped:
            draw_uniforms(skipped)
        draw_uniforms(out=row)
    return table


@dataclass(frozen=True, kw_only=True)
class Request:
    """The settings of one sampling."""

    sampling: SamplingParams
    key: StreamKey
    """The streams of uniform numbers that tokens are drawn with."""
    suppressed: tuple[int, ...] = ()
    """Tokens that are never sampled; for studies of a policy, not for training: log-probs are those among the rest."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end a completion as a limit would, after the token that completes one; for serving, not training."""
    keep_alternatives: int = 0
    """How many of the likeliest tokens each sampled token is returned with; see `Sampled.alternatives`."""
    keep: bool = False
    """Whether completions may be continued: an engine then keeps their caches until they are continued or released."""


@dataclass(frozen=True, kw_only=True)
class GroupRequest(Request):
    """Several completions for each of several prompts."""

    group_size: int
    """Completions per prompt."""
    max_completion_tokens: int
    """Longest completion; also bounded by the room that the prompt leaves in the model's context."""
    first_draw: int = 0
    """Draw number of the first prompt: prompt 3 of one batch and prompt 0 of a refill with 3 are the same draw."""
    first_sample: int = 0
    """Sample number of the first completion of each prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """Tokens to continue, and the place in the streams of uniform numbers that the next ones are drawn with.

    Continuations with equal prefixes are a group: put in a row, they are prefilled once.  A prefix that
    begins with the prefix and the tokens of an earlier result of the same draw and sample reuses its cache.
    """

    prefix: tuple[int, ...]
    """All tokens so far, the prompt's first."""
    draw: int
    sample: int
    first_position: int = 0
    """Position in the stream of the first token that is sampled now.  A second turn starts after the positions already
    used; from 0 it would draw the same numbers again."""
    limit: int
    """Most tokens to sample now."""
    key: StreamKey | None = None
    """Its streams of uniform numbers, where they are not the request's: several steps may be sampled side by side."""
    name: str = field(default="", compare=False)
    """For messages."""

    @property
    def label(self) -> str:
        return f"{self.name or f'draw {self.draw}'}, sample {self.sample}"


class SampledToken(NamedTuple):
    """A token of a completion that is still in progress."""

    token: int
    logprob: float
    """log μ(token) in nats, after temperature and before any cut."""
    alternatives: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens there, with log μ; as many as the request keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A completion of a continuation."""

    continuation: Continuation
    tokens: tuple[int, ...]
    """Sampled tokens, the stop token included."""
    logprobs: tuple[float, ...]
    """log μ(token) in nats, after temperature and before any cut."""
    cut_logprobs: tuple[float, ...] | None = None
    """log-probs under the cut distribution that was sampled, in nats; None if nothing was cut."""
    alternatives: Alternatives | None = None
    """For each token the likeliest tokens there with log μ in nats; None if the request asks for none."""
    finish: Finish
    ended_by_text: bool = False
    """Whether one of `Request.stop_texts` ended it; `finish` is then LENGTH."""
    versions: tuple[tuple[int, int], ...]
    """(version of the weights, tokens that they sampled), in order; the counts sum to the number of tokens."""

    @property
    def sequence(self) -> tuple[int, ...]:
        """The prefix and the sampled tokens: a continuation of this begins with them."""
        return self.continuation.prefix + self.tokens
