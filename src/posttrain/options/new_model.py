"""The shape of a model that is made from nothing."""

from dataclasses import dataclass
from typing import Literal

from posttrain.errors import require


@dataclass(frozen=True, kw_only=True)
class NewModelOptions:
    """A small decoder; the defaults are the bundled model's 1.3 M parameters in the Qwen3 architecture."""

    family: Literal["qwen3", "gpt2"] = "qwen3"
    """The architecture.  `qwen3`: rotary positions, root-mean-square norms, a gated feed-forward layer, shared keys.
    `gpt2`: learned absolute positions, layer norms, biases, GELU, keys and values for every head; without dropout."""
    hidden_size: int = 160
    """Width of the residual stream; a multiple of `num_heads`."""
    mlp_size: int = 480
    """Width of the feed-forward layer, which is gated in `qwen3`."""
    num_layers: int = 4
    """Decoder layers."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int = 2
    """Key and value heads of `qwen3`; divides `num_heads`.  In `gpt2` there are as many as heads, whatever is here by
    default."""
    max_positions: int = 1024
    """Longest prompt and completion together, in tokens."""
    template: Literal["question", "turns", "text"] = "question"
    """The chat template that its tokenizer gets.  `question`: a single message, on a line of its own.  `turns`: system,
    user and assistant in turn, as instruction-tuned models have it.  `text`: as `question`, with merges of some 300
    plain words, so that a token of plain text is some four characters long, as one of GPT-2 is."""

    def __post_init__(self) -> None:
        own = self.family == "qwen3" or self.num_kv_heads in (NewModelOptions.num_kv_heads, self.num_heads)
        require(own, self, "num_kv_heads", "is for family = qwen3; in gpt2 every head has its own.  Leave it out")
