"""Is this a causal language model whose logits our output layer makes?  Asked of the model itself, once."""

from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from posttrain.errors import UserError
from posttrain.models.forward import model_hidden
from posttrain.models.output_layer import output_layer_of

EXACT_TOLERANCE, HALF_TOLERANCE = 1e-3, 5e-2
"""Share of the largest logit that rounding explains: of float32, and of weights in a half-precision type."""


@torch.no_grad()
def require_causal_logits(model: PreTrainedModel) -> None:
    """Raise UserError where the model reads tokens that come later, or makes other logits than its output layer alone.

    Asked of the model itself, on two rows of three tokens that differ in the last: no list of families is complete.
    """
    name = f"model: a {type(model).__name__}"
    if model.config.is_encoder_decoder:
        raise UserError(f"{name} reads prompts with an encoder; only causal language models can be trained here.")
    vocabulary = len(cast(nn.Embedding, model.get_input_embeddings()).weight)
    rows = torch.tensor([[1, 2, 3], [1, 2, 4]], device=model.device) % vocabulary
    dtype = product_type(model)
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16 != model.dtype):
        own = model(input_ids=rows, use_cache=False).logits
    tolerance = EXACT_TOLERANCE if dtype in (torch.float32, torch.float64) else HALF_TOLERANCE
    bound = tolerance * own.abs().max()
    if (own[0, :2] - own[1, :2]).abs().max() > bound:
        raise UserError(
            f"{name} reads tokens that come later, so it is no causal language model as it is configured"
            " (is_decoder in its config, for families that have it)."
        )
    positions = torch.arange(rows.shape[1], device=rows.device).expand(len(rows), -1)
    hidden = model_hidden(model, dtype, rows, positions, use_cache=False)
    ours = output_layer_of(model, dtype).logits(hidden.flatten(0, 1))
    if ours.shape != own.flatten(0, 1).shape or (ours - own.flatten(0, 1)).abs().max() > bound:
        raise UserError(
            f"{name} makes its logits in another way than from its last hidden states by one matrix, a bias, a scale"
            " and a soft cap, which is not supported."
        )


def product_type(model: PreTrainedModel) -> torch.dtype:
    """What all of a model can be computed in: its type, or bfloat16 where some of its matrices are held in that."""
    held = {parameter.dtype for parameter in model.parameters()}
    return torch.bfloat16 if torch.bfloat16 in held else model.dtype
