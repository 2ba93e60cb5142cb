"""`posttrain dpo`: train a model on pairs of answers of which one is better, given or sampled and judged in rounds."""

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.commands.arguments import (
    INTERRUPTED,
    TrustSwitch,
    configured,
    recipe_layers,
    require_model,
    resumed,
    split_arguments,
    switch_value,
)
from posttrain.commands.flags import CommandSpec
from posttrain.config import DpoConfig
from posttrain.runs.interruption import stopped_while_loading


@dataclass(frozen=True, kw_only=True)
class DpoSwitches(TrustSwitch):
    """What this command does with the recipe."""

    dry_run: bool = False
    """Show the plan, with seconds per step from one timed step (in rounds: of one round's samples too), and the first
    pairs; train nothing."""
    resume: str = ""
    """Continue the run in this folder where its last checkpoint left it."""
    from_step: int | None = None
    """With --resume: go on from the checkpoint of this step; what came after it is removed."""
    accept_changes: bool = False
    """With --resume: go on although model or rows have changed since the run began; inputs.json notes it."""


PROGRAM = CommandSpec(
    name="posttrain dpo [RECIPE.yaml ...]",
    description="Train a model on pairs of answers (`--model.path MODEL --task.path ROWS`, each row with `chosen` and"
    " `rejected`), or, with --dpo.rounds, on pairs of its own answers that rewards tell apart.",
    switches=DpoSwitches(),
)


def main(arguments: Sequence[str]) -> int:
    """Train, or show what training would be."""
    given = split_arguments(arguments)
    folder = switch_value("resume", given)
    with stopped_while_loading(folder, "dpo"):
        if folder:
            config, switches = resumed(DpoConfig, folder, given, PROGRAM)
        else:
            config, switches = configured(DpoConfig, recipe_layers(given), given.flags, PROGRAM)
            require_model(config.model)
        from posttrain.training.dpo.dpo_run import show_dpo_plan, train_dpo

        if switches.dry_run:
            show_dpo_plan(config)
            return 0
        run = train_dpo(
            config, resume=bool(folder), from_step=switches.from_step, accept_changes=switches.accept_changes
        )
        return INTERRUPTED if run.interrupted else 0
