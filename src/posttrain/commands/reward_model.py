"""`posttrain reward-model`: train a reward model on pairs of answers, of which one was preferred."""

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
from posttrain.config import RewardModelConfig
from posttrain.runs.interruption import stopped_while_loading


@dataclass(frozen=True, kw_only=True)
class RewardModelSwitches(TrustSwitch):
    """What this command does with the recipe."""

    dry_run: bool = False
    """Show the plan, with seconds per step from one timed step, and the first pairs as they are read; train nothing."""
    resume: str = ""
    """Continue the run in this folder where its last checkpoint left it."""
    from_step: int | None = None
    """With --resume: go on from the checkpoint of this step; what came after it is removed."""
    accept_changes: bool = False
    """With --resume: go on although model or rows have changed since the run began; inputs.json notes it."""


PROGRAM = CommandSpec(
    name="posttrain reward-model [RECIPE.yaml ...]",
    description="Train a reward model on rows with `chosen` and `rejected` (`--model.path MODEL --task.path PAIRS`). "
    " `posttrain rl --rewards RUN/model` trains by it.",
    switches=RewardModelSwitches(),
)


def main(arguments: Sequence[str]) -> int:
    """Train, or show what training would be."""
    given = split_arguments(arguments)
    folder = switch_value("resume", given)
    with stopped_while_loading(folder, "reward-model"):
        if folder:
            config, switches = resumed(RewardModelConfig, folder, given, PROGRAM)
        else:
            config, switches = configured(RewardModelConfig, recipe_layers(given), given.flags, PROGRAM)
            require_model(config.model)
        from posttrain.training.reward_model.reward_run import show_reward_plan, train_reward_model

        if switches.dry_run:
            show_reward_plan(config)
            return 0
        run = train_reward_model(
            config, resume=bool(folder), from_step=switches.from_step, accept_changes=switches.accept_changes
        )
        return INTERRUPTED if run.interrupted else 0
