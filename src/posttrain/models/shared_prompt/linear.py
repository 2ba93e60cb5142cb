"""Products with weight matrices, and matrices packed for the many small ones of decoding on a CPU.

The decoder reads every linear layer of a model through `adapted.projection`, which gives a `Weight`.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

SIZES = (1, 2, 4, 8, 16, *range(32, 257, 32))
"""Numbers of rows of products.  oneDNN compiles a kernel of half a megabyte for each."""
MOST_ROWS = SIZES[-1]
USUAL_ROWS = 32
"""Rows of a product for which the order is optimal; it works for all."""


class PackedWeight:
    """A float32 matrix in oneDNN's order, so that products do not have to reorder it first.

    At 32 rows a product takes 40 % of the time, at 1,200 rows 85 % (benchmarks/linear.py).  For inference: the copy
    does not follow its weight.
    """

    def __init__(self, weight: Float[Tensor, "outputs inputs"]) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), USUAL_ROWS)

    @staticmethod
    def serves(weight: Tensor) -> bool:
        """Whether this machine and precision support it."""
        return (
            weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and torch.backends.mkldnn.is_available()
            and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        )

    def product(self, x: Float[Tensor, "row inputs"], bias: Float[Tensor, " outputs"] | None) -> Tensor:
        parts = [self._part(part, bias) for part in x.split(MOST_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _part(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The same for few rows, padded to the next of `SIZES`."""
        rows = len(x)
        size = SIZES[bisect_left(SIZES, rows)]
        padded = x if size == rows else F.pad(x, (0, 0, 0, size - rows))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(padded, self.weight, bias, "none", [], "")
        return out[:rows]


Matrix = Tensor | PackedWeight


@runtime_checkable
class Weight(Protocol):
    """A linear layer as the decoder uses it, x · Wᵀ + b, in whatever form it is kept."""

    def product(self, x: Float[Tensor, "row inputs"]) -> Float[Tensor, "row outputs"]: ...

    def of_tokens(self, rows: Int64[Tensor, " kept"]) -> "Weight": ...

    def for_inference(self) -> "Weight":
        """The same in its fastest form, while its numbers do not change."""
        ...

    def owned(self) -> "Weight":
        """The same at fixed addresses; `take_over` updates it."""
        ...

    def take_over(self, other: "Weight") -> None:
        """Copy the numbers of a weight of the same modules, in place."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """Some outputs of a linear layer."""

    matrix: Matrix
    bias: Tensor | None = None

    def product(self, x: Float[Tensor, "row inputs"]) -> Float[Tensor, "row outputs"]:
        return linear(x, self.matrix, self.bias)


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """Linear layers of one input, outputs side by side: joined in one part, or one part each."""

    parts: tuple[Part, ...]

    def product(self, x: Float[Tensor, "row inputs"]) -> Float[Tensor, "row outputs"]:
        if len(self.parts) == 1:
            return self.parts[0].product(x)
        return torch.cat([part.product(x) for part in self.parts], dim=-1)

    def of_tokens(self, rows: Int64[Tensor, " kept"]) -> "DenseWeight":
        return self

    def for_inference(self) -> "DenseWeight":
        """See `Weight`.  Packing copies anyway, so parts are joined."""
        parts = self.parts
        if all(PackedWeight.serves(_tensor(part)) for part in parts):
            parts = _joined(parts)
        return DenseWeight(tuple(Part(for_inference(_tensor(part)), part.bias) for part in parts))

    def owned(self) -> "DenseWeight":
        """See `Weight`.  Frozen tensors keep their address and are not copied."""
        return DenseWeight(
            tuple(Part(_kept(_tensor(part)), None if part.bias is None else _kept(part.bias)) for part in self.parts)
        )

    def take_over(self, other: Weight) -> None:
        assert isinstance(other, DenseWeight)
        for mine, new in zip(self.parts, other.parts, strict=True):
            _write(_tensor(mine), _tensor(new))
            if mine.bias is not None and new.bias is not None:
                _write(mine.bias, new.bias)


def dense_projection(modules: Sequence[nn.Linear | Conv1D], dtype: torch.dtype) -> Weight:
    """Linear layers that read the same input as one, outputs side by side, in `dtype`.

    Trained layers are joined by a differentiable concatenation, so one product serves all and gradients reach the
    model's parameters.  Frozen ones stay apart: the backward pass would keep a joined copy instead of the parameters.
    """
    parameters = [
        parameter for module in modules for parameter in (module.weight, module.bias) if parameter is not None
    ]
    trained = all(parameter.requires_grad for parameter in parameters)
    parts = tuple(Part(weight_of(module), module.bias) for module in modules)
    if trained:
        parts = _joined(parts)
    return DenseWeight(tuple(_part(_tensor(part), part.bias, dtype) for part in parts))


def weight_of(module: nn.Linear | Conv1D) -> Float[Tensor, "outputs inputs"]:
    """W of x · Wᵀ + b; GPT-2's layers keep it transposed."""
    return module.weight.T if isinstance(module, Conv1D) else module.weight


def linear(
    x: Float[Tensor, "row inputs"], matrix: Matrix, bias: Float[Tensor, " outputs"] | None = None
) -> Float[Tensor, "row outputs"]:
    if isinstance(matrix, PackedWeight):
        return matrix.product(x, bias)
    return F.linear(x, matrix, bias)


def for_inference(matrix: Tensor) -> Matrix:
    return PackedWeight(matrix) if PackedWeight.serves(matrix) else matrix


def _joined(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """One part of all, unless only some have a bias."""
    biases = [part.bias for part in parts if part.bias is not None]
    if len(parts) == 1 or len(biases) not in (0, len(parts)):
        return parts
    return (Part(torch.cat([_tensor(part) for part in parts]), torch.cat(biases) if biases else None),)


def _part(matrix: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Part:
    return Part(matrix.to(dtype), None if bias is None else bias.to(dtype))


def _tensor(part: Part) -> Tensor:
    assert isinstance(part.matrix, Tensor), "a packed matrix follows no other"
    return part.matrix


def _write(target: Tensor, source: Tensor) -> None:
    if target.data_ptr() != source.data_ptr():  # a frozen parameter is its own copy
        target.copy_(source)


def _kept(tensor: Tensor) -> Tensor:
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return tensor if frozen else tensor.detach().clone()
