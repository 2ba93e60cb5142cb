"""Frozen layers in 4 bits, made by bitsandbytes: NF4 in blocks of 64 with quantised scales (QLoRA).

Dettmers et al. 2023, arXiv:2305.14314, sections 3 and 4.  bitsandbytes 0.50 has a kernel for CPUs with AVX512-BF16 that
packs a layer's weight in the first forward pass without gradient in eval mode, for good.  From then on products are in
bfloat16, and the base layer's part of a gradient is silently lost.  So it is only used for inference (`KERNEL`).
"""

import logging
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from posttrain.errors import UserError
from posttrain.models.adapters.adaptable import adaptable_layers, expert_matrices, require_half
from posttrain.models.adapters.lora import put_layer
from posttrain.models.adapters.peft_layers import LINEAR_4BIT, full_name

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
        raise UserError(
            f"model.quantization = {NF4}: bitsandbytes is not installed ({error}).  Run pip install 'posttrain[qlora]',"
            " or remove model.quantization."
        ) from error
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
        raise UserError(
            f"model.quantization = {NF4}: the model's family ({model.config.model_type}) has no torch.nn.Linear to"
            " quantise.  Remove model.quantization."
        )
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
    made = library.nn.Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=False,
        compute_dtype=compute_dtype,
        compress_statistics=True,
        quant_type=NF4,
        device="meta",
    )
    device = layer.weight.device
    made.weight = library.nn.Params4bit(
        layer.weight.data, requires_grad=False, compress_statistics=True, quant_type=NF4, module=made
    ).to(device)
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
