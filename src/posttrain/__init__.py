"""Training language models by reward: the Python side of the `posttrain` command.

    config = posttrain.load_recipe("countdown-tiny", task="dataset", model={"path": "my-model"})
    run = posttrain.train(config, rows=[{"prompt": "2+3=", "answer": "5"}, ...], rewards=[solved])
    posttrain.evaluate(run.model_folder, config, rows=..., rewards=[solved])

`solved(completions, answer, **columns)` gets lists and returns one number, or None, for each completion;
`posttrain.reward_function(solved, weight=0.5)` gives it a weight.  A model object is given as
`train(config, policy=posttrain.as_policy(model, tokenizer))`; `Task`, `Engine`, `Algorithm` and `Watcher` say what an
object of your own has to be.  `steps` is `train` one step at a time, `generate` samples outside any run, and
`posttrain.course` has the functions of a course.  Importing this module loads nothing heavy: each name is loaded when
it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posttrain.algorithms.algorithm import Algorithm
    from posttrain.algorithms.credit import Credit, per_rollout
    from posttrain.algorithms.losses import ClipRange
    from posttrain.algorithms.terms import LossTerm, policy_term
    from posttrain.commands.collection.collection import collect
    from posttrain.config import (
        CollectConfig,
        Config,
        DpoConfig,
        IrlConfig,
        RewardModelConfig,
        SftConfig,
        as_recipe,
        load_recipe,
    )
    from posttrain.generation.engine import Engine, Sampling, SamplingTimeout
    from posttrain.generation.generate import generate
    from posttrain.generation.request import Continuation, Sampled
    from posttrain.irl_runs.environment import LearnedReward
    from posttrain.irl_runs.run import recover
    from posttrain.models.policy import as_policy
    from posttrain.needs import Need
    from posttrain.records import Finish
    from posttrain.rewards.grading.answers import ProcessReward, Span
    from posttrain.rewards.grading.function import reward_function
    from posttrain.rewards.model import RewardModel, RewardModelEnsemble
    from posttrain.runs.reports import Run
    from posttrain.runs.watchers import Watcher
    from posttrain.tasks.base import Probe, Reading, Task
    from posttrain.training.dpo.dpo_run import train_dpo
    from posttrain.training.evaluate import evaluate
    from posttrain.training.reward_model.reward_run import train_reward_model
    from posttrain.training.rl import train
    from posttrain.training.sft.sft_run import train_sft
    from posttrain.training.steps import steps

__all__ = [
    "Algorithm",
    "ClipRange",
    "CollectConfig",
    "Config",
    "Continuation",
    "Credit",
    "DpoConfig",
    "Engine",
    "Finish",
    "IrlConfig",
    "LearnedReward",
    "LossTerm",
    "Need",
    "Probe",
    "ProcessReward",
    "Reading",
    "RewardModel",
    "RewardModelConfig",
    "RewardModelEnsemble",
    "Run",
    "Sampled",
    "Sampling",
    "SamplingTimeout",
    "SftConfig",
    "Span",
    "Task",
    "Watcher",
    "as_policy",
    "as_recipe",
    "collect",
    "evaluate",
    "generate",
    "load_recipe",
    "per_rollout",
    "policy_term",
    "recover",
    "reward_function",
    "steps",
    "train",
    "train_dpo",
    "train_reward_model",
    "train_sft",
]

HOMES = {
    "Algorithm": "posttrain.algorithms.algorithm",
    "ClipRange": "posttrain.algorithms.losses",
    "Credit": "posttrain.algorithms.credit",
    "per_rollout": "posttrain.algorithms.credit",
    "LossTerm": "posttrain.algorithms.terms",
    "policy_term": "posttrain.algorithms.terms",
    "Need": "posttrain.needs",
    "CollectConfig": "posttrain.config",
    "Config": "posttrain.config",
    "DpoConfig": "posttrain.config",
    "IrlConfig": "posttrain.config",
    "RewardModelConfig": "posttrain.config",
    "SftConfig": "posttrain.config",
    "as_recipe": "posttrain.config",
    "load_recipe": "posttrain.config",
    "Engine": "posttrain.generation.engine",
    "Sampling": "posttrain.generation.engine",
    "SamplingTimeout": "posttrain.generation.engine",
    "Continuation": "posttrain.generation.request",
    "Sampled": "posttrain.generation.request",
    "Finish": "posttrain.records",
    "LearnedReward": "posttrain.irl_runs.environment",
    "recover": "posttrain.irl_runs.run",
    "as_policy": "posttrain.models.policy",
    "ProcessReward": "posttrain.rewards.grading.answers",
    "Span": "posttrain.rewards.grading.answers",
    "reward_function": "posttrain.rewards.grading.function",
    "RewardModel": "posttrain.rewards.model",
    "RewardModelEnsemble": "posttrain.rewards.model",
    "Watcher": "posttrain.runs.watchers",
    "Probe": "posttrain.tasks.base",
    "Reading": "posttrain.tasks.base",
    "Task": "posttrain.tasks.base",
    "Run": "posttrain.runs.reports",
    "train": "posttrain.training.rl",
    "train_dpo": "posttrain.training.dpo.dpo_run",
    "train_reward_model": "posttrain.training.reward_model.reward_run",
    "train_sft": "posttrain.training.sft.sft_run",
    "collect": "posttrain.commands.collection.collection",
    "evaluate": "posttrain.training.evaluate",
    "generate": "posttrain.generation.generate",
    "steps": "posttrain.training.steps",
}
"""Where each public name is defined."""


def __getattr__(name: str) -> object:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
