"""Adapters over a model that was loaded: a new one, or one that a folder holds; and its base in 4 bits."""

from dataclasses import replace

import torch

from posttrain.errors import UserError
from posttrain.models.adapters.lora import drops
from posttrain.models.adapters.peft_format import SavedAdapter, put_adapter
from posttrain.models.adapters.placing import add_adapter
from posttrain.models.adapters.quantized import quantize
from posttrain.models.loading.trainable import hold_frozen_in
from posttrain.models.policy import Policy, as_policy
from posttrain.models.recomputation import is_recomputing
from posttrain.options.adapter import ADAPTER_CONFIG, AdapterOptions
from posttrain.options.model import ModelOptions


def base_options(options: ModelOptions, saved: SavedAdapter) -> ModelOptions:
    """How the model below a saved adapter is loaded: from the path that this names, with its chat template."""
    try:
        below = replace(
            options,
            path=saved.base,
            adapter=options.adapter or AdapterOptions(),
            chat_template=options.chat_template or saved.chat_template,
        )
        below.require_folder()
    except UserError as error:
        where = f"base_model_name_or_path in {saved.folder / ADAPTER_CONFIG}"
        raise UserError(
            f"{where}: the model below the adapter cannot be had.  {error}  If that model has moved, write its new"
            " folder there."
        ) from error
    return below


def with_adapter(
    plain: Policy, options: ModelOptions, saved: SavedAdapter | None, *, seed: int, inference: bool
) -> Policy:
    """The policy with its linear layers in 4 bits and an adapter over them, as far as the options say so."""
    if not options.trains_adapter:
        return plain
    model, dtype = plain.model, plain.compute_dtype
    if options.quantization is not None:
        quantize(model, dtype, packed_kernel=inference and dtype == torch.bfloat16)
    if saved is not None:
        put_adapter(model, saved, options.adapter)
    elif options.adapter is not None:
        add_adapter(model, options.adapter, seed=seed)
    if drops(model) and is_recomputing(model):
        raise UserError(
            "model.adapter.dropout with model.gradient_checkpointing: layers that are computed again would drop other"
            " inputs than the first time.  Use one of them; dropout is rarely of use in reinforcement learning."
        )
    if options.weights == "auto" and plain.stored_dtype == dtype:
        hold_frozen_in(model, dtype)  # only now are they frozen
    adapted = as_policy(
        model,
        plain.tokenizer,
        dtype="bfloat16" if dtype == torch.bfloat16 else "float32",
        context=plain.context,  # angles are fixed for it
    )
    return replace(
        plain,
        forward=adapted.forward,
        forward_reason=adapted.forward_reason,
        cache_refusal=adapted.cache_refusal,
    )
