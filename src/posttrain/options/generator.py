"""Rows that a generator of reasoning-gym makes: which one, how hard, how many."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from posttrain.errors import require
from posttrain.options.bounds import Bounded, PositiveInt


@dataclass(frozen=True, kw_only=True)
class GeneratorOptions(Bounded):
    """A generator of reasoning-gym (extra `gym`) in place of a file of rows."""

    generator: str = ""
    """Generator of reasoning-gym that makes the rows, by its name there, such as `knights_knaves`; a row has the
    question as its `prompt`, the `answer`, and what the reward `generated` scores it by."""
    generator_options: Mapping[str, object] = field(default_factory=dict)
    """The generator's own configuration, such as `{n_people: 3}`."""
    generator_seed: int = 0
    """Seed of the generator; the run's own seed decides the order of the rows alone."""
    generator_size: PositiveInt = 1000
    """How many rows the generator makes, those that are held out included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = 0 <= self.generator_seed < 2**32
        require(fits, self, "generator_seed", "is no seed that generators take; use 0 to 4294967295")
        for name in ("seed", "size"):
            said = name not in self.generator_options
            require(said, self, "generator_options", f"has a {name}, which is said as generator_{name}")
