"""`posttrain sft`: train a small model from nothing on written-out demonstrations."""

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.commands.arguments import INTERRUPTED, configured, recipe_layers, resumed, split_arguments, switch_value
from posttrain.commands.flags import CommandSpec
from posttrain.config import SftConfig
from posttrain.runs.interruption import stopped_while_loading


@dataclass(frozen=True, kw_only=True)
class SftSwitches:
    """What this command does with the recipe."""

    resume: str = ""
    """Continue the run in this folder where its last checkpoint left it."""
    from_step: int | None = None
    """With --resume: go on from the checkpoint of this step; what came after it is removed."""


PROGRAM = CommandSpec(
    name="posttrain sft [RECIPE.yaml ...]",
    description="Train a small model from nothing on demonstrations of its task.  `posttrain rl` can go on from it.",
    switches=SftSwitches(),
)


def main(arguments: Sequence[str]) -> int:
    """Train."""
    given = split_arguments(arguments)
    folder = switch_value("resume", given)
    with stopped_while_loading(folder, "sft"):
        if folder:
            config, switches = resumed(SftConfig, folder, given, PROGRAM)
        else:
            config, switches = configured(SftConfig, recipe_layers(given.positional), given.flags, PROGRAM)
        from posttrain.training.sft import train

        model = train(config, resume=bool(folder), from_step=switches.from_step)
        return INTERRUPTED if model is None else 0
