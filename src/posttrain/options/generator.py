"""Rows that a generator of reasoning-gym makes: which one, how hard, how many."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from posttrain.options.bounds import Bounded, PositiveInt
from posttrain.options.rules import Rule, Rules


@dataclass(frozen=True, kw_only=True)
class GeneratorOptions(Bounded):
    """A generator of reasoning-gym (extra `gym`) in place of a file of rows."""

    generator: str = ""
    """Generator of reasoning-gym that makes the rows, by its name there, such as `knights_knaves`.  A row has the
    question as `prompt`, the `answer`, and what the reward `generated` needs."""
    generator_options: Mapping[str, object] = field(default_factory=dict)
    """The generator's own configuration, such as `{n_people: 3}`."""
    generator_seed: int = 0
    """Seed of the generator; the run's seed only decides the order of the rows."""
    generator_size: PositiveInt = 1000
    """How many rows the generator makes, held-out rows included."""

    rules: ClassVar[Rules] = (
        Rule("generator_seed", lambda o: 0 <= o.generator_seed < 2**32, "is not a valid seed.  Use 0 to 4294967295."),
        Rule("generator_options", lambda o: "seed" not in o.generator_options, "has a seed.  Use generator_seed."),
        Rule("generator_options", lambda o: "size" not in o.generator_options, "has a size.  Use generator_size."),
    )
