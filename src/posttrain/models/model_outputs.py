"""A model's own forward pass up to its output layer, with gradient checkpointing, and the output layer itself.

transformers recomputes activations only in training mode, which would turn dropout on.  Here layers do so in eval mode.
Log-probs are computed from the output layer in chunks (`models.logprobs`), so the logits of all tokens never exist at
once.  It is read from the model's output embeddings and config; `policy.logit_faults` compares it with the model.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from inspect import signature
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.errors import UserError
from posttrain.models.adapters.peft_layers import full_name
from posttrain.models.shared_prompt.families import alteration


def model_hidden(
    model: PreTrainedModel,
    compute_dtype: torch.dtype,
    tokens: Int64[Tensor, "row time"],
    positions: Int64[Tensor, "row time"],
    **more: object,
) -> Float[Tensor, "row time hidden"]:
    """Hidden states by the model's own forward, under autocast if the compute type is bfloat16."""
    if "position_ids" in signature(trunk(model).forward).parameters:
        more["position_ids"] = positions
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=compute_dtype == torch.bfloat16):
        out = trunk(model)(input_ids=tokens, **more)
    return cast(Tensor, out.last_hidden_state)


def trunk(model: PreTrainedModel) -> nn.Module:
    if model.base_model is not model:
        return model.base_model
    # A text-only class may name the part that only the whole family has.
    parts = [part for part in model.children() if isinstance(part, PreTrainedModel)]
    if len(parts) != 1:
        raise UserError(f"model: a {type(model).__name__} has no part that gives the hidden states before its logits.")
    return parts[0]


def cache_refusal(model: PreTrainedModel) -> str | None:
    """Why completions of this model cannot be sampled from cached keys and values; None if they can."""
    if "past_key_values" not in signature(trunk(model).forward).parameters:
        return f"a {model.config.model_type} does not support a cache of keys and values"
    kept = {type(layer) for layer in DynamicCache(config=model.config).layers}
    others = sorted(kind.__name__ for kind in kept - {DynamicLayer, DynamicSlidingWindowLayer, DummyLayer})
    if others or model._is_stateful:
        return f"layers of a {model.config.model_type} keep more than keys and values ({', '.join(others)})"
    return None


