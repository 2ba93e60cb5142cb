"""`posttrain compare`: recipes side by side at an equal budget, several seeds each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.commands.arguments import TrustSwitch, split_arguments
from posttrain.commands.flags import COMMAND_LINE, CommandSpec, given_flags
from posttrain.config import Config
from posttrain.errors import UserError
from posttrain.options.bounds import PositiveInt
from posttrain.runs.interruption import stopped_with_a_word


@dataclass(frozen=True, kw_only=True)
class CompareSwitches(TrustSwitch):
    """What runs, and where results are saved."""

    base: str = ""
    """Recipe that all compared recipes share and override.  Can be given several times."""
    seeds: PositiveInt = 3
    """Runs of each recipe, with the seeds `run.seed`, `run.seed` + 1 and so on."""
    budget: str = ""
    """Limit of each run: tokens=N (sampled for training), minutes=M (evaluations included), or both.  Default: the
    recipes' own steps."""
    folder: str = "runs/comparison"
    """Folder of runs, results, table and picture.  Run the same command again to continue."""
    dry_run: bool = False
    """List the runs without running them."""


PROGRAM = CommandSpec(
    name="posttrain compare RECIPE.yaml [RECIPE.yaml ...]",
    description="Run recipes of `posttrain rl` at an equal budget with several seeds each, and show held-out accuracy,"
    " KL, length, tokens, time and memory side by side: one table, one picture.  Flags override all recipes.",
    switches=CompareSwitches(),
)


def main(arguments: Sequence[str]) -> int:
    """Run what is not finished, and print the table."""
    bases, rest = split_base(arguments)
    given = split_arguments(rest, PROGRAM)
    first, _ = given.first("RECIPE")
    recipes = given.positional or [first]
    from posttrain.commands.comparison.cells import kept_cells, make_cells, read_budget, run_comparison, variant_names

    variants: dict[str, Config] = {}
    for name, recipe in zip(variant_names(recipes), recipes, strict=True):
        layers = replace(given, positional=[*bases, recipe] if given.positional else bases).recipes()
        variants[name], switches = given.configured(Config, layers)
    budget, folder = read_budget(switches.budget), Path(switches.folder)
    for flag in given_flags(given.flags) if budget else ():
        if flag.path in ("run.num_steps", "run.time_limit_minutes", "run.token_limit"):
            raise UserError(f"{COMMAND_LINE}: {flag.spelled} and --budget both limit a run.  Leave one out.")
    cells = make_cells(variants, seeds=switches.seeds, budget=budget, folder=folder)
    if switches.dry_run:
        print(f"{len(cells)} runs, each with a budget of {budget}, in {folder}:")
        for cell in cells:
            print(f"  {cell.name:30} {cell.config.algorithm}")
        return 0
    with stopped_with_a_word(lambda: kept_cells(cells)):
        table = run_comparison(cells, budget, folder)
    print(f"\n{table}\n\n{folder}/comparison.md, comparison.png and comparison.json have it.")
    return 0


def split_base(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The recipes that `--base` names, and the other arguments."""
    bases: list[str] = []
    rest: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        if argument != "--base" and not argument.startswith("--base="):
            rest.append(argument)
            continue
        value = argument.partition("=")[2] if "=" in argument else next(waiting, "")
        if not value or value.startswith("-"):
            raise UserError(f"{COMMAND_LINE}: --base is empty.  Give a recipe file or the name of a bundled one.")
        bases.append(value)
    return bases, rest
