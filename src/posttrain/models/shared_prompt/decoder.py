"""One forward pass for training and sampling: the families of `families` over packed tokens.

It reads the weights of a Hugging Face model and owns none.  The caller provides attention, so trainer (packed, shared
prompts) and sampler (cached keys and values) run the same arithmetic otherwise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.activations import GELUTanh, NewGELUActivation, SiLUActivation

from posttrain.models.shared_prompt.attention import AttentionKind
from posttrain.models.shared_prompt.families import FAMILIES, SAME_ANGLES, LayerKind
from posttrain.models.shared_prompt.fused import GELU_TANH, SILU, Activation, embed, gated, layer_norm, rms_norm, rotate
from posttrain.models.shared_prompt.linear import Weight, projection


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm's learned tensors."""

    weight: Tensor
    bias: Tensor | None = None

    def owned(self) -> "Norm":
        return Norm(self.weight.detach().clone(), _cloned(self.bias))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorms:
    """The norms of one layer; None if its family lacks them."""

    input: Norm | None
    attention: Norm | None
    mlp_input: Norm | None
    mlp: Norm | None
    heads: Tensor | None
    """Of query and key heads, [heads + kv_heads, width]."""
    query: Tensor | None
    """Of all query heads of a token as one row, [heads · width]; `key` of all key heads."""
    key: Tensor | None

    def owned(self) -> "LayerNorms":
        owned: dict[str, Any] = {}
        for name, each in ((field.name, getattr(self, field.name)) for field in fields(self)):
            owned[name] = each.owned() if isinstance(each, Norm) else _cloned(each)
        return LayerNorms(**owned)

    def tensors(self) -> list[Tensor]:
        norms = [norm for norm in (self.input, self.attention, self.mlp_input, self.mlp) if norm is not None]
        learned = [each for norm in norms for each in (norm.weight, norm.bias)]
        return [each for each in (*learned, self.heads, self.query, self.key) if each is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One decoder layer with its weights."""

    kind: LayerKind
    activation: Activation
    norms: LayerNorms
    qkv: Weight
    out: Weight
    gate_up: Weight
    down: Weight

    def of_tokens(self, rows: Int64[Tensor, " kept"]) -> "DecoderLayer":
        """The layer for some tokens only, after its attention over all."""
        return replace(
            self, out=self.out.of_tokens(rows), gate_up=self.gate_up.of_tokens(rows), down=self.down.of_tokens(rows)
        )

    def for_inference(self) -> "DecoderLayer":
        """The layer with its matrices in their fastest form, for weights that no longer change."""
        return replace(self, **{name: weight.for_inference() for name, weight in self.weights().items()})

    def owned(self) -> "DecoderLayer":
        owned = {name: weight.owned() for name, weight in self.weights().items()}
        return replace(self, norms=self.norms.owned(), **owned)

    def take_over(self, other: "DecoderLayer") -> None:
        """Copy the numbers of the same layer of the model, in place."""
        for mine, new in zip(self.norms.tensors(), other.norms.tensors(), strict=True):
            mine.copy_(new)
        for name, weight in self.weights().items():
            weight.take_over(other.weights()[name])

    def weights(self) -> dict[str, Any]:
        return {"qkv": self.qkv, "out": self.out, "gate_up": self.gate_up, "down": self.down}


def _cloned(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


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
"""attend(layer, kind, query, key, value): one layer's attention over the caller's layout or cache."""
Angles = Mapping[str, tuple[Float[Tensor, "token 1 turned"], Float[Tensor, "token 1 turned"]]]
"""cos and signed sin of every rotary angle of some tokens, by the angles' name; see `rotate`."""

ACTIVATIONS = {nn.SiLU: SILU, SiLUActivation: SILU, GELUTanh: GELU_TANH, NewGELUActivation: GELU_TANH}


@dataclass(frozen=True, slots=True)
class Positions:
    """A model's encoding of the positions of some tokens."""

    angles: Angles
    rows: Float[Tensor, "token hidden"] | None
    """Embeddings of absolute positions, if the model has them."""

    def at(self, index: Int64[Tensor, " token"]) -> "Positions":
        angles = {name: (cos[index], sin[index]) for name, (cos, sin) in self.angles.items()}
        return Positions(angles, None if self.rows is None else self.rows[index])


class Decoder:
    """The forward pass of a model that `shared_prompt_refusal` does not refuse.

    Matrix products and attention run in `compute_dtype`; the residual stream in the weights' type; norms in float32.
    """

    def __init__(self, model: PreTrainedModel, compute_dtype: torch.dtype | None = None) -> None:
        config = model.config
        self.model, self.family = model, FAMILIES[config.model_type]
        self.compute_dtype = compute_dtype or model.dtype
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads if self.family.grouped else self.heads
        stated = getattr(config, "head_dim", None) if self.family.grouped else None
        self.head_width: int = stated or config.hidden_size // self.heads
        self.num_layers: int = config.num_hidden_layers
        self.eps: float = getattr(config, self.family.norm_eps)
        self.kinds = self.family.layer_kinds(config)

    @property
    def body(self) -> nn.Module:
        return self.model.get_submodule(self.family.decoder)

    def block(self, index: int) -> Any:
        return self.body.get_submodule(f"{self.family.layers}.{index}")

    def layer(self, index: int) -> DecoderLayer:
        """A layer's weights, joined by differentiable concatenation, so gradients reach the model's parameters."""
        family, dtype, layer = self.family, self.compute_dtype, self.block(index)
        attention, mlp = layer.get_submodule(family.attention), layer.mlp
        return DecoderLayer(
            kind=self.kinds[index],
            activation=ACTIVATIONS[type(mlp.get_submodule(family.activation))],
            norms=self._norms(layer),
            qkv=projection([attention.get_submodule(name) for name in family.qkv], dtype),
            out=projection([attention.get_submodule(family.output)], dtype),
            gate_up=projection([mlp.get_submodule(name) for name in family.gate_up], dtype),
            down=projection([mlp.get_submodule(family.down)], dtype),
        )

    def _norms(self, layer: Any) -> LayerNorms:
        family, attention = self.family, layer.get_submodule(self.family.attention)
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

    def _norm_named(self, module: nn.Module, name: str | None) -> Norm | None:
        if name is None:
            return None
        norm: Any = module.get_submodule(name)
        return Norm(self._norm_weight(norm), norm.bias if self.family.norm == "layer" else None)

    def _norm_weight(self, norm: Any) -> Tensor:
        weight: Tensor = norm.weight
        if self.family.norm_in_float32:
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        return weight + self.family.norm_offset if self.family.norm_offset else weight

    def positions(self, positions: Int64[Tensor, " token"]) -> Positions:
        """The encoding of these positions, with gradients for embeddings."""
        name = self.family.positions
        rows = None if name is None else embed(cast(nn.Embedding, self.body.get_submodule(name)), positions)
        return Positions(self.angles(positions), rows)

    def position_table(self, length: int) -> Positions:
        """The encoding of the first positions, for inference: embeddings are the model's rows, not copies."""
        where = torch.arange(length, device=self.model.device)
        return Positions(self.angles(where), self.position_rows())

    def position_rows(self) -> Tensor | None:
        name = self.family.positions
        return None if name is None else cast(nn.Embedding, self.body.get_submodule(name)).weight.detach()

    def angles(self, positions: Int64[Tensor, " token"]) -> Angles:
        """Every rotary angle at these positions, each [token, 1, turned part of a head's width]."""
        names = {kind.angles for kind in self.kinds if kind.angles is not None}
        if not names:
            return {}
        rotary: Any = self.body.get_submodule("rotary_emb")
        like, found = self.model.get_input_embeddings().weight, {}
        for name in names:
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

        A layer with `gradient_checkpointing` keeps only its input, and runs again in the backward pass.
        """
        return self.run(tokens, self.positions(positions), attend, None, wanted)

    def run(
        self,
        tokens: Int64[Tensor, " token"],
        positions: Positions,
        attend: Attend,
        layers: Sequence[DecoderLayer] | None,
        wanted: Int64[Tensor, " wanted"] | None = None,
    ) -> Float[Tensor, "wanted hidden"]:
        """As `hidden`, with the caller's positions and, unless None, joined weights."""
        x, angles = self._embedded(tokens, positions), positions.angles
        for index in range(self.num_layers):
            # Only the last layer's keys and values of other tokens than the wanted ones are read.
            kept = wanted if index == self.num_layers - 1 else None
            block = partial(self._block, index, angles=angles, attend=attend, layers=layers, wanted=kept)
            if torch.is_grad_enabled() and self.block(index).gradient_checkpointing:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x)
        return self._normed(x, self._norm_named(self.body, self.family.last_norm), x.dtype)

    def _embedded(self, tokens: Int64[Tensor, " token"], positions: Positions) -> Float[Tensor, "token hidden"]:
        embedding = cast(nn.Embedding, self.model.get_input_embeddings())
        x = embed(embedding, tokens)
        if positions.rows is not None:
            x = x + positions.rows
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
        layer, stream = self.layer(index) if layers is None else layers[index], x.dtype
        norms = layer.norms
        attended = self._attention(index, layer, self._normed(x, norms.input, self.compute_dtype), angles, attend)
        if wanted is not None:
            x, attended, layer = x.index_select(0, wanted), attended.index_select(0, wanted), layer.of_tokens(wanted)
        x = (x + self._normed(layer.out.product(attended), norms.attention, stream)).to(stream)
        gate_up = layer.gate_up.product(self._normed(x, norms.mlp_input, self.compute_dtype).to(self.compute_dtype))
        inner = gated(gate_up, layer.activation) if self.family.gated else layer.activation.value(gate_up)
        mlp = layer.down.product(inner)
        return (x + self._normed(mlp, norms.mlp, stream)).to(stream)

    def _normed(self, x: Tensor, norm: Norm | None, dtype: torch.dtype) -> Tensor:
        """The normed x in `dtype`, or x itself without a norm."""
        if norm is None:
            return x
        if self.family.norm == "layer":
            return layer_norm(x, norm.weight, norm.bias, self.eps).to(dtype)
        return rms_norm(x, norm.weight, self.eps).to(dtype)

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
