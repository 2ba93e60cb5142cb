"""The `demonstrator` section of a recipe: who writes the demonstrations of a supervised run."""

from dataclasses import dataclass

from posttrain.options.bounds import Bounded, PositiveInt, Share


@dataclass(frozen=True, kw_only=True)
class Demonstrator(Bounded):
    """Who writes the demonstrations."""

    give_up: Share = 0.6
    """Chance of stopping after a failed try."""
    max_tries: PositiveInt = 18
    """The most tries in one demonstration."""
    largest_result: PositiveInt = 200
    """Steps with a larger result are not written."""
