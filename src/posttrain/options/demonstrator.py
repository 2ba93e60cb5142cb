"""The `demonstrator` section of a recipe: who writes the demonstrations of a supervised run."""

from dataclasses import dataclass

from posttrain.errors import require


@dataclass(frozen=True, kw_only=True)
class Demonstrator:
    """Who writes the demonstrations."""

    give_up: float = 0.6
    """Chance in [0, 1] of stopping after a failed try."""
    max_tries: int = 18
    """The most tries in one demonstration."""
    largest_result: int = 200
    """No step is written whose result is larger."""

    def __post_init__(self) -> None:
        require(0 <= self.give_up <= 1, self, "give_up", "is not a probability; use 0 to 1")
        require(self.max_tries >= 1, self, "max_tries", "leaves nothing to demonstrate; use >= 1")
        require(self.largest_result >= 1, self, "largest_result", "allows no result; use >= 1")
