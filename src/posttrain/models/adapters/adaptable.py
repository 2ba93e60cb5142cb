"""Which of a model's linear layers adapters can go on, and how much of the model they are.

Two kinds of `nn.Linear` cannot have one.  A family's own subclass computes something else than a product, such as a
router that returns scores and indices.  And a layer whose matrix other code reads is never called, or not only: an
adapter around it would have no effect there.  The second kind is found by running the model once on three tokens.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from posttrain.errors import UserError

QUANTISED = ("bitsandbytes.", "transformers.integrations.")
"""Where subclasses of `nn.Linear` are from that compute the same product of a matrix that they keep in another form."""
CANNOT_READ = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""What models raise that cannot read a text of three tokens."""


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Every linear layer but embeddings and output layer, those with an adapter by what is below it."""
    head = model.get_output_embeddings()
    return {
        name.removesuffix(".base_layer"): module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }


@torch.no_grad()
def adaptable_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The linear layers that only multiply, and that nothing else in the model reads."""
    layers = linear_layers(model)
    read: set[str] = set()
    multiplied: set[str] = set()
    vocabulary = len(cast(nn.Embedding, model.get_input_embeddings()).weight)
    rows = torch.tensor([[1, 2, 3]], device=model.device) % vocabulary
    types = {parameter.dtype for parameter in model.parameters()}
    mixed = torch.bfloat16 in types and len(types) > 1
    with watched(model, layers, read, multiplied), torch.autocast(model.device.type, torch.bfloat16, enabled=mixed):
        try:
            model(input_ids=rows, use_cache=False)
        except CANNOT_READ:
            read.clear()  # a policy of it asks the same of it (`require_causal_logits`), and says what is wrong
    return {
        name: layer for name, layer in layers.items() if name not in read and (is_product(layer) or name in multiplied)
    }


def is_product(layer: nn.Module) -> bool:
    """Whether a linear layer's class says that it is y = W·x + b."""
    kind = type(layer)
    return kind.forward in (nn.Linear.forward, Conv1D.forward) or kind.__module__.startswith(QUANTISED)


class Watched(nn.Module):
    """A layer that notes when anything but a call reads it, and when a call has given the product."""

    def __init__(self, layer: nn.Module, name: str, read: set[str], multiplied: set[str]) -> None:
        super().__init__()
        self.base_layer, self.name, self.read, self.multiplied = layer, name, read, multiplied

    def forward(self, *given: Any, **named: Any) -> Any:
        """What the layer gives."""
        out, layer = self.base_layer(*given, **named), self.base_layer
        if isinstance(layer, nn.Linear) and not is_product(layer) and isinstance(out, Tensor):
            expected = F.linear(given[0], layer.weight, layer.bias)
            if out.shape == expected.shape and torch.allclose(out, expected, rtol=1e-2, atol=1e-4):
                self.multiplied.add(self.name)
        return out

    def __getattr__(self, name: str) -> Any:
        """An attribute of the layer, which is noted."""
        if name == "base_layer":
            return super().__getattr__(name)
        self.read.add(self.name)
        return getattr(self.base_layer, name)


@contextmanager
def watched(model: nn.Module, layers: Iterable[str], read: set[str], multiplied: set[str]) -> Iterator[None]:
    """Inside, the layers note in `read` when they are read, and in `multiplied` that they are a product after all."""
    places = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], name) for name in layers]
    held = [getattr(above, last) for above, last, _ in places]
    try:
        for (above, last, name), layer in zip(places, held, strict=True):
            setattr(above, last, Watched(layer, name, read, multiplied))
        yield
    finally:
        for (above, last, _), layer in zip(places, held, strict=True):
            setattr(above, last, layer)


def expert_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of experts that a family keeps as one array of three dimensions for each layer, by name."""
    return {
        f"{name}.{short}".lstrip("."): parameter
        for name, module in model.named_modules()
        if "Expert" in type(module).__name__
        for short, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and parameter.is_floating_point()
    }


def share_of_linear_layers(linear: int, experts: int) -> float:
    """How much of a model's matrix weights linear layers are; the rest are experts."""
    return linear / (linear + experts)


def reaches_half(linear: int, experts: int) -> bool:
    """Whether linear layers are at least half of the matrix weights, so that holding them in 4 bits saves something."""
    return linear >= experts


def require_half(linear: int, experts: int) -> None:
    """Refuse 4 bits for a mixture of which experts, which stay as they are, are more than half."""
    if not reaches_half(linear, experts):
        share = share_of_linear_layers(linear, experts)
        raise UserError(
            f"model.quantization: only {share:.0%} of this mixture's matrix weights are in linear layers, which go into"
            " 4 bits; the experts would stay as they are.  Leave model.quantization out, and hold what is frozen in"
            " bfloat16 by model.dtype = bfloat16."
        )
