"""The linear layers of a model that can have adapters, those that `targets` name, and how much of the model they are.

Two kinds of `nn.Linear` cannot have one.  A family's subclass may compute something other than a product, such as a
router that returns scores and indices.  And an adapter has no effect where other code reads a layer's matrix instead of
calling the layer.  The second kind is found by running the model once on three tokens.

The same layers can be frozen in 4 bits, by bitsandbytes: NF4 in blocks of 64 with quantised scales (QLoRA; Dettmers et
al. 2023, arXiv:2305.14314, sections 3 and 4).  bitsandbytes 0.50 has a kernel for CPUs with AVX512-BF16 that packs a
layer's weight in the first forward pass without gradient in eval mode, for good.  After that, products are in bfloat16,
and the base layer's part of a gradient is silently lost.  So it is only used for inference (`KERNEL`).
"""

import logging
from difflib import get_close_matches
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from posttrain.errors import UserError
from posttrain.models.adapters.lora import LoraLinear, put_layer, wrap_experts
from posttrain.models.adapters.peft_layers import LINEAR_4BIT, full_name, refused_by_peft
from posttrain.options.model import ALL_LINEAR, EXPERTS, AdapterOptions

QUANTISED = ("bitsandbytes.", "transformers.integrations.")
"""Packages whose subclasses of `nn.Linear` compute the same product of a matrix stored in another form."""
CANNOT_READ = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""Errors of models that need more than tokens: pictures, a language, or the hidden states of another model."""


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Every linear layer except embeddings and output layer; below an adapter, its base layer."""
    head = model.get_output_embeddings()
    return {
        name.removesuffix(".base_layer"): module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }


@torch.no_grad()
def adaptable_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The linear layers that only multiply, and whose matrix no other code reads."""
    layers = linear_layers(model)
    read: set[str] = set()
    called: set[str] = set()
    vocabulary = len(cast(nn.Embedding, model.get_input_embeddings()).weight)
    rows = torch.tensor([[1, 2, 3]], device=model.device) % vocabulary
    types = {parameter.dtype for parameter in model.parameters()}
    mixed = torch.bfloat16 in types and len(types) > 1
    held = {name: model.get_submodule(name) for name in layers}  # above a base layer, its adapter
    try:
        for name, layer in held.items():
            put_layer(model, name, Watched(layer, name, read, called))
        with torch.autocast(model.device.type, torch.bfloat16, enabled=mixed):
            model(input_ids=rows, use_cache=False)
    except CANNOT_READ:
        read.clear()  # `policy.logit_faults` does the same, and says what is wrong
    finally:
        for name, layer in held.items():
            put_layer(model, name, layer)
    return {name: layer for name, layer in layers.items() if name not in read and (is_product(layer) or name in called)}


def is_product(layer: nn.Module) -> bool:
    """Whether a linear layer's class computes y = W·x + b."""
    kind = type(layer)
    return kind.forward in (nn.Linear.forward, Conv1D.forward) or kind.__module__.startswith(QUANTISED)


class Watched(nn.Module):
    """A layer that records when anything but a call reads it, and when a call has returned the product."""

    def __init__(self, layer: nn.Module, name: str, read: set[str], called: set[str]) -> None:
        super().__init__()
        self.base_layer, self.name, self.read, self.called = layer, name, read, called

    def forward(self, *given: Any, **named: Any) -> Any:
        out, layer = self.base_layer(*given, **named), self.base_layer
        if isinstance(layer, nn.Linear) and not is_product(layer) and isinstance(out, Tensor):
            expected = F.linear(given[0], layer.weight, layer.bias)
            if out.shape == expected.shape and torch.allclose(out, expected, rtol=1e-2, atol=1e-4):
                self.called.add(self.name)
        return out

    def __getattr__(self, name: str) -> Any:
        if name == "base_layer":
            return super().__getattr__(name)
        self.read.add(self.name)
        return getattr(self.base_layer, name)


