"""`posttrain sft`: train a small model from nothing on written-out demonstrations."""

from collections.abc import Sequence

from posttrain.commands.arguments import configured, recipe_layers, told_apart
from posttrain.commands.flags import Program
from posttrain.config import SftConfig

PROGRAM = Program(
    name="posttrain sft [RECIPE.yaml ...]",
    description="Train a small model from nothing on demonstrations of its task.  `posttrain rl` can go on from it.",
)


def main(arguments: Sequence[str]) -> int:
    """Train."""
    given = told_apart(arguments)
    config, _ = configured(SftConfig, recipe_layers(given.positional), given.flags, PROGRAM)
    from posttrain.training.sft import train

    train(config)
    return 0
