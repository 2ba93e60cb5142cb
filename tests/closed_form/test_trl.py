"""The facade of TRL: what each field of a config sets, its batches, its log and its parser."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import HfArgumentParser

from posttrain import trl
from posttrain.algorithms.table import build_algorithm
from posttrain.config import Config
from posttrain.options.model import ModelOptions
from posttrain.records import Grades
from posttrain.trl import GRPOConfig, ModelConfig, RLOOConfig, ScriptArguments, TrlParser
from posttrain.trl.configs.recipe import batch_plan, rl_config
from posttrain.trl.log_entries import Entry, logged_by, share_without_deviation, taken_entry, token_entry
from tests.support.refusals import refused

KL = {"algorithm.kl.coefficient": 0.04, "algorithm.kl.estimator": "k3", "algorithm.kl.importance": "token"}


def config_of(**given: Any) -> Config:
    args = GRPOConfig(**{"max_steps": 1000, **given})
    plan = batch_plan(args)
    return rl_config(args, ModelOptions(), plan, plan.length(args, 100))


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
        ({"num_iterations": 3}, {"update.epochs_per_step": 3, "run.num_steps": 334, "checkpoint.every_steps": 167}),
        (
            {"steps_per_generation": 4},
            {"update.minibatches_per_epoch": 4, "rollout.prompts_per_step": 4}
            | {"run.num_steps": 250, "checkpoint.every_steps": 125},
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
            {"algorithm.reward_aggregation": "normalize_then_sum"}
            | {"algorithm.deviation": "sample", "algorithm.deviation_epsilon": 1e-4},
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


@pytest.mark.parametrize(("former", "now"), [("rloo_k", "num_generations"), ("kl_coef", "beta")])
def test_a_former_name_of_a_field_is_answered_with_todays(former: str, now: str) -> None:
    with refused("RLOOConfig", repr(former), f"`{now}`"):
        RLOOConfig(**{former: 4})


PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "trl.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.partition("| per device |")[2].partition("\n\n")[0].splitlines()[2:]
]
FIELDS = ["per_device_train_batch_size", "gradient_accumulation_steps", "num_generations"]
FIELDS += ["steps_per_generation", "generation_batch_size", "num_iterations"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row[:6]))
def test_a_worked_case_is_what_comes_out(row: list[str]) -> None:
    assert len(ROWS) == 12
    given = {name: int(cell) for name, cell in zip(FIELDS, row, strict=False) if cell}
    args = GRPOConfig(**given)
    plan = batch_plan(args)
    assert f"{plan.prompts_per_step} × {plan.group_size}" == row[6]
    assert f"{plan.epochs_per_step} × {plan.minibatches_per_epoch}" == row[7]
    assert str(plan.length(args, 100).updates_per_epoch) == row[8]


def test_epochs_and_max_steps_count_updates() -> None:
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_generations": 4}
    args = GRPOConfig(num_train_epochs=1.5, **sizes)
    plan = batch_plan(args)  # 4 prompts an update; of 30 rows TRL takes 7 chunks of 4 and drops 2
    length = plan.length(args, 30)
    assert (length.updates_per_epoch, length.updates) == (7, 11)  # ⌈1.5 · 7⌉
    assert plan.length(GRPOConfig(max_steps=5), 30).updates == 5


def test_several_updates_of_a_step_are_taken_whole() -> None:
    plan = batch_plan(GRPOConfig(steps_per_generation=4, max_steps=6))
    assert (plan.updates_per_step, plan.length(GRPOConfig(max_steps=6), 100).steps) == (4, 2)


def test_a_group_that_trl_would_tear_apart_is_one_update_and_that_is_said() -> None:
    plan = batch_plan(GRPOConfig(per_device_train_batch_size=2, num_generations=8, steps_per_generation=4))
    assert (plan.prompts_per_step, plan.minibatches_per_epoch) == (1, 1)
    assert plan.notes == (
        "TRL would take 4 updates on parts of 1 group of 8; a group stays whole here, so there is 1.",
    )


@pytest.mark.parametrize(
    "given",
    [
        {"steps_per_generation": 4},  # TRL takes 4 updates on one group; one here
        {"steps_per_generation": 1, "gradient_accumulation_steps": 4},  # TRL refuses a generation batch of 1
        {"steps_per_generation": 1, "gradient_accumulation_steps": 4, "num_iterations": 2},
        {"steps_per_generation": 4, "num_iterations": 3},
        {"per_device_train_batch_size": 2, "steps_per_generation": 4},
        {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2, "steps_per_generation": 1},
    ],
)
def test_an_epoch_asks_every_prompt_about_once_however_groups_are_kept_whole(given: dict[str, int]) -> None:
    args = GRPOConfig(**{"per_device_train_batch_size": 1, "num_generations": 4, "num_train_epochs": 1, **given})
    plan = batch_plan(args)
    prompts = plan.length(args, 120).steps * plan.prompts_per_step
    assert prompts == 120


def test_a_batch_smaller_than_a_group_is_rounded_up_and_that_is_said() -> None:
    plan = batch_plan(GRPOConfig(per_device_train_batch_size=1, num_generations=2))
    assert plan.notes == ("1 completions are not a whole number of groups of 2: a step has 2, those of 1 prompt.",)


FIRST, SECOND = [[1.0, 0.0], [1.0, 1.0]], [[0.0, 1.0], [0.5, 0.5]]
"""Scores of two functions, each over two groups of two."""


def grades(*weights: float) -> Grades:
    scores, counts = torch.tensor([FIRST, SECOND], dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)
    rewards = (counts[:, None, None] * scores).sum(dim=0)
    return Grades(names=("first", "second"), scores=scores, weights=counts, rewards=rewards)


@pytest.mark.parametrize(
    ("given", "weights", "share"),
    [
        ({}, (1, 1), 1.0),  # sums 1, 1 and 1.5, 1.5
        ({}, (1, 0.5), 0.5),  # 1, .5 and 1.25, 1.25
        ({"scale_rewards": "batch"}, (1, 1), 0.0),  # 1, 1, 1.5, 1.5 differ
        ({"multi_objective_aggregation": "normalize_then_sum"}, (1, 1), 1.0),  # z and -z; nothing differs in group 2
        ({"multi_objective_aggregation": "normalize_then_sum"}, (1, 0.5), 0.0),  # z - z/2: all four have a deviation
        ({"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "batch"}, (1, 0.5), 0.0),
    ],
)
def test_the_share_without_deviation_is_of_what_is_divided(given, weights, share) -> None:
    assert share_without_deviation(grades(*weights), logged_by(GRPOConfig(**given)).zero_deviation) == share


def test_shares_of_clipped_tokens_are_of_all_tokens_and_have_the_name_of_the_loss() -> None:
    ours = {"kl": 0.1, "clip_ratio/low_mean": 0.2, "clip_ratio/high_mean": 0.4, "clip_ratio/region_mean": 0.6}
    assert token_entry(ours, logged_by(GRPOConfig()), trained_share=0.5) == {
        "kl": 0.1, "clip_ratio/low_mean": 0.1, "clip_ratio/high_mean": 0.2, "clip_ratio/region_mean": 0.3,
    }  # fmt: skip
    cispo = logged_by(GRPOConfig(loss_type="cispo", epsilon_high=5.0))
    assert token_entry(ours, cispo, trained_share=0.5) == {"kl": 0.1, "cispo_clip_ratio": 0.2}


def test_an_entry_of_several_steps_has_means_and_of_counts_the_last() -> None:
    steps: list[Entry] = [
        {"reward": 1.0, "num_tokens": 10.0, "learning_rate": 0.3, "grad_norm": 2.0, "kl": None},
        {"reward": 2.0, "num_tokens": 40.0, "learning_rate": 0.1, "grad_norm": 4.0, "kl": 0.5},
    ]
    assert taken_entry(steps) == {"reward": 1.5, "num_tokens": 40.0, "learning_rate": 0.1, "grad_norm": 4.0, "kl": 0.5}
    assert taken_entry(steps) == {}


STORED = json.loads((Path(__file__).parents[1] / "data" / "trl_fields.json").read_text(encoding="utf-8"))
PARTS = (ScriptArguments, GRPOConfig, ModelConfig)


def config(folder: Path, text: str) -> str:
    file = folder / "config.yaml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_the_command_line_goes_over_the_file_and_the_file_over_defaults(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("POSTTRAIN_TRIED", "before")
    file = config(
        tmp_path,
        "dataset_name: rows\nlearning_rate: 5e-6\nmax_steps: 7\nlora_r: 4\nmodel_init_kwargs: {revision: main}\n"
        "env: {POSTTRAIN_TRIED: 1}\n",
    )
    line = ["--max_steps", "9", "--config", file, "--use_peft"]
    script, args, of_model = TrlParser(PARTS).parse_args_and_config(line)
    assert (script.dataset_name, script.dataset_train_split) == ("rows", "train")
    assert (args.learning_rate, args.max_steps, args.num_generations) == (5e-6, 9, 8)  # YAML reads 5e-6 as text
    assert args.model_init_kwargs == {"revision": "main"}
    assert (of_model.lora_r, of_model.use_peft) == (4, True)
    assert os.environ["POSTTRAIN_TRIED"] == "1"
    assert TrlParser(GRPOConfig).parse_args_and_config([])[0].max_steps == -1


def test_what_is_no_field_comes_back_where_that_is_asked_for(tmp_path: Path) -> None:
    line = ["--config", config(tmp_path, "max_step: 3"), "--more", "x"]
    *_, rest = TrlParser(PARTS).parse_args_and_config(line, return_remaining_strings=True)
    assert rest == ["--max_step", "3", "--more", "x"]
    made = TrlParser(PARTS).parse_args_and_config(line[:2], fail_with_unknown_args=False)
    assert made[1].max_steps == -1


@pytest.mark.parametrize("parser", [HfArgumentParser, TrlParser])
@pytest.mark.parametrize("config", [name for name in STORED if name.endswith("Config")])
def test_every_switch_of_trl_is_a_flag_with_and_without_a_value(config: str, parser: Any) -> None:
    made = parser(getattr(trl, config))
    for name, default in STORED[config].items():
        if isinstance(default, bool):
            said = {(f"--{name}",): True, (f"--{name}", "true"): True, (f"--{name}", "false"): False}
            for line, value in said.items():
                assert getattr(made.parse_args(line), name) is value
            if default:
                (args,) = made.parse_args_into_dataclasses([f"--no_{name}"])
                assert getattr(args, name) is False
