"""`posttrain config`: print the recipe that recipes and flags make, every option written out."""

from collections.abc import Sequence
from dataclasses import replace

from posttrain.binding import is_own
from posttrain.commands.arguments import split_arguments
from posttrain.commands.flags import CommandSpec
from posttrain.config.reading import recipe_kind, recipe_sections
from posttrain.config.recipes import RecipeLayer, merge, to_yaml
from posttrain.config.run_trust import READ_BY_IMPORT

PROGRAM = CommandSpec(
    name="posttrain config [RECIPE.yaml ...]",
    description="Print the recipe that recipes and flags make: running it gives the same run.",
)


def main(arguments: Sequence[str]) -> int:
    given = split_arguments(arguments, PROGRAM)
    layers = given.recipes()
    own = own_sections_of_runs(layers)
    known = [replace(layer, sections={**layer.sections, **dict.fromkeys(own, None)}) for layer in layers]
    config, _ = given.configured(recipe_kind(layers), known if own else layers, to_run=False, loads_model=False)
    print(to_yaml({**recipe_sections(config), **own}), end="")
    return 0


def own_sections_of_runs(layers: Sequence[RecipeLayer]) -> dict[str, object]:
    """The user's own task and algorithm in a run's recipe, as they are written: resolving them would run their code."""
    merged = merge(layers)
    of_runs = [name for name in READ_BY_IMPORT if merged.source(f"{name}.path") in merged.of_runs]
    return {name: merged.sections[name] for name in of_runs if is_own(name, merged.sections[name])}
