"""`posttrain reward-model`: train a reward model on pairs of answers, of which one was preferred."""

from posttrain.commands.flags import CommandSpec
from posttrain.commands.training_runs import TrainingSwitches, fit_command
from posttrain.config import RewardModelConfig

PROGRAM = CommandSpec(
    name="posttrain reward-model [RECIPE.yaml ...]",
    description="Train a reward model on rows with `chosen` and `rejected` (`--model.path MODEL --task.path PAIRS`). "
    " `posttrain rl --rewards RUN/model` trains by it.",
    switches=TrainingSwitches(),
)
main = fit_command(
    RewardModelConfig, PROGRAM, "posttrain.training.reward_model.reward_run", "train_reward_model", "show_reward_plan"
)
