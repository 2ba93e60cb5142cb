"""`posttrain irl`: find the reward behind demonstrations."""

from collections.abc import Sequence

from posttrain.commands.arguments import split_arguments
from posttrain.commands.flags import CommandSpec
from posttrain.config import IrlConfig

PROGRAM = CommandSpec(
    name="posttrain irl [RECIPE.yaml ...]",
    description="Find the reward behind demonstrations.  Recipes are files or names of bundled ones, later ones"
    " override earlier; flags override them all.  The options of world, demonstrations, features and method depend on"
    " their names.",
)


def main(arguments: Sequence[str]) -> int:
    """Find a reward."""
    given = split_arguments(arguments, PROGRAM)
    config, _ = given.configured(IrlConfig, given.recipes())
    from posttrain.irl_runs import require_library

    require_library("scipy")
    if config.run.plots:
        require_library("matplotlib")
    from posttrain.irl_runs.run import recover

    recover(config)
    return 0