def enable_recomputation(model: PreTrainedModel) -> None:
    """Turn on gradient checkpointing: training keeps only the input of each layer, and computes the rest again."""
    if not recomputable_layers(model):
        fault = f"model.gradient_checkpointing: the layers of a {type(model).__name__} cannot be computed again"
        raise UserError(f"{fault}.  Remove it; a smaller update.tokens_per_microbatch also saves memory.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about a later name
        model.gradient_checkpointing_enable({"use_reentrant": False})
    release_inputs(model)


def release_inputs(model: PreTrainedModel) -> None:
    """Remove the embeddings' hook that transformers adds with gradient checkpointing.

    Only the reentrant kind needs it, and a hook excludes a model from the faster pass.
    """
    if is_recomputing(model) and model.main_input_name == "input_ids":
        model.disable_input_require_grads()


def recomputable_layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def is_recomputing(model: PreTrainedModel) -> bool:
    return any(layer.gradient_checkpointing for layer in recomputable_layers(model))


@contextmanager
def recomputing_layers(model: PreTrainedModel) -> Iterator[None]:
    """Inside, layers with gradient checkpointing are computed again in the backward pass, if gradients are enabled."""
    wanted = torch.is_grad_enabled()
    layers = [layer for layer in recomputable_layers(model) if wanted and layer.gradient_checkpointing]
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = wraps(layer.forward)(partial(_recomputed, layer.forward))
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            if own is None:
                del layer.forward  # its class's is found again
            else:
                layer.forward = own


def _recomputed(forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """A layer whose activations are not kept; random numbers are not restored, as dropout is off."""
    return checkpoint(partial(forward, **named), *given, use_reentrant=False, preserve_rng_state=False)


SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Config names of a soft cap of logits: Gemma and most others; RecurrentGemma; xLSTM."""
MULTIPLIES, DIVIDES, IGNORED = 1, -1, 0
SCALES = {
    **dict.fromkeys(("logit_scale", "lm_head_multiplier", "output_multiplier"), MULTIPLIES),
    **dict.fromkeys(("logits_scaling", "logits_mup_width_multiplier"), DIVIDES),
}
"""Config names of a factor of logits (Cohere; Falcon-H1; Muse) or of a divisor (Granite; Inkling, which divides the
hidden states)."""
OTHER_SCALES = {"hyperclovax": {"logits_scaling": MULTIPLIES}, "mpt": {"logit_scale": IGNORED}}
"""Families that use an option of these names differently."""


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """Logits of a hidden state h: z = scale · (h·Wᵀ + b), logits = soft_cap · tanh(z / soft_cap), or z without cap."""

    matrix: Float[Tensor, "vocab hidden"]
    """W, in the policy's compute dtype."""
    bias: Float[Tensor, " vocab"] | None = None
    """b, in the same dtype."""
    soft_cap: float | None = None
    """Bound of the logits' magnitude, > 0."""
    scale: float = 1.0

    @property
    def num_logits(self) -> int:
        return self.matrix.shape[0]

    def logits(self, hidden: Float[Tensor, "row hidden"]) -> Float[Tensor, "row vocab"]:
        """Logits of each row, in float32 or wider, differentiable."""
        return self.of_products(F.linear(hidden.to(self.matrix.dtype), self.matrix))

    def of_products(self, products: Float[Tensor, "row vocab"]) -> Float[Tensor, "row vocab"]:
        """Logits, in float32 or wider, of known h·Wᵀ."""
        z = products.to(torch.promote_types(products.dtype, torch.float32))
        if self.bias is not None:
            z = z + self.bias
        if self.scale != 1.0:
            z = z * self.scale
        return z if self.soft_cap is None else torch.tanh(z / self.soft_cap) * self.soft_cap

    def part(self, vocab: slice) -> "OutputLayer":
        return self._with(lambda tensor: tensor[vocab])

    def copy(self) -> "OutputLayer":
        return self._with(Tensor.clone)

    def detached(self) -> "OutputLayer":
        return self._with(Tensor.detach)

    def to(self, dtype: torch.dtype) -> "OutputLayer":
        return self._with(lambda tensor: tensor.to(dtype))

    def _with(self, change: Callable[[Tensor], Tensor]) -> "OutputLayer":
        return replace(self, matrix=change(self.matrix), bias=None if self.bias is None else change(self.bias))

    def take_over(self, other: "OutputLayer") -> None:
        """Copy another's matrix and bias into these, in place."""
        self.matrix.copy_(other.matrix)
        if self.bias is not None and other.bias is not None:
            self.bias.copy_(other.bias)


def output_layer_of(model: PreTrainedModel, dtype: torch.dtype) -> OutputLayer:
    """The model's output layer in this dtype, with the config's cap and scale."""
    head, config, scale = model.get_output_embeddings(), model.config.get_text_config(decoder=True), 1.0
    for name, use in (SCALES | OTHER_SCALES.get(config.model_type, {})).items():
        value = getattr(config, name, None)
        if value is not None and use != IGNORED:
            scale = scale * value if use == MULTIPLIES else scale / value
    cap = next((float(cap) for name in SOFT_CAPS if (cap := getattr(config, name, None))), None)
    return OutputLayer(matrix=head.weight, bias=head.bias, soft_cap=cap, scale=float(scale)).to(dtype)


def require_output_layer(model: PreTrainedModel) -> None:
    """Raise UserError if log-probs cannot be computed from the output layer's matrix, with the remedy for the cause."""
    head = model.get_output_embeddings()
    if head is None:
        fault = f"a {type(model).__name__} has no output layer, so it is not a causal language model"
        raise UserError(f"model: {fault}.  Give one that AutoModelForCausalLM makes.")
    altered = alteration(head)
    if type(head) is nn.Linear and altered is None:
        return
    found = altered or f"is a {full_name(type(head))}, not torch.nn.Linear"
    remedy = "Replace it by a torch.nn.Linear with the same weights, not quantised."
    if type(head.weight).__name__ == "DTensor":
        remedy = "Make the policy of the unsharded model, and split it after that (posttrain.models.sharding.sharded)."
    elif full_name(type(head)).startswith("peft."):
        remedy = "Remove the output layer from the adapter's target_modules and modules_to_save."
    elif type(head) is nn.Linear:
        remedy = "Remove what was added to it, and make the policy again."
    raise UserError(f"model: its output layer {found}, which is not supported.  {remedy}")
