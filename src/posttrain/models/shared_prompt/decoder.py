"""One forward pass for training and sampling: the families of `families` over packed tokens.

It reads the weights of a Hugging Face model and owns no weights.  The caller provides attention, so trainer (packed,
shared prompts) and sampler (cached keys and values) run the same arithmetic otherwise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.activations import GELUTanh, NewGELUActivation, SiLUActivation

from posttrain.models.shared_prompt.attention import AttentionKind
from posttrain.models.shared_prompt.families import FAMILIES, SAME_ANGLES, LayerKind
from posttrain.models.shared_prompt.fused import GELU_TANH, SILU, Activation, embed, gated, rms_norm, rotate
from posttrain.models.shared_prompt.linear import Weight, projection


class Norm(NamedTuple):
    """A norm's learned tensors."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One decoder layer with its weights."""

    kind: LayerKind
    activation: Activation
    norms: Mapping[str, Norm]
    """See `Decoder.norms`."""
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
        """The layer at fixed addresses; `take_over` updates it."""
        norms = {
            name: Norm(norm.weight.detach().clone(), None if norm.bias is None else norm.bias.detach().clone())
            for name, norm in self.norms.items()
        }
        return replace(self, norms=norms, **{name: weight.owned() for name, weight in self.weights().items()})

    def take_over(self, other: "DecoderLayer") -> None:
        for name, norm in self.norms.items():
            for mine, new in zip(norm, other.norms[name], strict=True):
                if mine is not None and new is not None:
                    mine.copy_(new)
        for name, weight in self.weights().items():
            weight.take_over(other.weights()[name])

    def weights(self) -> dict[str, Any]:
        return {"qkv": self.qkv, "out": self.out, "gate_up": self.gate_up, "down": self.down}


