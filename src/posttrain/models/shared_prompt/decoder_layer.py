"""One decoder layer's weights as the decoder uses them."""

from dataclasses import dataclass, replace

from jaxtyping import Int64
from torch import Tensor

from posttrain.models.shared_prompt.families import LayerKind
from posttrain.models.shared_prompt.fused import Activation
from posttrain.models.shared_prompt.linear import Weight


@dataclass(frozen=True, slots=True)
class Norm:
    """What a norm has learned."""

    weight: Tensor
    bias: Tensor | None = None

    def owned(self) -> "Norm":
        """The same in memory of its own."""
        return Norm(self.weight.detach().clone(), _cloned(self.bias))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorms:
    """The norms of one layer; those that its family lacks are None."""

    input: Norm | None
    attention: Norm | None
    mlp_input: Norm | None
    mlp: Norm | None
    heads: Tensor | None
    """Of query and key heads, [heads + kv_heads, width]."""
    query: Tensor | None
    """Of all query heads of a token as one row, [heads · width]; the next of all key heads."""
    key: Tensor | None

    def owned(self) -> "LayerNorms":
        """The same in memory of their own."""
        return LayerNorms(
            input=_owned(self.input),
            attention=_owned(self.attention),
            mlp_input=_owned(self.mlp_input),
            mlp=_owned(self.mlp),
            heads=_cloned(self.heads),
            query=_cloned(self.query),
            key=_cloned(self.key),
        )

    def tensors(self) -> list[Tensor]:
        """Those that there are, in one order."""
        norms = [norm for norm in (self.input, self.attention, self.mlp_input, self.mlp) if norm is not None]
        learned = [each for norm in norms for each in (norm.weight, norm.bias)]
        return [each for each in (*learned, self.heads, self.query, self.key) if each is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One decoder layer, ready for use."""

    kind: LayerKind
    activation: Activation
    norms: LayerNorms
    qkv: Weight
    out: Weight
    gate_up: Weight
    down: Weight

    def of_tokens(self, rows: Int64[Tensor, " kept"]) -> "DecoderLayer":
        """The layer for some of the tokens behind its attention, which has seen all of them."""
        return replace(
            self, out=self.out.of_tokens(rows), gate_up=self.gate_up.of_tokens(rows), down=self.down.of_tokens(rows)
        )

    def for_inference(self) -> "DecoderLayer":
        """The layer with its matrices as their products are quickest; for weights that no longer change."""
        return replace(
            self,
            qkv=self.qkv.for_inference(),
            out=self.out.for_inference(),
            gate_up=self.gate_up.for_inference(),
            down=self.down.for_inference(),
        )

    def owned(self) -> "DecoderLayer":
        """The layer at addresses that stay."""
        return replace(
            self,
            norms=self.norms.owned(),
            qkv=self.qkv.owned(),
            out=self.out.owned(),
            gate_up=self.gate_up.owned(),
            down=self.down.owned(),
        )

    def take_over(self, other: "DecoderLayer") -> None:
        """Take over the numbers of the same layer of the model, in place."""
        for mine, new in zip(self.norms.tensors(), other.norms.tensors(), strict=True):
            mine.copy_(new)
        self.qkv.take_over(other.qkv)
        self.out.take_over(other.out)
        self.gate_up.take_over(other.gate_up)
        self.down.take_over(other.down)


def _owned(norm: Norm | None) -> Norm | None:
    return None if norm is None else norm.owned()


def _cloned(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
