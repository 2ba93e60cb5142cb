"""One forward pass for training and sampling: the families of `families` over packed tokens.

It reads the weights of a Hugging Face model and owns none.  Attention is given by the caller, so the
trainer (packed, shared prompts) and the sampler (cached keys and values) run the same arithmetic otherwise.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.activations import GELUTanh, SiLUActivation

from posttrain.models.shared_prompt.adapted import projection
from posttrain.models.shared_prompt.attention import AttentionKind
from posttrain.models.shared_prompt.decoder_layer import DecoderLayer, LayerNorms
from posttrain.models.shared_prompt.embedding import embed
from posttrain.models.shared_prompt.families import FAMILIES, SAME_ANGLES
from posttrain.models.shared_prompt.fused import GELU_TANH, SILU, gated, rms_norm, rotate

Attend = Callable[
    [
        int,
        AttentionKind,
        Float[Tensor, "token heads width"],
        Float[Tensor, "token kv width"],
        Float[Tensor, "token kv width"],
    ],
    Float[Tensor, "token heads width"],
]
"""attend(layer, kind, query, key, value): what the caller's layout or cache makes of one layer's projections."""
Angles = Mapping[str, tuple[Float[Tensor, "token 1 turned"], Float[Tensor, "token 1 turned"]]]
"""cos and signed sin of every rotary angle of some tokens, by the angles' name; see `rotate`."""

ACTIVATIONS = {nn.SiLU: SILU, SiLUActivation: SILU, GELUTanh: GELU_TANH}


