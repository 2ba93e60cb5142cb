"""Is this a causal language model whose logits our output layer makes?  Asked of the model itself, once."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.errors import UserError
from posttrain.models.context import num_embeddings
from posttrain.models.forward import Completions, ForwardNeeds, PlainForward

EXACT_TOLERANCE, HALF_TOLERANCE = 1e-3, 5e-2
"""Share of the largest logit that rounding explains: of float32, and of weights in a half-precision type."""
CANNOT_READ = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""What models raise that want pictures, a language or the hidden states of another beside the tokens."""

WITHOUT_GRADIENT = {"reformer": "computes gradients in training mode alone, where its dropout is on"}
"""Families that cannot be trained with dropout off, and why."""


@torch.no_grad()
def require_causal_logits(model: PreTrainedModel, compute_dtype: torch.dtype) -> None:
    """Raise UserError where the model reads tokens that come later, or makes other logits than its output layer alone.

    Or where it cannot be computed in this type.  Asked of the model itself, on two rows of three tokens that differ in
    the last: no list of families is complete.
    """
    name = f"model: a {type(model).__name__}"
    if model.config.is_encoder_decoder:
        raise UserError(f"{name} reads prompts with an encoder; only causal language models can be trained here.")
    if model.config.model_type in WITHOUT_GRADIENT:
        raise UserError(f"{name} {WITHOUT_GRADIENT[model.config.model_type]}.  Take a model of another family.")
    vocabulary = num_embeddings(model)
    rows = torch.tensor([[1, 2, 3], [1, 2, 4]], device=model.device) % vocabulary
    dtype = product_type(model)
    own, ours = both_logits(model, rows, dtype)
    if own.isnan().any():
        raise UserError(f"{name} computes NaN for a text of three tokens: its weights hold NaN or infinity.")
    tolerance = EXACT_TOLERANCE if dtype in (torch.float32, torch.float64) else HALF_TOLERANCE
    bound = tolerance * own.abs().max()
    if (own[0, :2] - own[1, :2]).abs().max() > bound:
        raise UserError(
            f"{name} reads tokens that come later, so it is no causal language model as it is configured"
            " (is_decoder in its config, for families that have it)."
        )
    if ours.shape != own.flatten(0, 1).shape or (ours - own.flatten(0, 1)).abs().max() > bound:
        raise UserError(
            f"{name} makes its logits in another way than from its last hidden states by one matrix, a bias, a scale"
            " and a soft cap, which is not supported."
        )
    if torch.bfloat16 == compute_dtype != dtype:
        both_logits(model, rows, compute_dtype)


def both_logits(
    model: PreTrainedModel, rows: Int64[Tensor, "row time"], dtype: torch.dtype
) -> tuple[Float[Tensor, "row time vocab"], Float[Tensor, "token vocab"]]:
    """The logits of some rows by the model itself and by our plain forward pass.

    Raises UserError where the model cannot read them.
    """
    read = [tuple(row) for row in rows.tolist()]
    completions = Completions([row[:1] for row in read], [(*row[1:], 0) for row in read], range(len(read)))
    mixed = dtype == torch.bfloat16 != model.dtype
    try:
        with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=mixed):
            own = model(input_ids=rows, use_cache=False).logits
        parts = PlainForward(model, dtype).completion_logprobs(
            completions, ForwardNeeds(logprobs=False, distributions=True)
        )
        assert parts.distributions is not None
        return own, parts.distributions.logits()
    except UserError:
        raise
    except CANNOT_READ as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        remedy = (
            "Its layers do not take bfloat16 products over weights of another type: set model.dtype to float32."
            if mixed
            else "If it is to be set up first, do so before a policy is made of it; else take a model of text alone."
        )
        raise UserError(
            f"model: a {type(model).__name__} cannot read a text of three tokens ({said}).  {remedy}"
        ) from error


def product_type(model: PreTrainedModel) -> torch.dtype:
    """What all of a model can be computed in: its type, or bfloat16 where some of its matrices are held in that."""
    held = {parameter.dtype for parameter in model.parameters()}
    return torch.bfloat16 if torch.bfloat16 in held else model.dtype
