"""`posttrain config`: print what recipes and flags add up to, every option written out."""

from collections.abc import Sequence

from posttrain.commands.arguments import configured, recipe_layers, split_arguments
from posttrain.commands.flags import CommandSpec
from posttrain.config import as_recipe
from posttrain.config.reading import kind_of

PROGRAM = CommandSpec(
    name="posttrain config [RECIPE.yaml ...]",
    description="Print what recipes and flags add up to, as a recipe: running it gives the same run.",
)


def main(arguments: Sequence[str]) -> int:
    """Print the resolved recipe."""
    given = split_arguments(arguments)
    layers = recipe_layers(given.positional)
    config, _ = configured(kind_of(layers), layers, given.flags, PROGRAM)
    print(as_recipe(config), end="")
    return 0
