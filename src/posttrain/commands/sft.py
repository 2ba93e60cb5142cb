"""`posttrain sft`: train a model on rows of your own, or a small one from nothing on written-out demonstrations."""

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
from posttrain.config import SftConfig
from posttrain.options.model import ModelOptions
from posttrain.runs.interruption import stopped_while_loading


@dataclass(frozen=True, kw_only=True)
class SftSwitches(TrustSwitch):
    """What this command does with the recipe."""

    dry_run: bool = False
    """Show the plan, with seconds per step from one timed step, and the first rows with what is learned of them marked;
    train nothing."""
    resume: str = ""
    """Continue the run in this folder where its last checkpoint left it."""
    from_step: int | None = None
    """With --resume: go on from the checkpoint of this step; what came after it is removed."""
    accept_changes: bool = False
    """With --resume: go on although model or rows have changed since the run began; inputs.json notes it."""


PROGRAM = CommandSpec(
    name="posttrain sft [RECIPE.yaml ...]",
    description="Train a model on rows of your own (`--model.path MODEL --task.path ROWS`), or a small one from nothing"
    " on demonstrations of its task.  `posttrain rl` can go on from it.",
    switches=SftSwitches(),
)


def main(arguments: Sequence[str]) -> int:
    """Train, or show what training would be."""
    given = split_arguments(arguments)
    folder = switch_value("resume", given)
    with stopped_while_loading(folder, "sft"):
        if folder:
            config, switches = resumed(SftConfig, folder, given, PROGRAM)
        else:
            config, switches = configured(SftConfig, recipe_layers(given), given.flags, PROGRAM)
            if isinstance(config.model, ModelOptions):
                require_model(config.model)
        from posttrain.training.sft.sft_run import show_sft_plan, train_sft

        if switches.dry_run:
            show_sft_plan(config)
            return 0
        run = train_sft(
            config, resume=bool(folder), from_step=switches.from_step, accept_changes=switches.accept_changes
        )
        return INTERRUPTED if run.interrupted else 0