class Decoder:
    """The forward pass of a model that `models.shared_prompt.architectures` does not refuse.

    Matrix products and attention run in `compute_dtype`; the residual stream in the weights'; norms in float32 inside.
    """

    def __init__(self, model: PreTrainedModel, compute_dtype: torch.dtype | None = None) -> None:
        config = model.config
        self.model, self.family = model, FAMILIES[config.model_type]
        self.compute_dtype = compute_dtype or model.dtype
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_width: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.num_layers: int = config.num_hidden_layers
        self.eps: float = config.rms_norm_eps
        self.kinds = self.family.layer_kinds(config)

    def layer(self, index: int) -> DecoderLayer:
        """Weights ready for use.  Joined by differentiable concatenation, so gradients reach the model's own."""
        family, dtype, layer = self.family, self.compute_dtype, self.model.model.layers[index]
        attention, mlp = layer.self_attn, layer.mlp
        return DecoderLayer(
            kind=self.kinds[index],
            activation=ACTIVATIONS[type(mlp.get_submodule(family.activation))],
            norms=self._norms(layer),
            qkv=projection([attention.get_submodule(name) for name in family.qkv], dtype),
            out=projection([attention.o_proj], dtype),
            gate_up=projection([mlp.get_submodule(name) for name in family.gate_up], dtype),
            down=projection([mlp.down_proj], dtype),
        )

    def _norms(self, layer: Any) -> LayerNorms:
        family, attention = self.family, layer.self_attn
        heads = query = key = None
        if family.query_key_norm == "heads":
            query_row, key_row = self._norm_weight(attention.q_norm), self._norm_weight(attention.k_norm)
            heads = torch.cat([query_row.expand(self.heads, -1), key_row.expand(self.kv_heads, -1)])
        elif family.query_key_norm == "whole":
            query, key = self._norm_weight(attention.q_norm), self._norm_weight(attention.k_norm)
        return LayerNorms(
            input=self._norm_named(layer, family.input_norm),
            attention=self._norm_named(layer, family.attention_norm),
            mlp_input=self._norm_named(layer, family.mlp_input_norm),
            mlp=self._norm_named(layer, family.mlp_norm),
            heads=heads,
            query=query,
            key=key,
        )

    def _norm_named(self, layer: nn.Module, name: str | None) -> Tensor | None:
        return None if name is None else self._norm_weight(layer.get_submodule(name))

    def _norm_weight(self, norm: Any) -> Tensor:
        weight: Tensor = norm.weight
        if self.family.norm_in_float32:
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        return weight + self.family.norm_offset if self.family.norm_offset else weight

    def angles(self, positions: Int64[Tensor, " token"]) -> Angles:
        """Every rotary angle at these positions, each [token, 1, turned part of a head's width]."""
        rotary, like = self.model.model.rotary_emb, self.model.get_input_embeddings().weight
        found = {}
        for name in {kind.angles for kind in self.kinds if kind.angles is not None}:
            which = () if name == SAME_ANGLES else (name,)
            cos, sin = rotary(like, positions[None], *which)
            half = sin.shape[-1] // 2
            signed = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)
            found[name] = (cos[0].unsqueeze(1), signed.unsqueeze(1))
        return found

    def hidden(
        self,
        tokens: Int64[Tensor, " token"],
        positions: Int64[Tensor, " token"],
        attend: Attend,
        wanted: Int64[Tensor, " wanted"] | None = None,
    ) -> Float[Tensor, "wanted hidden"]:
        """Final hidden states of the wanted packed tokens, or of all.

        A layer whose `gradient_checkpointing` is on keeps its input alone, and is run again in the backward pass.
        """
        return self.run(tokens, self.angles(positions), attend, None, wanted)

    def run(
        self,
        tokens: Int64[Tensor, " token"],
        angles: Angles,
        attend: Attend,
        layers: Sequence[DecoderLayer] | None,
        wanted: Int64[Tensor, " wanted"] | None = None,
    ) -> Float[Tensor, "wanted hidden"]:
        """As `hidden`, with rotary angles and, unless None, joined weights that the caller already has."""
        x = self._embedded(tokens)
        for index in range(self.num_layers):
            # Of other tokens than the wanted ones nobody reads more than the last layer's keys and values.
            kept = wanted if index == self.num_layers - 1 else None
            block = partial(self._block, index, angles=angles, attend=attend, layers=layers, wanted=kept)
            if torch.is_grad_enabled() and self.model.model.layers[index].gradient_checkpointing:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x)
        return self._normed(x, self._norm_weight(self.model.model.norm), x.dtype)

    def _embedded(self, tokens: Int64[Tensor, " token"]) -> Float[Tensor, "token hidden"]:
        embedding = cast(nn.Embedding, self.model.get_input_embeddings())
        x = embed(embedding, tokens)
        if self.family.scaled_embedding is None:
            return x
        return x * cast(Tensor, embedding.embed_scale).to(x.dtype)

    def _block(
        self,
        index: int,
        x: Float[Tensor, "token hidden"],
        *,
        angles: Angles,
        attend: Attend,
        layers: Sequence[DecoderLayer] | None,
        wanted: Int64[Tensor, " wanted"] | None,
    ) -> Float[Tensor, "wanted hidden"]:
        """One layer, for the wanted tokens."""
        layer, stream = self.layer(index) if layers is None else layers[index], x.dtype
        norms = layer.norms
        attended = self._attention(index, layer, self._normed(x, norms.input, self.compute_dtype), angles, attend)
        if wanted is not None:
            x, attended, layer = x.index_select(0, wanted), attended.index_select(0, wanted), layer.of_tokens(wanted)
        x = (x + self._normed(layer.out.product(attended), norms.attention, stream)).to(stream)
        gate_up = layer.gate_up.product(self._normed(x, norms.mlp_input, self.compute_dtype).to(self.compute_dtype))
        mlp = layer.down.product(gated(gate_up, layer.activation))
        return (x + self._normed(mlp, norms.mlp, stream)).to(stream)

    def _normed(self, x: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
        """x itself, where there is no norm between a layer's part and the stream; else in `dtype`."""
        return x if weight is None else rms_norm(x, weight, self.eps).to(dtype)

    def _attention(
        self, index: int, layer: DecoderLayer, x: Tensor, angles: Angles, attend: Attend
    ) -> Float[Tensor, "token heads_width"]:
        rotated = self.heads + self.kv_heads
        qkv = layer.qkv.product(x.to(self.compute_dtype))
        if layer.norms.query is not None and layer.norms.key is not None:
            qkv = self._with_whole_norms(qkv, layer.norms.query, layer.norms.key)
        qkv = qkv.view(-1, rotated + self.kv_heads, self.head_width)
        query_key, value = qkv.split([rotated, self.kv_heads], dim=1)
        if layer.norms.heads is not None:
            query_key = rms_norm(query_key, layer.norms.heads, self.eps)
        if layer.kind.angles is not None:
            query_key = rotate(query_key, *angles[layer.kind.angles])
        query, key = query_key.to(value.dtype).split([self.heads, self.kv_heads], dim=1)
        return attend(index, layer.kind.attention, query, key, value).flatten(1)

    def _with_whole_norms(self, qkv: Tensor, query_norm: Tensor, key_norm: Tensor) -> Float[Tensor, "token qkv"]:
        query, key, value = qkv.split([len(query_norm), len(key_norm), self.kv_heads * self.head_width], dim=1)
        query, key = (rms_norm(x, weight, self.eps).to(x.dtype) for x, weight in ((query, query_norm), (key, key_norm)))
        return torch.cat([query, key, value], dim=1)
