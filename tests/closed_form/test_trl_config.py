"""What each field of a GRPOConfig sets of our Config, and TRL's defaults where a script leaves them out."""

import math
from collections.abc import Mapping
from typing import Any

import pytest

from posttrain.algorithms.table import build_algorithm
from posttrain.config import Config
from posttrain.errors import UserError
from posttrain.options.model import ModelOptions
from posttrain.trl import GRPOConfig, RLOOConfig
from posttrain.trl.configs.batch_arithmetic import RunLength, batch_plan
from posttrain.trl.configs.recipe import rl_config

KL = {"algorithm.kl.coefficient": 0.04, "algorithm.kl.estimator": "k3", "algorithm.kl.importance": "token"}


def config_of(**given: Any) -> Config:
    args = GRPOConfig(**{"max_steps": 1000, **given})
    plan = batch_plan(args)
    updates = plan.num_updates(args, 100)
    length = RunLength(
        updates=updates, updates_per_step=plan.updates_per_step, updates_per_epoch=plan.updates_per_epoch(100)
    )
    return rl_config(args, ModelOptions(), plan, length)


def at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = config[name] if isinstance(config, Mapping) else getattr(config, name)
    return config


DEFAULTS = {
    "algorithm.name": "grpo",
    "algorithm.clip_low": 0.2,
    "algorithm.clip_high": 0.2,
    "algorithm.deviation": "sample",
    "algorithm.deviation_over": "group",
    "algorithm.deviation_epsilon": 1e-4,
    "algorithm.dual_clip": None,
    "algorithm.kl": None,
    "algorithm.ratio_level": "token",
    "algorithm.token_weights": "mean_over_tokens",
    "checkpoint.every_steps": 500,
    "checkpoint.keep_last": 1_000_000,
    "checkpoint.keep_best": False,
    "evaluation.every_steps": 0,
    "reference.refresh_every": 0,
    "rollout.prompts_per_step": 1,
    "rollout.group_size": 8,
    "rollout.max_completion_tokens": 512,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "rollout.top_k": 0,
    "rollout.min_p": 0.0,
    "rollout.allow_cut_sampling": False,
    "run.folder": "trainer_output",
    "run.overwrite": False,
    "run.seed": 42,
    "run.num_steps": 1000,
    "task.held_out_share": 0.0,
    "task.max_prompt_tokens": None,
    "task.over_long": "error",
    "task.shuffle": True,
    "update.learning_rate": 1e-6,
    "update.schedule": "linear",
    "update.warmup_steps": 0,
    "update.weight_decay": 0.0,
    "update.beta1": 0.9,
    "update.beta2": 0.999,
    "update.max_grad_norm": 1.0,
    "update.epochs_per_step": 1,
    "update.minibatches_per_epoch": 1,
    "update.measure_entropy": True,
}


