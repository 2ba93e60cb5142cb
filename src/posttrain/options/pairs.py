"""Options that training on pairs has in common, whatever its loss."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from posttrain.options.bounds import PositiveFloat, PositiveInt
from posttrain.options.training import OptimizerOptions


@dataclass(frozen=True, kw_only=True)
class PairOptions(OptimizerOptions):
    """How pairs of answers become optimiser updates."""

    section: ClassVar[str] = "pairs"
    """What the section of a recipe is called, for messages."""
    counts_tokens: ClassVar[bool] = True
    """Whether the loss is of the answers' tokens; else it is of their scores."""

    max_length: Annotated[int, Ge(3)] | None = None
    """Longest pair in tokens, the prompt with the longer of its answers, and never more than the model's context, which
    null stands for."""
    long_pairs: Literal["error", "skip", "cut"] = "error"
    """What becomes of longer pairs: tell and stop, or leave them out.  `cut`, of DPO only, cuts the ends of longer
    answers off, as TRL does, and leaves out pairs whose prompt fills the length: what is learned is then the beginning
    of what was preferred."""
    num_epochs: PositiveFloat | None = 1.0
    """Times that all pairs are gone through, each time in another order; null goes by `run.num_steps`."""
    pairs_per_batch: PositiveInt = 64
    """Pairs of one optimiser update; no update has a pair twice."""
    tokens_per_microbatch: Annotated[int, Ge(3)] = 4096
    """Tokens that go through the model at once: bounds memory, never changes the gradient.  Small ones stay in a CPU's
    cache."""
    eval_every: PositiveInt = 40
    """Updates between measurements on held-out pairs; there is always one before and one after.  A step can be kept as
    the best where it is saved as well: a multiple of `checkpoint.every_steps`."""

    @property
    def answers_with_closing(self) -> bool:
        """Whether what a chat template writes after the last stop token is part of an answer."""
        return False

    def __post_init__(self) -> None:
        super().__post_init__()
