"""Options of reward models trained on pairs."""

from dataclasses import dataclass
from typing import ClassVar

from posttrain.errors import require
from posttrain.options.bounds import NonNegativeFloat, PositiveInt
from posttrain.options.pairs import PairOptions


@dataclass(frozen=True, kw_only=True)
class RewardTrainingOptions(PairOptions):
    """A reward model: a language model under a scalar head, trained on which of two answers was preferred."""

    section: ClassVar[str] = "reward_model"
    counts_tokens: ClassVar[bool] = False
    default_rate: ClassVar[float] = 1e-5

    learning_rate: float | None = None
    """Largest learning rate; null is 1e-5, which suits full training of models of a billion parameters, and with an
    adapter (`model.adapter`) ten times that.  3e-4 suits the bundled model."""
    head_rate_scale: NonNegativeFloat = 1.0
    """Learning rate of the head as a multiple of the body's."""
    center_coefficient: NonNegativeFloat = 0.01
    """c of c·mean((r_chosen + r_rejected)²), which pulls scores to a mean of 0; pairs alone leave them anywhere.  0
    is off."""
    margin_scale: NonNegativeFloat = 1.0
    """What a row's `margin` is multiplied by to be the difference of scores that is asked for; 0 leaves margins out."""
    calibration_bins: PositiveInt = 10
    """Bins of equal width, from 1/2 to 1, in which predicted probabilities are held against observed shares."""

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = self.long_pairs != "cut"
        require(whole, self, "long_pairs", "is of DPO: a reward model reads whole answers; use error or skip")
