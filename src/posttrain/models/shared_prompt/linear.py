"""Products with weight matrices, and matrices packed for the many small ones of decoding on a CPU."""

from bisect import bisect_left

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

SIZES = (1, 2, 4, 8, 16, *range(32, 257, 32))
"""Numbers of rows that products are made with.  oneDNN compiles a kernel of half a megabyte for each that it meets."""
MOST_ROWS = SIZES[-1]
USUAL_ROWS = 32
"""Rows of a product that the order is chosen for; it serves others as well."""


class PackedWeight:
    """A float32 matrix packed in the order in which oneDNN reads it, so that no product has to reorder it first.

    At 32 rows a product takes 40 % of the time, at 1,200 rows 85 % (benchmarks/linear.py).  For inference: the copy
    does not follow its weight.
    """

    def __init__(self, weight: Float[Tensor, "outputs inputs"]) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), USUAL_ROWS)

    @staticmethod
    def serves(weight: Tensor) -> bool:
        """Whether this machine and precision have such products."""
        return (
            weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and torch.backends.mkldnn.is_available()
            and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        )

    def product(self, x: Float[Tensor, "row inputs"], bias: Float[Tensor, " outputs"] | None) -> Tensor:
        """x · Wᵀ + bias."""
        parts = [self._part(part, bias) for part in x.split(MOST_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _part(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The same for few rows, filled up to the next of the sizes."""
        rows = len(x)
        size = SIZES[bisect_left(SIZES, rows)]
        padded = x if size == rows else F.pad(x, (0, 0, 0, size - rows))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(padded, self.weight, bias, "none", [], "")
        return out[:rows]


Weight = Tensor | PackedWeight


def linear(
    x: Float[Tensor, "row inputs"], weight: Weight, bias: Float[Tensor, " outputs"] | None = None
) -> Float[Tensor, "row outputs"]:
    """x · Wᵀ + bias, whichever way the matrix is kept."""
    if isinstance(weight, PackedWeight):
        return weight.product(x, bias)
    return F.linear(x, weight, bias)


def for_inference(weight: Tensor) -> Weight:
    """The matrix as its products are quickest while it stays as it is."""
    return PackedWeight(weight) if PackedWeight.serves(weight) else weight
