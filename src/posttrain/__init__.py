"""Training language models by reward: the Python side of the `posttrain` command.

    config = posttrain.load_recipe("countdown-tiny", task="dataset", model={"path": "my-model"})
    run = posttrain.train(config, rows=[{"prompt": "2+3=", "answer": "5"}, ...], rewards=[solved])
    posttrain.evaluate(run.model_folder, config, rows=..., rewards=[solved])

`solved(completions, answer, **columns)` gets lists and returns one number, or None, for each completion;
`posttrain.reward_function(solved, weight=0.5)` gives it a weight.  Importing this module loads nothing heavy: each name
is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posttrain.config import Config, IrlConfig, SftConfig, as_recipe, load_recipe
    from posttrain.irl_runs.environment import LearnedReward
    from posttrain.irl_runs.run import recover
    from posttrain.rewards.grading.function import reward_function
    from posttrain.training.evaluate import evaluate
    from posttrain.training.rl import Run, train

__all__ = [
    "Config",
    "IrlConfig",
    "LearnedReward",
    "Run",
    "SftConfig",
    "as_recipe",
    "evaluate",
    "load_recipe",
    "recover",
    "reward_function",
    "train",
]

HOMES = {
    "Config": "posttrain.config",
    "IrlConfig": "posttrain.config",
    "SftConfig": "posttrain.config",
    "as_recipe": "posttrain.config",
    "load_recipe": "posttrain.config",
    "LearnedReward": "posttrain.irl_runs.environment",
    "recover": "posttrain.irl_runs.run",
    "reward_function": "posttrain.rewards.grading.function",
    "Run": "posttrain.training.rl",
    "train": "posttrain.training.rl",
    "evaluate": "posttrain.training.evaluate",
}
"""Where each public name is defined."""


def __getattr__(name: str) -> object:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