def expert_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of experts that a family keeps as three-dimensional arrays, by name."""
    return {
        f"{name}.{short}".lstrip("."): parameter
        for name, module in model.named_modules()
        if "Expert" in type(module).__name__
        for short, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and parameter.is_floating_point()
    }


def share_of_linear_layers(linear: int, experts: int) -> float:
    return linear / (linear + experts)


def reaches_half(linear: int, experts: int) -> bool:
    """Whether linear layers are at least half of the matrix weights, so that 4 bits are worth it."""
    return linear >= experts


def require_half(linear: int, experts: int) -> None:
    """Refuse 4 bits for a mixture with more than half of its weights in experts, which are not quantised."""
    if not reaches_half(linear, experts):
        share = share_of_linear_layers(linear, experts)
        raise UserError(
            f"model.quantization: only {share:.0%} of this mixture's matrix weights are in linear layers; 4 bits leave"
            " the experts whole.  Remove model.quantization, and set model.dtype = bfloat16."
        )


def add_adapter(model: PreTrainedModel, options: AdapterOptions, *, seed: int) -> None:
    """Freeze the model and add an adapter to each target.  Raises UserError for a target that is not a layer."""
    targets, experts = target_layers(model, options.targets), expert_matrices(model)
    model.requires_grad_(False)
    for name in targets:
        if name in experts:
            wrap_experts(model, name, options, seed=seed)
        else:
            put_layer(model, name, LoraLinear(model.get_submodule(name), name, options, seed=seed))


def target_layers(model: PreTrainedModel, targets: tuple[str, ...]) -> list[str]:
    """The names of targeted layers and arrays of experts, in the model's order."""
    names, experts = list(adaptable_layers(model)), list(expert_matrices(model))
    by_default = [name for name in names if not refused_by_peft(model, name)]
    wanted: set[str] = set()
    for target in targets:
        if target == EXPERTS and experts:
            wanted.update(experts)
            continue
        found = [name for name in (by_default if target == ALL_LINEAR else names) if is_target(target, name)]
        if not found:
            raise UserError(f"model.adapter.targets: {no_such_layer(model, target, names)}")
        wanted.update(found)
    return [name for name in (*names, *experts) if name in wanted]


def is_target(target: str, name: str) -> bool:
    return target == ALL_LINEAR or f".{name}".endswith(f".{target}") or fnmatchcase(name, target)


def no_such_layer(model: PreTrainedModel, target: str, names: list[str]) -> str:
    """The end of a message about a target that matches no linear layer, with similar names."""
    if target == EXPERTS:
        return "experts: the model has no experts as three-dimensional arrays.  Name linear layers."
    others = [name for name, _ in model.named_modules() if name and is_target(target, name)]
    if others:
        kind = type(model.get_submodule(others[0])).__name__
        return f"{others[0]} is a {kind}, which has no adapter.  Name linear layers other than the output layer."
    parts = [name.split(".") for name in names]
    known = [".".join(each[start:]) for each in parts for start in reversed(range(len(each)))]  # q_proj, ...
    near = get_close_matches(target, dict.fromkeys(known), n=3, cutoff=0.5)
    kinds = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
    hint = f"Did you mean {' or '.join(near)}?" if near else f"There are: {kinds or 'no linear layers'}."
    return f"{target} is not one of the model's linear layers.  {hint}"


NF4 = "nf4"
KERNEL = "support_avx512bf16_for_cpu"
"""The attribute of a layer that lets it pack its weight."""


def bitsandbytes() -> ModuleType:
    """The library, imported only for 4 bits.  Raises UserError if it is not installed."""
    log = logging.getLogger("bitsandbytes")
    level = log.level
    log.setLevel(logging.CRITICAL)  # it warns about kernels on a hub that it does not need
    try:
        import bitsandbytes as library
    except ImportError as error:
        fault = f"model.quantization = {NF4}: bitsandbytes is not installed ({error})"
        raise UserError(f"{fault}.  Run pip install 'posttrain[qlora]', or remove model.quantization.") from error
    finally:
        log.setLevel(level)
    made: ModuleType = library
    return made


