"""`posttrain sft`: train a model on rows of your own, or a small one from nothing on written-out demonstrations."""

from posttrain.commands.flags import CommandSpec
from posttrain.commands.training_runs import TrainingSwitches, fit_command
from posttrain.config import SftConfig

PROGRAM = CommandSpec(
    name="posttrain sft [RECIPE.yaml ...]",
    description="Train a model on rows of your own (`--model.path MODEL --task.path ROWS`), or a small one from nothing"
    " on demonstrations of its task.  `posttrain rl` can continue from it.",
    switches=TrainingSwitches(),
)
main = fit_command(SftConfig, PROGRAM, "posttrain.training.sft.sft_run", "train_sft", "show_sft_plan")
