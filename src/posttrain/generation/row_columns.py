"""The rows that are decoded together: who they are, and their tokens in columns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from posttrain.generation.request import Continuation
from posttrain.models.transfers import on_cpu
from posttrain.records import Alternatives


@dataclass(frozen=True, slots=True)
class KeptRow:
    """The cache of a completion that has ended, for a continuation of it."""

    tokens: tuple[int, ...]
    cached: Sequence[Tensor]
    length: int
    """Tokens in the cache: all but the last, which has predicted nothing yet."""
    prefilled: int
    """How many of them one prefill computed; the others went through the model one per step."""


@dataclass(slots=True)
class Member:
    """A row being decoded."""

    continuation: Continuation
    given: list[int]
    """Tokens of the prefix that have yet to go through the model, the next one last."""
    prefilled: int
    """See `KeptRow.prefilled`."""
    last_step: int
    """The step of its sampling in which it reaches its limit."""
    ended_by_text: bool = False
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(version, tokens): what earlier weights sampled of it."""

    def spans(self, version: int, length: int) -> list[tuple[int, int]]:
        """The weights' versions for its `length` tokens; `version` sampled the last ones."""
        rest = length - sum(count for _, count in self.versions)
        return [*self.versions, *([(version, rest)] if rest else [])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The rows being decoded, one entry a row; entries are written as tokens are sampled."""

    count: Int64[Tensor, " row"]
    """Tokens sampled so far."""
    limit: Int64[Tensor, " row"]
    """Tokens after which the completion is cut off."""
    stopped: Int64[Tensor, " row"]
    """Tokens up to the first stop token, or 0 before there is one.  Those sampled after it are not part of it."""
    uniforms: Float64[Tensor, "row drawn"]
    """The uniform number that each token is drawn with; left out of rows that have ended."""
    tokens: Int64[Tensor, "row position"]
    logprobs: Float64[Tensor, "row position"]
    cut_logprobs: Float64[Tensor, "row position"]
    alternatives: Int64[Tensor, "row position kept"]
    alternative_logprobs: Float64[Tensor, "row position kept"]

    @staticmethod
    def empty(num_alternatives: int, device: torch.device) -> "Columns":
        """No rows, of completions of no tokens, with this many alternatives of each token."""
        number = torch.zeros(0, 0, num_alternatives, dtype=torch.long, device=device)
        real = number.double()
        return Columns(
            count=number.new_zeros(0),
            limit=number.new_zeros(0),
            stopped=number.new_zeros(0),
            uniforms=real.new_zeros(0, 0),
            tokens=number.new_zeros(0, 0),
            logprobs=real.new_zeros(0, 0),
            cut_logprobs=real.new_zeros(0, 0),
            alternatives=number,
            alternative_logprobs=real,
        )

    def map(self, change: Callable[[str, Tensor], Tensor]) -> "Columns":
        """Every column, changed by name."""
        return Columns(**{each.name: change(each.name, getattr(self, each.name)) for each in fields(self)})

    @property
    def lengths(self) -> Int64[Tensor, " row"]:
        """Tokens of each completion so far."""
        return torch.where(self.stopped > 0, self.stopped, self.count)

    def alternatives_of(self, row: int, length: int) -> Alternatives:
        both = (self.alternatives[row, :length].tolist(), self.alternative_logprobs[row, :length].tolist())
        return tuple(tuple(zip(tokens, logprobs, strict=True)) for tokens, logprobs in zip(*both, strict=True))

    def drawn(self, rows: Int64[Tensor, " chosen"]) -> "Columns":
        """A copy of some rows without their uniform numbers."""
        return replace(self, uniforms=self.uniforms[:, :0]).map(lambda _, values: values[rows])

    @staticmethod
    def joined(parts: "Sequence[Columns]") -> "Columns":
        """All rows of all parts in order, on the CPU; from a GPU in one copy."""
        width, names = max(part.width for part in parts), [each.name for each in fields(Columns)]
        wide = [part.widened(width - part.width) for part in parts]
        values = on_cpu([getattr(part, name) for part in wide for name in names])
        return Columns(**{name: torch.cat(values[place :: len(names)]) for place, name in enumerate(names)})

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def widened(self, more: int) -> "Columns":
        """The same, with room for more tokens."""

        def wider(_: str, values: Tensor) -> Tensor:
            if values.ndim == 1 or not more:
                return values
            return torch.nn.functional.pad(values, (*(0, 0) * (values.ndim - 2), 0, more))

        return self.map(wider)

    def add(self, limit: Int64[Tensor, " new"], uniforms: Float64[Tensor, "new position"]) -> "Columns":
        """These rows, followed by new ones that have no token yet, with room for their tokens."""
        new = {"limit": limit, "uniforms": uniforms}

        def extended(name: str, values: Tensor) -> Tensor:
            empty = values.new_zeros(len(limit), *values.shape[1:])
            return torch.cat([values, new.get(name, empty)])

        return self.widened(uniforms.shape[1] - self.width).map(extended)

    def keep(self, source: Int64[Tensor, " moved"], target: Int64[Tensor, " moved"], num_left: int) -> "Columns":
        """The first `num_left` rows, after those at `source` have taken the places at `target`."""

        def kept(_: str, values: Tensor) -> Tensor:
            values[target] = values[source]
            return values[:num_left]

        return self.map(kept)
