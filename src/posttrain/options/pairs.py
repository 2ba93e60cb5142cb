"""Options that training on pairs has in common, whatever its loss."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from posttrain.errors import require
from posttrain.options.training import OptimizerOptions


@dataclass(frozen=True, kw_only=True)
class PairOptions(OptimizerOptions):
    """How pairs of answers become optimiser updates."""

    section: ClassVar[str] = "pairs"
    """What the section of a recipe is called, for messages."""
    counts_tokens: ClassVar[bool] = True
    """Whether the loss is of the answers' tokens; else it is of their scores."""

    max_length: int | None = None
    """Longest pair in tokens, the prompt with the longer of its answers, and never more than the model's context, which
    null stands for."""
    long_pairs: Literal["error", "skip", "cut"] = "error"
    """What becomes of longer pairs: tell and stop, or leave them out.  `cut`, of DPO only, cuts the ends of longer
    answers off, as TRL does, and leaves out pairs whose prompt fills the length: what is learned is then the beginning
    of what was preferred."""
    num_epochs: float | None = 1.0
    """Times that all pairs are gone through, each time in another order; null goes by `run.num_steps`."""
    pairs_per_batch: int = 64
    """Pairs of one optimiser update; no update has a pair twice."""
    tokens_per_microbatch: int = 4096
    """Tokens that go through the model at once: bounds memory, never changes the gradient.  Small ones stay in a CPU's
    cache."""
    eval_every: int = 40
    """Updates between measurements on held-out pairs; there is always one before and one after.  A step can be kept as
    the best where it is saved as well: a multiple of `checkpoint.every_steps`."""

    @property
    def answers_with_closing(self) -> bool:
        """Whether what a chat template writes after the last stop token is part of an answer."""
        return False

    def __post_init__(self) -> None:
        super().__post_init__()
        longest, epochs = self.max_length, self.num_epochs
        require(longest is None or longest >= 3, self, "max_length", "leaves no pair; use >= 3, or null")
        require(epochs is None or 0 < epochs < math.inf, self, "num_epochs", "never trains; use > 0, or null")
        require(self.pairs_per_batch >= 1, self, "pairs_per_batch", "holds no pair; use >= 1")
        require(self.tokens_per_microbatch >= 3, self, "tokens_per_microbatch", "holds no pair; use >= 3")
        require(self.eval_every >= 1, self, "eval_every", "never measures; use >= 1")
