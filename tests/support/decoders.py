"""Families of decoders beside those of `tiny`, each with what makes it itself, and ways to have them exact in float64.

Hugging Face computes norms, rotary angles and softmax in float32 whatever the model's type; here each is replaced by
the same in the model's own.  Windows are of 6 tokens, which the rows of most tests outgrow.
"""

from types import MethodType

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from transformers.masking_utils import eager_mask

WINDOW = 6
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 5, "sliding_window": WINDOW, "final_logit_softcapping": 3.0}
GEMMA3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0},
}
HALF_TURNED = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}

DECODER_CLASSES: dict[str, tuple[type, type, dict[str, object]]] = {
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": WINDOW, "head_dim": 6}),
    # The first layer knows positions and sees all tokens; the second neither.
    "smollm3": (
        SmolLM3ForCausalLM,
        SmolLM3Config,
        {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": WINDOW, "mlp_bias": True},
    ),
    "phi3": (Phi3ForCausalLM, Phi3Config, {"sliding_window": WINDOW, "rope_parameters": HALF_TURNED}),
    "gpt2": (GPT2LMHeadModel, GPT2Config, {}),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {**GEMMA, "attn_logit_softcapping": 2.0}),
    "gemma3_text": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": GEMMA3_ROPES,
            "attn_logit_softcapping": 2.0,  # which its attention does not read
        },
    ),
}


def make_exact(model: PreTrainedModel) -> None:
    """Have norms, angles and softmax computed in the model's own type."""
    if model.config.model_type != "gpt2":  # whose attention is in the model's own type
        model.config._attn_implementation = "exact"
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            gemma = type(module).__name__.startswith("Gemma")
            module.forward = MethodType(exact_offset_norm if gemma else exact_norm, module)
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = MethodType(exact_angles, module)


def exact_norm(self: nn.Module, x: Tensor) -> Tensor:
    """RMSNorm without the detour through float32."""
    return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


def exact_offset_norm(self: nn.Module, x: Tensor) -> Tensor:
    """The same as Gemma has it."""
    return (1 + self.weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def exact_angles(
    self: nn.Module, x: Tensor, position_ids: Tensor, layer_type: str | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin of the module's own rates in the type of x."""
    before = "" if layer_type is None else f"{layer_type}_"
    rates, scaling = getattr(self, f"{before}inv_freq"), getattr(self, f"{before}attention_scaling")
    angles = (position_ids[..., None].double() * rates.double()).repeat(1, 1, 2)
    return (angles.cos() * scaling).to(x.dtype), (angles.sin() * scaling).to(x.dtype)


def exact_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """The library's eager attention, its softmax in the type of the scores."""
    key, value = (kv.repeat_interleave(module.num_key_value_groups, dim=1) for kv in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        scores = scores + attention_mask
    return (torch.softmax(scores, dim=-1) @ value).transpose(1, 2), None


AttentionInterface.register("exact", exact_attention)
AttentionMaskInterface.register("exact", eager_mask)