@pytest.mark.parametrize("path", DEFAULTS)
def test_what_a_script_leaves_out_is_as_in_trl(path: str) -> None:
    assert at(config_of(), path) == DEFAULTS[path]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"output_dir": "here"}, {"run.folder": "here"}),
        ({"overwrite_output_dir": True}, {"run.overwrite": True}),
        ({"seed": 7}, {"run.seed": 7}),
        ({"learning_rate": 3e-5}, {"update.learning_rate": 3e-5}),
        ({"lr_scheduler_type": "cosine"}, {"update.schedule": "cosine"}),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 9}, {"update.schedule": "constant"}),
        ({"warmup_steps": 9}, {"update.warmup_steps": 9}),
        ({"warmup_steps": 0.0301}, {"update.warmup_steps": 31}),  # of 1000 updates, rounded up
        ({"warmup_ratio": 0.05}, {"update.warmup_steps": 50}),
        ({"weight_decay": 0.1}, {"update.weight_decay": 0.1}),
        ({"adam_beta1": 0.8, "adam_beta2": 0.99}, {"update.beta1": 0.8, "update.beta2": 0.99}),
        ({"max_grad_norm": 0.2}, {"update.max_grad_norm": 0.2}),
        ({"max_grad_norm": 0.0}, {"update.max_grad_norm": math.inf}),
        ({"max_grad_norm": None}, {"update.max_grad_norm": math.inf}),
        ({"max_steps": 12, "steps_per_generation": 4}, {"run.num_steps": 3}),
        ({"max_steps": -1, "num_train_epochs": 2}, {"run.num_steps": 200}),
        (
            {"num_iterations": 3},
            {"update.epochs_per_step": 3, "run.num_steps": 334, "checkpoint.every_steps": 167},
        ),
        (
            {"steps_per_generation": 4},
            {
                "update.minibatches_per_epoch": 4,
                "rollout.prompts_per_step": 4,
                "run.num_steps": 250,
                "checkpoint.every_steps": 125,
            },
        ),
        ({"num_generations": 4}, {"rollout.group_size": 4, "rollout.prompts_per_step": 2}),
        ({"max_completion_length": 99}, {"rollout.max_completion_tokens": 99}),
        ({"temperature": 0.7}, {"rollout.temperature": 0.7}),
        ({"top_p": 0.9}, {"rollout.top_p": 0.9, "rollout.allow_cut_sampling": True}),
        ({"top_k": 50}, {"rollout.top_k": 50, "rollout.allow_cut_sampling": True}),
        ({"min_p": 0.1}, {"rollout.min_p": 0.1, "rollout.allow_cut_sampling": True}),
        ({"top_k": None, "top_p": None}, {"rollout.allow_cut_sampling": False}),  # what TRL once wrote for all tokens
        ({"shuffle_dataset": False}, {"task.shuffle": False}),
        ({"max_prompt_length": 64}, {"task.max_prompt_tokens": 64, "task.over_long": "cut_left"}),
        ({"beta": 0.04}, KL),
        ({"beta": 0.04, "use_bias_correction_kl": False}, {**KL, "algorithm.kl.importance": None}),
        ({"epsilon": 0.1}, {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.1}),
        ({"epsilon_high": 0.28}, {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.28}),
        ({"delta": 4.0}, {"algorithm.dual_clip": 4.0}),
        ({"loss_type": "grpo"}, {"algorithm.token_weights": "mean_over_sequences"}),
        ({"loss_type": "bnpo"}, {"algorithm.token_weights": "mean_over_tokens"}),
        ({"loss_type": "dr_grpo"}, {"algorithm.token_weights": "constant_length"}),
        ({"loss_type": "luspo"}, {"algorithm.token_weights": "sum_over_sequence"}),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"algorithm.name": "cispo", "algorithm.clip_high": 4.0}),
        ({"importance_sampling_level": "sequence"}, {"algorithm.ratio_level": "sequence_mean"}),
        ({"scale_rewards": "batch"}, {"algorithm.deviation_over": "batch"}),
        ({"scale_rewards": "none"}, {"algorithm.deviation": "none", "algorithm.deviation_epsilon": 0.0}),
        (
            {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"},
            {
                "algorithm.reward_aggregation": "normalize_then_sum",
                "algorithm.deviation": "sample",
                "algorithm.deviation_epsilon": 1e-4,
            },
        ),
        ({"scale_rewards": False}, {"algorithm.deviation": "none"}),
        ({"scale_rewards": True}, {"algorithm.deviation": "sample", "algorithm.deviation_over": "group"}),
        (
            {"beta": 0.1, "sync_ref_model": True, "ref_model_mixup_alpha": 1.0, "ref_model_sync_steps": 64},
            {"reference.refresh_every": 64},
        ),
        ({"save_steps": 50}, {"checkpoint.every_steps": 50}),
        ({"save_steps": 0.1}, {"checkpoint.every_steps": 100}),
        ({"save_steps": 50, "steps_per_generation": 4}, {"checkpoint.every_steps": 12}),
        ({"save_strategy": "no"}, {"checkpoint.every_steps": 0}),
        ({"save_strategy": "epoch"}, {"checkpoint.every_steps": 100}),
        ({"save_strategy": "best"}, {"checkpoint.every_steps": 0}),
        ({"save_steps": 0}, {"checkpoint.every_steps": 0}),  # as in transformers: the last alone
        ({"mask_truncated_completions": True}, {"algorithm.mask_truncated": True}),
        ({"save_total_limit": 2, "metric_for_best_model": "reward"}, {"checkpoint.keep_last": 1_000_000}),
        ({"report_to": "none"}, {"run.report_to": ()}),
        ({"report_to": None}, {"run.report_to": ()}),
        (
            {"report_to": ["tensorboard", "wandb"], "run_name": "one", "project": "two"},
            {"run.report_to": ("tensorboard", "wandb"), "tracker.name": "one", "tracker.project": "two"},
        ),
        ({"save_total_limit": 2}, {"checkpoint.keep_last": 2}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_a_field_sets_what_the_table_says(given: dict[str, Any], expected: dict[str, Any]) -> None:
    config = config_of(**given)
    assert {path: at(config, path) for path in expected} == expected
    others = {path: DEFAULTS[path] for path in DEFAULTS if not path.startswith("algorithm")} if len(given) == 1 else {}
    moved = [path for path, value in others.items() if at(config, path) != value and path not in expected]
    assert moved == [], "and nothing else"
    build_algorithm(config.algorithm)


@pytest.mark.parametrize(
    ("config", "former", "now"),
    [
        (RLOOConfig, "rloo_k", "num_generations"),
        (RLOOConfig, "kl_coef", "beta"),
    ],
)
def test_a_former_name_of_a_field_is_answered_with_todays(config: Any, former: str, now: str) -> None:
    with pytest.raises(UserError) as error:
        config(**{former: 4})
    assert all(each in str(error.value) for each in (config.__name__, repr(former), f"`{now}`"))
