"""The common options of training on pairs."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from posttrain.options.bounds import PositiveFloat, PositiveInt
from posttrain.options.training import OptimizerOptions


@dataclass(frozen=True, kw_only=True)
class PairOptions(OptimizerOptions):
    """How pairs of answers become optimiser updates."""

    section: ClassVar[str] = "pairs"
    """Its section in a recipe, for messages."""
    counts_tokens: ClassVar[bool] = True
    """Whether the loss is of the answers' tokens, not of their scores."""

    max_length: Annotated[int, Ge(3)] | None = None
    """Longest pair in tokens, the prompt with the longer answer; null is the model's context, which is the limit."""
    long_pairs: Literal["error", "skip", "cut"] = "error"
    """What to do with longer pairs: stop with an error, or skip them.  `cut`, only for DPO, cuts the ends of longer
    answers, as TRL does, and skips pairs whose prompt fills the length: only the beginning of an answer is learned."""
    num_epochs: PositiveFloat | None = 1.0
    """Passes over all pairs, each in another order; null: `run.num_steps` decides."""
    pairs_per_batch: PositiveInt = 64
    """Pairs of one optimiser update, all different."""
    tokens_per_microbatch: Annotated[int, Ge(3)] = 4096
    """Tokens in the model at a time: bounds memory, never changes the gradient.  Small ones fit a CPU's cache."""
    eval_every: PositiveInt = 40
    """Updates between measurements on held-out pairs, which also begin and end a run.  Only a saved step can be kept as
    the best: use a multiple of `checkpoint.every_steps`."""

    @property
    def answers_with_closing(self) -> bool:
        return False
