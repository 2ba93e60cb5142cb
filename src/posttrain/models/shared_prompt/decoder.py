"""One forward pass for training and sampling: the Llama and Qwen decoder families over packed tokens.

It reads the weights of a Hugging Face model and owns none.  Attention is given by the caller, so the
trainer (packed, shared prompts) and the sampler (cached keys and values) run the same arithmetic otherwise.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.models.shared_prompt.embedding import embed
from posttrain.models.shared_prompt.fused import rms_norm, rotate, swiglu
from posttrain.models.shared_prompt.linear import Weight, for_inference, linear

Attend = Callable[
    [int, Float[Tensor, "token heads width"], Float[Tensor, "token kv width"], Float[Tensor, "token kv width"]],
    Float[Tensor, "token heads width"],
]
"""attend(layer, query, key, value): what the caller's layout or cache makes of one layer's projections."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One decoder layer's weights, those of parallel projections joined."""

    input_norm: Tensor
    qkv: Weight
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """RMSNorm weights of query and key heads, [heads + kv_heads, width]; None where the family has none."""
    out: Weight
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: Weight
    down: Weight


def inference_layer(layer: DecoderLayer) -> DecoderLayer:
    """The layer with its matrices as their products are quickest; for weights that no longer change."""
    products = {name: for_inference(getattr(layer, name)) for name in ("qkv", "out", "gate_up", "down")}
    return replace(layer, **products)  # type: ignore[arg-type]


class Decoder:
    """The forward pass of a model that `models.shared_prompt.architectures` does not refuse.

    Matrix products and attention run in `compute_dtype`; the residual stream, norms and rotary angles in the weights'.
    """

    def __init__(self, model: PreTrainedModel, compute_dtype: torch.dtype | None = None) -> None:
        config = model.config
        self.model = model
        self.compute_dtype = compute_dtype or model.dtype
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_width: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.num_layers: int = config.num_hidden_layers
        self.eps: float = config.rms_norm_eps

    def layers(self) -> list[DecoderLayer]:
        """Weights ready for use.  Joined by differentiable concatenation, so gradients reach the model's own."""
        return [self._layer(layer) for layer in self.model.model.layers]

    def _layer(self, layer: Any) -> DecoderLayer:
        attention, mlp, dtype = layer.self_attn, layer.mlp, self.compute_dtype
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        norms = None
        if hasattr(attention, "q_norm"):
            q_norm, k_norm = attention.q_norm.weight, attention.k_norm.weight
            norms = torch.cat([q_norm.expand(self.heads, -1), k_norm.expand(self.kv_heads, -1)])
        return DecoderLayer(
            input_norm=layer.input_layernorm.weight,
            qkv=torch.cat([projection.weight for projection in projections]).to(dtype),
            qkv_bias=None if projections[0].bias is None else torch.cat([p.bias for p in projections]).to(dtype),
            qk_norm=norms,
            out=attention.o_proj.weight.to(dtype),
            out_bias=None if attention.o_proj.bias is None else attention.o_proj.bias.to(dtype),
            post_norm=layer.post_attention_layernorm.weight,
            gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).to(dtype),
            down=mlp.down_proj.weight.to(dtype),
        )

    def angles(self, positions: Int64[Tensor, " token"]) -> tuple[Tensor, Tensor]:
        """cos and signed sin of every rotary angle at these positions, each [token, 1, head width]; see `rotate`."""
        like = self.model.get_input_embeddings().weight
        cos, sin = self.model.model.rotary_emb(like, positions[None])
        signed = torch.cat([-sin[0, :, : self.head_width // 2], sin[0, :, self.head_width // 2 :]], dim=-1)
        return cos[0].unsqueeze(1), signed.unsqueeze(1)

    def hidden(
        self,
        tokens: Int64[Tensor, " token"],
        positions: Int64[Tensor, " token"],
        attend: Attend,
        wanted: Int64[Tensor, " wanted"] | None = None,
    ) -> Float[Tensor, "wanted hidden"]:
        """Final hidden states of the wanted packed tokens, or of all."""
        return self.run(tokens, self.angles(positions), attend, self.layers(), wanted)

    def run(
        self,
        tokens: Int64[Tensor, " token"],
        angles: tuple[Tensor, Tensor],
        attend: Attend,
        layers: list[DecoderLayer],
        wanted: Int64[Tensor, " wanted"] | None = None,
    ) -> Float[Tensor, "wanted hidden"]:
        """As `hidden`, with rotary angles and joined weights that the caller already has."""
        x = embed(cast(nn.Embedding, self.model.get_input_embeddings()), tokens)
        for index, layer in enumerate(layers):
            attended = self._attention(index, layer, rms_norm(x, layer.input_norm, self.eps), angles, attend)
            if wanted is not None and index == len(layers) - 1:
                # Of the other tokens nobody reads more than this layer's keys and values.
                x, attended = x.index_select(0, wanted), attended.index_select(0, wanted)
            x = x + linear(attended, layer.out, layer.out_bias)
            normed = rms_norm(x, layer.post_norm, self.eps).to(self.compute_dtype)
            x = x + linear(swiglu(linear(normed, layer.gate_up)), layer.down)
        return rms_norm(x, self.model.model.norm.weight, self.eps)

    def _attention(
        self, index: int, layer: DecoderLayer, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend
    ) -> Float[Tensor, "token heads_width"]:
        rotated = self.heads + self.kv_heads
        qkv = linear(x.to(self.compute_dtype), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(-1, rotated + self.kv_heads, self.head_width)
        query_key, value = qkv.split([rotated, self.kv_heads], dim=1)
        if layer.qk_norm is not None:
            query_key = rms_norm(query_key, layer.qk_norm, self.eps)
        query, key = rotate(query_key, *angles).to(value.dtype).split([self.heads, self.kv_heads], dim=1)
        return attend(index, query, key, value).flatten(1)
