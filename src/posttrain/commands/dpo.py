"""`posttrain dpo`: train a model on pairs of answers of which one is better, given or sampled and judged in rounds."""

from posttrain.commands.flags import CommandSpec
from posttrain.commands.training_runs import TrainingSwitches, fit_command
from posttrain.config import DpoConfig

PROGRAM = CommandSpec(
    name="posttrain dpo [RECIPE.yaml ...]",
    description="Train a model on pairs of answers (`--model.path MODEL --task.path ROWS`, each row with `chosen` and"
    " `rejected`), or, with --dpo.rounds, on pairs of its own answers, judged by rewards.",
    switches=TrainingSwitches(),
)
main = fit_command(DpoConfig, PROGRAM, "posttrain.training.dpo.dpo_run", "train_dpo", "show_dpo_plan")
