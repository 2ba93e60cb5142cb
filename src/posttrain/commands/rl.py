"""`posttrain rl`: train a model by reward."""

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.commands.arguments import (
    INTERRUPTED,
    configured,
    recipe_layers,
    require_model,
    resumed,
    split_arguments,
    switch_value,
)
from posttrain.commands.flags import CommandSpec
from posttrain.config import Config
from posttrain.runs.interruption import stopped_while_loading


@dataclass(frozen=True, kw_only=True)
class RlSwitches:
    """What this command does with the recipe."""

    dry_run: bool = False
    """Show the plan, with seconds per step from one timed step, and train nothing."""
    resume: str = ""
    """Continue the run in this folder exactly where its last checkpoint left it."""
    from_step: int | None = None
    """With --resume: go on from the checkpoint of this step; what came after it is removed."""
    accept_changes: bool = False
    """With --resume: go on although rows, rewards or files have changed since the run began; inputs.json notes it."""


PROGRAM = CommandSpec(
    name="posttrain rl [RECIPE.yaml ...]",
    description="Train a model by reward.  Recipes are files or names of bundled ones, later ones overriding earlier;"
    " flags override them all.  The options of the task and of the algorithm depend on their names.",
    switches=RlSwitches(),
)


def main(arguments: Sequence[str]) -> int:
    """Train, or show what training would be."""
    given = split_arguments(arguments)
    folder = switch_value("resume", given)
    with stopped_while_loading(folder, "rl"):
        if folder:
            config, switches = resumed(Config, folder, given, PROGRAM)
        else:
            config, switches = configured(Config, recipe_layers(given.positional), given.flags, PROGRAM)
            require_model(config.model)
        from posttrain.training.rl import show_plan, train

        if switches.dry_run:
            show_plan(config)
            return 0
        recipe = " ".join(given.positional)
        run = train(
            config,
            resume=bool(folder),
            from_step=switches.from_step,
            accept_changes=switches.accept_changes,
            recipe=recipe,
        )
        return INTERRUPTED if run.interrupted else 0