Attend = Callable[[int, AttentionKind, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, kind, query, key, value): one layer's attention over the caller's layout or cache.

Queries and the result are [token heads width], keys and values [token kv width]."""
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

    keeps_copies = True
    """Whether the backward pass may keep joined or narrowed copies of weights."""

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
        joined = partial(projection, dtype=dtype, keeps_copies=self.keeps_copies)
        return DecoderLayer(
            kind=self.kinds[index],
            activation=ACTIVATIONS[type(mlp.get_submodule(family.activation))],
            norms=self.norms(layer),
            qkv=joined([attention.get_submodule(name) for name in family.qkv]),
            out=joined([attention.get_submodule(family.output)]),
            gate_up=joined([mlp.get_submodule(name) for name in family.gate_up]),
            down=joined([mlp.get_submodule(family.down)]),
        )

    def norms(self, layer: Any) -> dict[str, Norm]:
        """The norms of a layer that its family has.

        `input`, `attention`, `mlp_input` and `mlp` are those of the stream.  `heads` is that of query and key heads,
        with a weight of [heads + kv_heads, width]; or `query` and `key` norm all such heads of a token as one row.
        """
        family, attention = self.family, layer.get_submodule(self.family.attention)
        named = {"input": family.input_norm, "attention": family.attention_norm}
        named |= {"mlp_input": family.mlp_input_norm, "mlp": family.mlp_norm}
        norms = {name: self._norm(layer.get_submodule(path)) for name, path in named.items() if path is not None}
        if family.query_key_norm != "none":
            norms |= {"query": self._norm(attention.q_norm), "key": self._norm(attention.k_norm)}
        if family.query_key_norm == "heads":
            query, key = norms.pop("query").weight, norms.pop("key").weight
            norms["heads"] = Norm(torch.cat([query.expand(self.heads, -1), key.expand(self.kv_heads, -1)]))
        return norms

    def _norm(self, norm: Any) -> Norm:
        weight: Tensor = norm.weight
        if self.family.norm_in_float32:
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        weight = weight + self.family.norm_offset if self.family.norm_offset else weight
        return Norm(weight, norm.bias if self.family.norm == "layer" else None)

    def positions(self, positions: Int64[Tensor, " token"]) -> Positions:
        """The encoding of these positions, with gradients for embeddings."""
        name = self.family.positions
        rows = None if name is None else embed(cast(nn.Embedding, self.body.get_submodule(name)), positions)
        return Positions(self.angles(positions), rows)

    def position_rows(self) -> Tensor | None:
        """The embeddings of all positions, for inference: the model's rows, not copies."""
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

    def run(
        self,
        tokens: Int64[Tensor, " token"],
        positions: Positions,
        attend: Attend,
        layers: Sequence[DecoderLayer] | None,
        wanted: Int64[Tensor, " wanted"] | None = None,
    ) -> Float[Tensor, "wanted hidden"]:
        """Final hidden states of the wanted packed tokens, or of all; `layers` None reads the model's weights now.

        A layer with `gradient_checkpointing` keeps only its input, and runs again in the backward pass.
        """
        embedding = cast(nn.Embedding, self.model.get_input_embeddings())
        x, angles = embed(embedding, tokens), positions.angles
        if positions.rows is not None:
            x = x + positions.rows
        if self.family.scaled_embedding is not None:
            x = x * cast(Tensor, embedding.embed_scale).to(x.dtype)
        for index in range(self.num_layers):
            # Only the last layer's keys and values of other tokens than the wanted ones are read.
            kept = wanted if index == self.num_layers - 1 else None
            block = partial(self._block, index, angles=angles, attend=attend, layers=layers, wanted=kept)
            if torch.is_grad_enabled() and self.block(index).gradient_checkpointing:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x)
        return self._normed(x, self._norm(self.body.get_submodule(self.family.last_norm)), x.dtype)

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
        norms = layer.norms.get
        attended = self._attention(index, layer, self._normed(x, norms("input"), self.compute_dtype), angles, attend)
        if wanted is not None:
            x, attended, layer = x.index_select(0, wanted), attended.index_select(0, wanted), layer.of_tokens(wanted)
        x = (x + self._normed(layer.out.product(attended), norms("attention"), stream)).to(stream)
        gate_up = layer.gate_up.product(self._normed(x, norms("mlp_input"), self.compute_dtype).to(self.compute_dtype))
        inner = gated(gate_up, layer.activation) if self.family.gated else layer.activation.value(gate_up)
        mlp = layer.down.product(inner)
        return (x + self._normed(mlp, norms("mlp"), stream)).to(stream)

    def _normed(self, x: Tensor, norm: Norm | None, dtype: torch.dtype) -> Tensor:
        """The normed x in `dtype`, or x itself without a norm."""
        if norm is None:
            return x
        if self.family.norm == "layer":
            # y = w · (x - mean(x)) / √(var(x) + ε) + b     Ba, Kiros & Hinton 2016, arXiv:1607.06450, eq. 4
            return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, self.eps).to(dtype)
        return rms_norm(x, norm.weight, self.eps).to(dtype)

    def _attention(
        self, index: int, layer: DecoderLayer, x: Tensor, angles: Angles, attend: Attend
    ) -> Float[Tensor, "token heads_width"]:
        rotated, width = self.heads + self.kv_heads, self.head_width
        qkv = layer.qkv.product(x.to(self.compute_dtype))
        if "query" in layer.norms:
            *turned, value = qkv.split([self.heads * width, self.kv_heads * width, self.kv_heads * width], dim=1)
            whole = zip(turned, (layer.norms["query"], layer.norms["key"]), strict=True)
            qkv = torch.cat([*(self._normed(each, norm, each.dtype) for each, norm in whole), value], dim=1)
        qkv = qkv.view(-1, rotated + self.kv_heads, width)
        query_key, value = qkv.split([rotated, self.kv_heads], dim=1)
        if "heads" in layer.norms:
            query_key = rms_norm(query_key, layer.norms["heads"].weight, self.eps)
        if layer.kind.angles is not None:
            query_key = rotate(query_key, *angles[layer.kind.angles])
        query, key = query_key.to(value.dtype).split([self.heads, self.kv_heads], dim=1)
        return attend(index, layer.kind.attention, query, key, value).flatten(1)
