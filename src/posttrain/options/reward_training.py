"""Options of reward models trained on pairs."""

from dataclasses import dataclass
from typing import ClassVar

from posttrain.options.bounds import NonNegativeFloat, PositiveFloat, PositiveInt
from posttrain.options.pairs import PairOptions
from posttrain.options.rules import Rule


@dataclass(frozen=True, kw_only=True)
class RewardTrainingOptions(PairOptions):
    """A reward model: a language model under a scalar head, trained on which of two answers was preferred."""

    section: ClassVar[str] = "reward_model"
    counts_tokens: ClassVar[bool] = False
    default_rate: ClassVar[float] = 1e-5

    learning_rate: PositiveFloat | None = None
    """Largest learning rate; null is 1e-5, for full training of a billion parameters, and ten times that with an
    adapter (`model.adapter`).  3e-4 suits the bundled model."""
    head_rate_scale: NonNegativeFloat = 1.0
    """Learning rate of the head as a multiple of the body's."""
    center_coefficient: NonNegativeFloat = 0.01
    """c of c·mean((r_chosen + r_rejected)²), which pulls the mean of scores to 0, as pairs do not; 0 is off."""
    margin_scale: NonNegativeFloat = 1.0
    """Factor from a row's `margin` to the wanted difference of scores; 0 leaves margins out."""
    calibration_bins: PositiveInt = 10
    """Bins of equal width, from 1/2 to 1, in which predicted probabilities are compared with observed shares."""

    rules = (Rule("long_pairs", lambda o: o.long_pairs != "cut", "is only for DPO.  Use error or skip."),)
