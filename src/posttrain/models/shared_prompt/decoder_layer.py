"""One decoder layer's weights as the decoder uses them."""

from dataclasses import dataclass, replace

from jaxtyping import Int64
from torch import Tensor

from posttrain.models.shared_prompt.families import LayerKind
from posttrain.models.shared_prompt.fused import Activation
from posttrain.models.shared_prompt.linear import Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorms:
    """RMSNorm weights of one layer; those that its family lacks are None."""

    input: Tensor | None
    attention: Tensor | None
    mlp_input: Tensor | None
    mlp: Tensor | None
    heads: Tensor | None
    """Of query and key heads, [heads + kv_heads, width]."""
    query: Tensor | None
    """Of all query heads of a token as one row, [heads · width]; the next of all key heads."""
    key: Tensor | None

    def owned(self) -> "LayerNorms":
        """The same in memory of their own."""
        return LayerNorms(
            input=_cloned(self.input),
            attention=_cloned(self.attention),
            mlp_input=_cloned(self.mlp_input),
            mlp=_cloned(self.mlp),
            heads=_cloned(self.heads),
            query=_cloned(self.query),
            key=_cloned(self.key),
        )

    def all(self) -> tuple[Tensor | None, ...]:
        """In one order."""
        return (self.input, self.attention, self.mlp_input, self.mlp, self.heads, self.query, self.key)


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
        for mine, new in zip(self.norms.all(), other.norms.all(), strict=True):
            if mine is not None and new is not None:
                mine.copy_(new)
        self.qkv.take_over(other.qkv)
        self.out.take_over(other.out)
        self.gate_up.take_over(other.gate_up)
        self.down.take_over(other.down)


def _cloned(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
