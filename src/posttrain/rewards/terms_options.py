"""When a reward counts, and how much: routing to rows, gates, clips, schedules, and rewards that look at another's."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from posttrain.errors import require


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a recipe may say of a reward beside its name, options and weight."""

    where: Mapping[str, object] = field(default_factory=dict)
    """Columns and the values that a row must have there, such as `{kind: code}`; the reward applies to no other row."""
    gate: str = ""
    """Another reward whose score must be above 0, else this one is 0 and is not asked: "format must hold first"."""
    of: str = ""
    """Another reward whose scores this one is given, as its argument `base`: `cosine_length` asks what was solved."""
    clip: tuple[float, float] | None = None
    """Bounds, [low, high], of what goes into the sum; the score itself is logged as it was."""
    weight_to: float | None = None
    """The weight at step `over_steps`, reached in a line from `weight`."""
    over_steps: int = 0
    """Steps from the first weight to `weight_to`."""

    def __post_init__(self) -> None:
        if self.clip is not None:
            ordered = self.clip[0] < self.clip[1] and all(math.isfinite(bound) for bound in self.clip)
            require(ordered, self, "clip", "must be two finite bounds, the lower one first")
        paired = (self.weight_to is None) == (self.over_steps == 0)
        require(paired and self.over_steps >= 0, self, "over_steps", "goes with weight_to: give both, or neither")
        require(self.weight_to is None or math.isfinite(self.weight_to), self, "weight_to", "is no finite number")

    def weight_at(self, step: int, weight: float) -> float:
        """The weight in a step; steps count from 1."""
        if self.weight_to is None:
            return weight
        share = min(1.0, max(0, step - 1) / self.over_steps)
        return weight + share * (self.weight_to - weight)

    def applies(self, columns: Mapping[str, object]) -> bool:
        """Whether a row with these columns is one of those meant."""
        return all(columns.get(name) == value for name, value in self.where.items())