def quantize(
    model: PreTrainedModel,
    compute_dtype: torch.dtype,
    *,
    made_from: torch.dtype | None = None,
    device: torch.device | None = None,
    packed_kernel: bool = False,
) -> None:
    """Put every linear layer except the output layer into 4 bits; products are in `compute_dtype`.

    Each is moved to `device` and the type `made_from`, if given, and then quantised, so only one layer is held twice.
    `packed_kernel` is for models that are never trained and compute in bfloat16; see above.
    """
    library = bitsandbytes()
    if packed_kernel:
        assert compute_dtype == torch.bfloat16, "the packed kernel computes in bfloat16"
    names = [name for name, layer in adaptable_layers(model).items() if type(layer) is nn.Linear]
    if not names:
        fault = f"the model's family ({model.config.model_type}) has no torch.nn.Linear to quantise"
        raise UserError(f"model.quantization = {NF4}: {fault}.  Remove model.quantization.")
    for name in names:
        layer = cast(nn.Linear, model.get_submodule(name))
        layer.weight.requires_grad_(False)
        layer.weight.data = layer.weight.data.to(device or layer.weight.device, made_from or layer.weight.dtype)
        put_layer(model, name, in_4_bits(library, layer, compute_dtype, packed_kernel=packed_kernel))


def require_half_in_4_bits(model: nn.Module) -> None:
    """See `require_half`, for a model that is in 4 bits."""
    layers = [cast(nn.Linear, layer) for layer in model.modules() if is_4_bit(layer)]
    require_half(
        sum(layer.in_features * layer.out_features for layer in layers),
        sum(matrix.numel() for matrix in expert_matrices(model).values()),
    )


def in_4_bits(library: Any, layer: nn.Linear, compute_dtype: torch.dtype, *, packed_kernel: bool) -> nn.Module:
    """The layer in NF4."""
    inputs, outputs, kind = layer.in_features, layer.out_features, {"compress_statistics": True, "quant_type": NF4}
    made = library.nn.Linear4bit(inputs, outputs, bias=False, compute_dtype=compute_dtype, device="meta", **kind)
    device = layer.weight.device
    packed = library.nn.Params4bit(layer.weight.data, requires_grad=False, module=made, **kind)
    made.weight = packed.to(device)
    if layer.bias is not None:  # in the type that it is added in: bitsandbytes would change it in place
        made.bias = nn.Parameter(layer.bias.data.to(device, compute_dtype), requires_grad=False)
    made.eval()
    setattr(made, KERNEL, packed_kernel and bool(getattr(made, KERNEL)))
    return made  # type: ignore[no-any-return]


def compute_unpacked_in(model: PreTrainedModel, compute_dtype: torch.dtype) -> None:
    """Have layers that were stored in 4 bits compute in this type, as elsewhere, and never pack their weights."""
    for layer in model.modules():
        if is_4_bit(layer):
            setattr(layer, KERNEL, False)
            cast(Any, layer).compute_dtype, cast(Any, layer).compute_type_is_set = compute_dtype, True


def is_4_bit(layer: nn.Module) -> bool:
    return full_name(type(layer)) == LINEAR_4BIT


def stays_quantised(model: PreTrainedModel) -> bool:
    """Whether weights are quantised in another way than in 4 bits, so that no whole model can be saved."""
    in_4_bits = {id(layer.weight) for layer in model.modules() if is_4_bit(layer)}
    others = [each for each in model.parameters() if id(each) not in in_4_bits]
    return (getattr(model, "is_quantized", False) and not in_4_bits) or any(
        each.itemsize == 1 or not each.is_floating_point() for each in others
    )


def runs_packed(layer: nn.Module) -> bool:
    return is_4_bit(layer) and bool(getattr(layer, KERNEL))


def dequantized(layer: nn.Module) -> Tensor:
    """The matrix of a 4-bit layer, [outputs inputs], in the type that it was quantised from."""
    assert not runs_packed(layer), "the numbers of a packed layer are in another order"
    library, weight = bitsandbytes(), cast(Any, layer).weight
    made: Tensor = library.functional.dequantize_4bit(weight.data, weight.quant_state)
    return made


def whole_weight(layer: nn.Module) -> Tensor:
    """The matrix of a frozen linear layer, [outputs inputs], in whatever form it is kept."""
    if is_4_bit(layer):
        return dequantized(layer)
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight.detach().T if isinstance(layer, Conv1D) else weight.detach()


def num_parameters(model: nn.Module) -> int:
    """Number of a model's parameters; those in 4 bits count fully."""
    packed = [cast(nn.Linear, layer) for layer in model.modules() if is_4_bit(layer)]
    hidden = sum(layer.in_features * layer.out_features - layer.weight.numel() for layer in packed)
    return sum(parameter.numel() for parameter in model.parameters()) + hidden
