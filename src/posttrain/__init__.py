"""Training language models by reward: the Python side of the `posttrain` command.

    config = posttrain.load_recipe("countdown-tiny", task="dataset", model={"path": "my-model"})
    run = posttrain.train(config, rows=[{"prompt": "2+3=", "answer": "5"}, ...], rewards=[solved])
    posttrain.evaluate(run.model_folder, config, rows=..., rewards=[solved])

`solved(completions, answer, **columns)` gets lists and returns one number, or None, for each completion;
`posttrain.reward_function(solved, weight=0.5)` gives it a weight.  A model object is given as
`train(config, policy=posttrain.as_policy(model, tokenizer))`; `Task`, `Engine`, `Algorithm` and `Watcher` say what your
objects need; an `Environment` makes a `Reply` to each turn of a completion.
`open_run` opens the folder of a run: `run.rollouts()` and `run.to_pandas()` are its completions, and `run.show()` is a
page in a notebook.
`steps` is `train` one step at a time, `generate` samples outside any run, and
`posttrain.course` has the functions of a course.  Importing this module loads nothing heavy: each name is loaded when
it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posttrain.algorithms.algorithm import Algorithm as Algorithm
    from posttrain.algorithms.credit import Credit as Credit, per_rollout as per_rollout
    from posttrain.algorithms.losses import ClipRange as ClipRange
    from posttrain.algorithms.terms import LossTerm as LossTerm, policy_term as policy_term
    from posttrain.commands.collection.collection import collect as collect
    from posttrain.config import (
        CollectConfig as CollectConfig,
        Config as Config,
        DpoConfig as DpoConfig,
        IrlConfig as IrlConfig,
        RewardModelConfig as RewardModelConfig,
        SftConfig as SftConfig,
        as_recipe as as_recipe,
        load_recipe as load_recipe,
    )
    from posttrain.environments.protocol import Environment as Environment, Environments as Environments, Reply as Reply
    from posttrain.generation.engine import Engine as Engine, Sampling as Sampling, SamplingTimeout as SamplingTimeout
    from posttrain.generation.generate import generate as generate
    from posttrain.generation.request import Continuation as Continuation, Sampled as Sampled
    from posttrain.irl_runs.environment import LearnedReward as LearnedReward
    from posttrain.irl_runs.run import recover as recover
    from posttrain.models.policy import as_policy as as_policy
    from posttrain.needs import Need as Need
    from posttrain.records import Finish as Finish
    from posttrain.rewards.grading.answers import ProcessReward as ProcessReward, Span as Span
    from posttrain.rewards.grading.function import reward_function as reward_function
    from posttrain.rewards.model import RewardModel as RewardModel, RewardModelEnsemble as RewardModelEnsemble
    from posttrain.runs.reports import Run as Run, open_run as open_run
    from posttrain.runs.watchers import Watcher as Watcher
    from posttrain.tasks.base import Probe as Probe, Reading as Reading, Task as Task
    from posttrain.training.dpo.dpo_run import train_dpo as train_dpo
    from posttrain.training.held_out import evaluate as evaluate
    from posttrain.training.reward_model.reward_run import train_reward_model as train_reward_model
    from posttrain.training.rl import steps as steps, train as train
    from posttrain.training.sft.sft_run import train_sft as train_sft
    from posttrain.turns import ToolCall as ToolCall

NAMES = {
    "posttrain.algorithms.algorithm": "Algorithm",
    "posttrain.algorithms.credit": "Credit per_rollout",
    "posttrain.algorithms.losses": "ClipRange",
    "posttrain.algorithms.terms": "LossTerm policy_term",
    "posttrain.commands.collection.collection": "collect",
    "posttrain.config": "CollectConfig Config DpoConfig IrlConfig RewardModelConfig SftConfig as_recipe load_recipe",
    "posttrain.environments.protocol": "Environment Environments Reply",
    "posttrain.generation.engine": "Engine Sampling SamplingTimeout",
    "posttrain.generation.generate": "generate",
    "posttrain.generation.request": "Continuation Sampled",
    "posttrain.irl_runs.environment": "LearnedReward",
    "posttrain.irl_runs.run": "recover",
    "posttrain.models.policy": "as_policy",
    "posttrain.needs": "Need",
    "posttrain.records": "Finish",
    "posttrain.rewards.grading.answers": "ProcessReward Span",
    "posttrain.rewards.grading.function": "reward_function",
    "posttrain.rewards.model": "RewardModel RewardModelEnsemble",
    "posttrain.runs.reports": "Run open_run",
    "posttrain.runs.watchers": "Watcher",
    "posttrain.tasks.base": "Probe Reading Task",
    "posttrain.training.dpo.dpo_run": "train_dpo",
    "posttrain.training.held_out": "evaluate",
    "posttrain.training.reward_model.reward_run": "train_reward_model",
    "posttrain.training.rl": "steps train",
    "posttrain.training.sft.sft_run": "train_sft",
    "posttrain.turns": "ToolCall",
}
"""The public names of each module."""
HOMES = {name: module for module, names in NAMES.items() for name in names.split()}
__all__ = list(HOMES)


def __getattr__(name: str) -> object:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
