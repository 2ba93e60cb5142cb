"""The shape of a model that is made from nothing."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class NewModelOptions:
    """A decoder in the Qwen3 architecture; the defaults are the bundled model's 1.3 M parameters."""

    hidden_size: int = 160
    """Width of the residual stream; a multiple of `num_heads`."""
    mlp_size: int = 480
    """Width of the gated feed-forward layer."""
    num_layers: int = 4
    """Decoder layers."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int = 2
    """Key and value heads; divides `num_heads`."""
    max_positions: int = 1024
    """Longest prompt and completion together, in tokens."""
    template: Literal["question", "turns"] = "question"
    """The chat template that its tokenizer gets.  `question`: a single message, on a line of its own.  `turns`: system,
    user and assistant in turn, as instruction-tuned models have it."""
