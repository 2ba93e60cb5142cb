"""The output layer of a causal language model, which computes logits from its last hidden states.

Log-probs are computed from it in chunks (`models.logprobs`), so the logits of all tokens never exist at once.  It is
read from the model's output embeddings and config; `policy.logit_faults` compares it with the model.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.errors import UserError
from posttrain.models.shared_prompt.families import alteration, full_name

SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Config names of a soft cap of logits: Gemma and most others; RecurrentGemma; xLSTM."""
MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""Config names of a factor of logits: Cohere; Falcon-H1; Muse."""
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
"""Config names of a divisor of logits: Granite; Inkling, which divides the hidden states."""
UNLIKE_THEIR_NAME = {"hyperclovax": ("multiplies", "logits_scaling"), "mpt": ("ignores", "logit_scale")}
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
    head, (soft_cap, scale) = model.get_output_embeddings(), cap_and_scale(model.config.get_text_config(decoder=True))
    return OutputLayer(matrix=head.weight, bias=head.bias, soft_cap=soft_cap, scale=scale).to(dtype)


def require_output_layer(model: PreTrainedModel) -> None:
    """Raise UserError if log-probs cannot be computed from the output layer's matrix, with the remedy for the cause."""
    head = model.get_output_embeddings()
    if head is None:
        raise UserError(
            f"model: a {type(model).__name__} has no output layer, so it is not a causal language model.  Give one that"
            " AutoModelForCausalLM makes."
        )
    altered = alteration(head)
    if type(head) is nn.Linear and altered is None:
        return
    found = altered or f"is a {full_name(type(head))}, not torch.nn.Linear"
    raise UserError(f"model: its output layer {found}, which is not supported.  {_remedy(head)}")


def _remedy(head: nn.Module) -> str:
    if type(head.weight).__name__ == "DTensor":
        return (
            "Make the policy of the unsharded model.  To train it sharded, replace the policy's `forward` by one that"
            " computes log-probs from the shards (posttrain.models.forward.ForwardPass)."
        )
    if full_name(type(head)).startswith("peft."):
        return "Remove the output layer from the adapter's target_modules and modules_to_save."
    if type(head) is nn.Linear:
        return "Remove what was added to it, and make the policy again."
    return "Replace it by a torch.nn.Linear with the same weights, not quantised."


def cap_and_scale(config: Any) -> tuple[float | None, float]:
    """A config's soft cap (None: none) and factor of the logits."""
    different, name = UNLIKE_THEIR_NAME.get(config.model_type, ("", ""))
    caps = [getattr(config, each, None) for each in SOFT_CAPS]
    scale = 1.0
    for each in (*MULTIPLIERS, *DIVISORS):
        value = getattr(config, each, None)
        if value is None or (each == name and different == "ignores"):
            continue
        divides = each in DIVISORS and not (each == name and different == "multiplies")
        scale = scale / value if divides else scale * value
    return next((float(cap) for cap in caps if cap), None), float(scale)
