"""The shape of a new model."""

from dataclasses import dataclass
from typing import Literal

from posttrain.options.bounds import Bounded
from posttrain.options.rules import Rule


@dataclass(frozen=True, kw_only=True)
class NewModelOptions(Bounded):
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
    """Key and value heads of `qwen3`; divides `num_heads`.  `gpt2` has as many as heads."""
    max_positions: int = 1024
    """Longest prompt and completion together, in tokens."""
    template: Literal["question", "turns", "text"] = "question"
    """The chat template of its tokenizer.  `question`: a single message, on one line.  `turns`: system, user and
    assistant in turn, as in instruction-tuned models.  `text`: as `question`, with merges of some 300 plain words: a
    token of plain text has about four characters, as in GPT-2."""

    rules = (
        Rule(
            "num_kv_heads",
            lambda o: o.family == "qwen3" or o.num_kv_heads in (type(o).num_kv_heads, o.num_heads),
            "is only for family = qwen3; in gpt2 every head has one.  Leave it out.",
        ),
    )
