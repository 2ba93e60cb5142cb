"""Recipes, flags and the Python API are three ways to say the same thing."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from posttrain.algorithms.table import ALGORITHMS, build_algorithm
from posttrain.commands.arguments import split_arguments
from posttrain.commands.flags import CommandSpec
from posttrain.commands.phase_list import read_phases
from posttrain.config import Config, as_recipe, build, load_recipe
from posttrain.config.reading import COMMAND_OF, resolved_config
from posttrain.config.recipes import RecipeLayer, bundled_recipes, parse_yaml, read_recipe, to_yaml
from posttrain.options.model import ModelOptions
from posttrain.options.reward import GradingOptions, RewardOptions
from posttrain.options.rollout import RolloutOptions
from posttrain.options.task import CountdownOptions
from posttrain.options.training import EvaluationOptions, RunOptions, UpdateOptions
from tests.support.refusals import refused
from tests.support.tiny import BY_REWARD, token_loss

PROGRAM = CommandSpec(name="posttrain rl", description="")
POSITIVE = st.floats(1e-12, 1e3)
# What YAML 1.1 or a careless writer would read as a number, a word or nothing.
TRICKY = st.sampled_from(
    ["1e-4", "null", "no", "on", "010", "1_000", "12:30", ".inf", "~", "<<", "true", "é ñ", "a: b"]
)

SECTIONS = st.fixed_dictionaries(
    {
        "model": st.builds(
            ModelOptions, path=TRICKY | st.text(min_size=1), dtype=st.sampled_from(["float32", "bfloat16"])
        ),
        "task": st.builds(CountdownOptions, num_numbers=st.integers(2, 6), numbers=st.sampled_from(["all", "subset"])),
        "rewards": st.lists(
            st.builds(RewardOptions, name=st.sampled_from(["graded_format", "countdown"]), weight=st.floats(-2, 2))
            | st.builds(
                RewardOptions,
                path=st.just("mine.py:f"),
                where=st.dictionaries(TRICKY, TRICKY, max_size=1),
                clip=st.none() | st.just((-1.0, 1.5)),
                workers=st.integers(0, 9),
                item_seconds=st.floats(0, 5),
                seconds=st.sampled_from([0.0, 60.0]),
                cache=st.booleans(),
            ),
            max_size=2,
        ).map(tuple),
        "algorithm": st.sampled_from(
            [*({"name": name} for name in ALGORITHMS), {"name": "grpo", "kl": {"coefficient": 0.1}}]
        ),
        "grading": st.builds(GradingOptions, max_failure_share=st.floats(0, 1), cache_file=TRICKY),
        "rollout": st.builds(RolloutOptions, temperature=st.floats(0.01, 3), group_size=st.integers(2, 64)),
        "update": st.builds(UpdateOptions, learning_rate=POSITIVE, max_grad_norm=POSITIVE | st.just(math.inf)),
        "evaluation": st.builds(EvaluationOptions, samples=st.integers(1, 64)),
        "run": st.builds(
            RunOptions, folder=TRICKY, time_limit_minutes=st.none() | POSITIVE, seed=st.integers(0, 2**40)
        ),
    }
)


def from_text(text: str) -> Config:
    return build(Config, [RecipeLayer(where="test", sections=parse_yaml(text))])


def from_flags(*flags: str, recipe: str = "{}") -> Config:
    layers = [RecipeLayer(where="test", sections=parse_yaml(recipe))]
    return split_arguments(flags, PROGRAM).configured(Config, layers, loads_model=False)[0]


@given(sections=SECTIONS)
def test_a_config_written_out_and_read_again_is_the_same(sections: dict[str, Any]) -> None:
    config = Config(**sections)
    assert from_text(as_recipe(config)) == resolved_config(config)


@given(text=st.text() | TRICKY, number=st.floats(allow_nan=False), whole=st.integers())
def test_yaml_that_we_write_is_read_as_what_it_was(text: str, number: float, whole: int) -> None:
    content = {"text": text, "number": number, "whole": whole, "nothing": None, "yes": True}
    assert parse_yaml(to_yaml(content)) == content


def test_yaml_scalars_are_those_of_version_1_2() -> None:
    read = parse_yaml("{a: 1e-4, b: no, c: 010, d: 12:30, e: 1_000, f: .inf, g: ~, h: -.5, i: 2026-01-02}")
    expected = {"a": 1e-4, "b": "no", "c": 10, "d": "12:30", "e": "1_000", "f": math.inf, "g": None, "h": -0.5}
    assert read == expected | {"i": "2026-01-02"}


@pytest.mark.parametrize(
    ("flags", "recipe"),
    [
        (["--rollout.group-size", "16"], "rollout: {group_size: 16}"),
        (["--rollout.group_size=16"], "rollout: {group_size: 16}"),
        (["--update.learning-rate", "1e-4"], "update: {learning_rate: 1e-4}"),
        (["--grading.seconds", "60", "--grading.cache-file", "x.db"], "grading: {seconds: 60, cache_file: x.db}"),
        (["--update.max-grad-norm", "inf"], "update: {max_grad_norm: .inf}"),
        (["--run.overwrite", "--checkpoint.no-keep-best"], "{run: {overwrite: true}, checkpoint: {keep_best: false}}"),
        (["--run.time-limit-minutes", "2.5"], "run: {time_limit_minutes: 2.5}"),
        (["--model.path", "null"], "model: {path: 'null'}"),
        (["--task.numbers", "subset", "--task.max-target", "50"], "task: {numbers: subset, max_target: 50}"),
        (["--algorithm.name", "dapo", "--algorithm.clip-high", "0.3"], "algorithm: {name: dapo, clip_high: 0.3}"),
        (["--algorithm.kl.coefficient", "0.05"], "algorithm: {kl: {coefficient: 0.05}}"),
        (["--algorithm.name", "dapo", "--algorithm.overlong", "null"], "algorithm: {name: dapo, overlong: null}"),
        (["--rewards", "graded_format=2", "m.py:f"], "rewards: [{name: graded_format, weight: 2}, {path: 'm.py:f'}]"),
    ],
)
def test_a_flag_says_what_the_recipe_of_the_same_name_says(flags: list[str], recipe: str) -> None:
    assert from_flags(*flags) == from_text(recipe) != Config()


def test_a_reward_says_all_of_itself_flat_in_the_recipe_and_its_name_comes_first() -> None:
    item = "{path: 'mine.py:f', gate: g, clip: [0, 2], weight_to: 0.0, over_steps: 9, workers: 2, item_seconds: 3}"
    config = from_text(f"rewards: [{item}, {{name: graded_format}}]")
    first = config.rewards[0]
    assert (first.gate, first.clip, first.weight_at(10), first.workers, first.item_seconds) == ("g", (0, 2), 0, 2, 3)
    sections = parse_yaml(as_recipe(config))
    assert [next(iter(reward)) for reward in sections["rewards"]] == ["path", "name"]
    assert from_text(as_recipe(config)) == resolved_config(config)


def test_a_flag_set_to_its_default_still_overrides_the_recipe() -> None:
    assert Config().rollout.group_size == 8
    assert from_flags("--rollout.group-size", "8", recipe="rollout: {group_size: 4}").rollout.group_size == 8
    assert from_flags("--run.time-limit-minutes", "null", recipe="run: {time_limit_minutes: 5}") == Config()


def test_what_a_flag_does_not_mention_stays_as_the_recipe_has_it() -> None:
    config = from_flags("--rollout.temperature", "0.5", recipe="rollout: {group_size: 4}")
    assert config.rollout == RolloutOptions(group_size=4, temperature=0.5)


def test_later_recipes_override_earlier_ones_option_by_option() -> None:
    first = RecipeLayer(where="a", sections={"rollout": {"group_size": 4, "temperature": 0.5}, "run": {"seed": 1}})
    second = RecipeLayer(where="b", sections={"rollout": {"group_size": 6}})
    both, swapped = build(Config, [first, second]), build(Config, [second, first])
    assert both.rollout == RolloutOptions(group_size=6, temperature=0.5)
    assert swapped.rollout == RolloutOptions(group_size=4, temperature=0.5)
    assert both.run.seed == swapped.run.seed == 1


@pytest.mark.parametrize(
    ("before", "path", "name"),
    [
        ({}, "rows.jsonl", "dataset"),
        ({"name": "countdown", "num_numbers": 4}, "rows.csv", "dataset"),
        ({"name": "dataset", "prompt_column": "question"}, "rows.jsonl", "dataset"),
        ({"name": "programs"}, "mine.jsonl", "programs"),
    ],
)
def test_a_file_of_rows_is_the_task_of_rows(before: dict[str, Any], path: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text(f"task: {before}\n")
    (tmp_path / "second.yaml").write_text(f"task: {{path: {path}}}\n")
    recipes = [str(tmp_path / "first.yaml"), str(tmp_path / "second.yaml")]
    by_recipe = load_recipe(*recipes).task
    by_python = load_recipe(recipes[0], task={"path": path}).task
    arguments, layers = split_arguments(["--task.path", path], PROGRAM), [read_recipe(recipes[0])]
    by_flag, _ = arguments.configured(Config, layers, loads_model=False)
    assert by_recipe == by_python == by_flag.task
    assert (by_recipe.name, by_recipe.path) == (name, path)
    assert by_recipe.prompt_column == before.get("prompt_column", "prompt")


def test_another_algorithm_does_not_inherit_the_options_of_the_one_before() -> None:
    config = from_flags("--algorithm.name", "gspo", recipe="algorithm: {name: grpo, clip_high: 0.4, deviation: sample}")
    assert config == from_text("algorithm: gspo")
    kept = from_flags("--algorithm.name", "grpo", recipe="algorithm: {name: grpo, clip_high: 0.4}")
    assert kept.algorithm["clip_high"] == 0.4


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_algorithm_section_is_spelled_out_and_builds_the_same_algorithm(name: str) -> None:
    config = from_text(f"algorithm: {name}")
    assert len(config.algorithm) > 2
    spelled, short = build_algorithm(config.algorithm), build_algorithm({"name": name})
    assert (spelled.name, spelled.kl_penalty, spelled.resample) == (name, short.kl_penalty, short.resample)
    assert spelled.token_weights is short.token_weights
    if name not in BY_REWARD:
        return
    # Ratios from far below every clip range to far above it, each in a completion of its own.
    ratios, advantages = torch.linspace(-2, 2, 4001).double(), torch.ones(4001).double()
    for sign in (1, -1):
        given = (ratios, torch.zeros_like(ratios), sign * advantages, torch.arange(4001))
        assert torch.equal(token_loss(spelled, *given), token_loss(short, *given))


def test_the_python_api_says_what_a_recipe_says() -> None:
    by_mapping = load_recipe(run={"num_steps": 3}, algorithm="dapo")
    by_options = load_recipe(run=RunOptions(num_steps=3), algorithm={"name": "dapo"})
    assert by_mapping == by_options == replace(Config(algorithm={"name": "dapo"}), run=RunOptions(num_steps=3))


@pytest.mark.parametrize("name", [name for name in bundled_recipes() if "phases" not in read_recipe(name).sections])
def test_every_bundled_recipe_resolves_and_is_stable(name: str) -> None:
    config = load_recipe(name)
    kind = type(config)
    assert kind in COMMAND_OF
    again = build(kind, [RecipeLayer(where="again", sections=parse_yaml(as_recipe(config)))])  # type: ignore[arg-type, type-var]
    assert again == resolved_config(config)
    assert read_recipe(name).sections.keys() <= {"model", "task", *vars(config)}


@pytest.mark.parametrize("name", [name for name in bundled_recipes() if "phases" in read_recipe(name).sections])
def test_the_phases_of_every_bundled_recipe_are_sound(name: str, tmp_path: Path) -> None:
    assert len(read_phases(name, tmp_path)) > 1


@pytest.mark.parametrize("name", ALGORITHMS)
def test_only_an_algorithm_that_compares_completions_of_a_prompt_refuses_groups_of_one(name: str) -> None:
    asked = ["--rollout.group-size", "1", "--algorithm.name", name]
    assert build_algorithm({"name": name}).least_group_size == (1 if name in ("reinforce", "ppo") else 2)
    if name in ("reinforce", "ppo"):
        assert from_flags(*asked).rollout.group_size == 1
        return
    with refused("rollout.group_size = 1", name, "Use at least 2"):
        from_flags(*asked)


def test_rules_between_fields_wait_until_every_source_was_heard() -> None:
    config = from_flags("--rollout.group-size", "4", recipe="rollout: {group_size: 1}")
    assert config.rollout.group_size == 4


def test_a_row_longer_than_the_token_budget_is_told_with_its_numbers() -> None:
    config = from_text("{update: {tokens_per_microbatch: 450}, rollout: {max_completion_tokens: 400}}")
    config.require_room(50)
    with refused("update.tokens_per_microbatch = 450 … prompt 51 + completion 400 … Use at least 451"):
        config.require_room(51)
