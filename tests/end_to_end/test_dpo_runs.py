"""Runs of DPO on pairs and in rounds, and runs with a critic or a teacher: what they report, and that they resume."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import posttrain
from posttrain.config import DpoConfig
from posttrain.config.reading import resolved_config
from posttrain.training.rl import show_rl_plan
from posttrain.training.session import CallerObjects
from tests.support.accidents import Accident
from tests.support.commands import refusal
from tests.support.conversations import chat_tokenizer
from tests.support.dice import dice
from tests.support.model_folders import changed
from tests.support.own_objects import config_for
from tests.support.refusals import refused
from tests.support.runs import command, contents, metrics_of, records, require_same, save_tiny_model, tiny_recipe


def test_held_out_pairs_have_intervals_and_the_model_is_a_plain_one(finished: Callable[[str], Path]) -> None:
    run = finished("dpo") / "run"
    lines = metrics_of(run)
    first, *_, last = (line for line in lines if "eval/loss" in line)
    assert first["eval/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert first["eval/pairs/margin"] == pytest.approx(0, abs=1e-5)
    assert last["eval/pairs/margin_low"] <= last["eval/pairs/margin"] <= last["eval/pairs/margin_high"]
    assert last["eval/pairs/margin_low"] > 0.1
    assert last["eval/pairs/accuracy"] == 1
    gaps = [line["eval/logps/chosen"] - line["eval/logps/rejected"] for line in (first, last)]
    assert gaps[1] > gaps[0]
    for line in lines[1:]:
        assert line["rewards/margins"] == pytest.approx(line["rewards/chosen"] - line["rewards/rejected"])
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    assert model.config.vocab_size == len(chat_tokenizer())


def rounds_recipe(folder: Path, **sections: Any) -> Path:
    """Three rounds of three updates, judged by dice."""
    dpo = {"rounds": 3, "steps_per_round": 3, "prompts_per_round": 6, "pairs_per_batch": 3, "learning_rate": 1e-2}
    recipe = tiny_recipe(folder)
    content: dict[str, Any] = yaml.safe_load(recipe.read_text())
    del content["algorithm"], content["update"], content["rollout"]["prompts_per_step"], content["run"]["num_steps"]
    content["rollout"]["max_completion_tokens"] = 10
    content["dpo"] = {**dpo, **sections.pop("dpo", {})}
    content |= sections
    recipe.write_text(yaml.safe_dump(content))
    return recipe


@pytest.fixture(scope="module")
def place_of_rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rounds")
    save_tiny_model(folder / "model")
    return folder


@pytest.mark.parametrize(
    "options",
    [{}, {"reference": "precomputed", "refresh_reference": True, "pairs_per_prompt": 2}],
    ids=["live", "precomputed and refreshed"],
)
def test_a_run_in_rounds_that_is_killed_twice_is_the_same(place_of_rounds: Path, options: dict[str, Any]) -> None:
    name = "-".join(options) or "plain"
    folders = [place_of_rounds / f"{name}-{each}" for each in ("whole", "killed")]
    for folder in folders:
        rewards = [{"path": f"{folders[0]}/dice.py:dice"}]
        rounds_recipe(folder, dpo=dict(options), checkpoint={"every_steps": 1}, rewards=rewards)
    ended = command("dpo", folders[0] / "recipe.yaml", folder=folders[0])
    assert ended.code == 0, ended.err
    accident = Accident(moment="open metrics.jsonl 4")  # in the third step, and then in the sixth
    first = command("dpo", folders[1] / "recipe.yaml", folder=folders[1], accident=accident)
    assert first.code == -9, first.err
    second = command("dpo", "--resume", "run", folder=folders[1], accident=accident)
    assert second.code == -9, second.err
    last = command("dpo", "--resume", "run", folder=folders[1])
    assert last.code == 0, last.err
    assert contents(folders[1] / "run") == contents(folders[0] / "run")


def test_a_run_in_rounds_keeps_every_completion_and_says_which_made_pairs(place_of_rounds: Path) -> None:
    folder = place_of_rounds / "kept"
    recipe = rounds_recipe(folder)
    ended = command("dpo", recipe, folder=folder)
    assert ended.code == 0, ended.err
    run, summary = folder / "run", json.loads((folder / "run" / "summary.json").read_text())
    files = sorted(path.name for path in (run / "rollouts").iterdir())
    assert files == ["step-000001.parquet", "step-000004.parquet", "step-000007.parquet"]
    sides = pq.read_table(run / "rollouts" / files[0]).to_pydict()
    for draw in range(6):
        rewards = [r for r, d in zip(sides["reward"], sides["draw"], strict=True) if d == draw]
        told = [a for a, d in zip(sides["advantage"], sides["draw"], strict=True) if d == draw]
        assert sorted(each for each in told if each is not None) == ([-1, 1] if len({*rewards}) > 1 else [])
    lines = {line["step"]: line for line in metrics_of(run)}
    assert [step for step, line in lines.items() if "round" in line] == [1, 4, 7]
    made = [line["pairs/num"] + 6 * line["pairs/frac_tied"] for line in lines.values() if "round" in line]
    assert made == pytest.approx([6, 6, 6])
    assert [each["round"] for each in summary["rounds"]] == [1, 2, 3]
    assert summary["steps"] == 9
    assert {"accuracy_sampled", "accuracy_sampled_interval"} <= summary["after"].keys()
    assert "round 2/3: " in ended.out
    # Each round is sampled from the weights as they are then: an update for each step that had pairs.
    versions = [set(pq.read_table(run / "rollouts" / each)["weights_version"].to_pylist()) for each in files]
    learned = [line["num_pairs"] > 0 for line in lines.values() if "num_pairs" in line]
    assert versions == [{0}, {sum(learned[:3])}, {sum(learned[:6])}]


def test_without_rounds_a_task_of_ones_own_is_refused_before_it_is_imported(tmp_path: Path) -> None:
    noted, mine = tmp_path / "noted", tmp_path / "mine.py"
    mine.write_text(f"open({str(noted)!r}, 'w').close()\nclass Mine:\n    def __init__(self) -> None: ...\n")
    given = ["dpo", "--model.path", str(tmp_path / "none"), "--task.path", f"{mine}:Mine"]
    for flags in [], ["--dpo.rounds", "0"], ["--dpo.rounds=0"], ["--dry-run"]:
        assert "task with dpo.rounds = 0 needs rows" in refusal(*given, *flags)
    with refused("task with dpo.rounds = 0"):
        posttrain.load_recipe(kind=DpoConfig, task={"path": f"{mine}:Mine"})
    assert not noted.exists()
    for flags in ["--dpo.rounds", "2"], ["--dpo.rounds=2"]:
        assert "without rounds" not in refusal(*given, *flags)
    assert noted.exists()


def test_a_recipe_with_the_section_dpo_is_of_this_kind_and_says_all_when_it_is_written_down() -> None:
    config = posttrain.load_recipe(task={"name": "dataset"}, dpo={"loss": "ipo"}, model={"adapter": {"rank": 2}})
    assert isinstance(config, DpoConfig)
    config = resolved_config(config)
    assert config.dpo.length_normalized is True
    assert config.dpo.learning_rate == 1e-5  # ten times that of a whole model
    assert "length_normalized: true" in posttrain.as_recipe(config)


ROWS = [{"prompt": f"Throw {n}. "} for n in range(12)]
ALGORITHM = {
    "name": "ppo",
    "critic": {"fit_steps": 1},
    "kl": {"coefficient": 0.05, "estimator": "k1", "place": "reward"},
    "adaptive_kl": {"target": 0.01, "horizon": 50.0},
    "reward_scaling": {},
    "missing_stop_penalty": 0.5,
}


def with_critic(model: Path, folder: Path, **critic: object) -> posttrain.Config:
    return config_for(
        model,
        folder,
        task={"held_out_share": 0.2},
        algorithm={**ALGORITHM, "critic": {**ALGORITHM["critic"], **critic}},
        rollout={"prompts_per_step": 8, "group_size": 1, "max_completion_tokens": 4},
        evaluation={"samples": 1},
        checkpoint={"every_steps": 2, "keep_last": 1, "keep_best": False},
        run={"num_steps": 4},
    )


def test_a_run_that_is_stopped_and_resumed_is_the_one_that_never_stopped(model: Path, tmp_path: Path) -> None:
    """With a trunk of its own the critic is restored in tests/engine/test_critic.py."""
    whole = posttrain.train(with_critic(model, tmp_path / "whole"), rows=ROWS, rewards=[dice]).folder
    parted = with_critic(model, tmp_path / "parted")
    with posttrain.steps(parted, rows=ROWS, rewards=[dice]) as steps:
        assert [next(steps).step for _ in range(3)] == [1, 2, 3]
    posttrain.train(parted, rows=ROWS, rewards=[dice], resume=True)
    require_same(tmp_path / "parted", whole)
    theirs, ours = (load_file(run / "critic" / "value_head.safetensors") for run in (whole, tmp_path / "parted"))
    assert all((ours[name] == tensor).all() for name, tensor in theirs.items())
    assert {file.name for file in (whole / "critic").iterdir()} == {"value_head.safetensors"}
    lines = records(whole / "metrics.jsonl")[1:-1]
    assert [line["value/critic_alone"] for line in lines][-1] == 0.0
    assert {line["num_updates"] + line["num_updates_left_out"] for line in lines} == {8.0}
    # The policy moves from step 2 on; step 3 sees how far it went, and step 4 has the coefficient that follows.
    assert [line["kl_coefficient"] == 0.05 for line in lines] == [True, True, True, False]
    assert "value_head.safetensors" not in {file.name for file in (whole / "model").iterdir()}


def test_a_critic_starts_from_earlier_rollouts(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = posttrain.train(with_critic(model, tmp_path / "first"), rows=ROWS, rewards=[dice]).folder
    capsys.readouterr()
    warm = with_critic(model, tmp_path / "warm", warm_start=str(first / "rollouts"))
    with posttrain.steps(warm, rows=ROWS, rewards=[dice]) as steps:
        told = next(steps)
    assert "The critic learned from 32 earlier rollouts" in capsys.readouterr().out
    assert told.metrics["value/explained_variance"] != 0
    again = with_critic(model, tmp_path / "again", path=str(first / "critic"))
    with posttrain.steps(again, rows=ROWS, rewards=[dice]) as steps:
        assert next(steps).metrics["value/explained_variance"] != 0
    none = with_critic(model, tmp_path / "none", warm_start=str(tmp_path))
    with refused("critic.warm_start", tmp_path, "step-N.parquet"):
        next(posttrain.steps(none, rows=ROWS, rewards=[dice]))
    with refused("critic.warm_start", "step-N.parquet"):
        show_rl_plan(none, CallerObjects(rows=ROWS, rewards=[dice]))
    (tmp_path / "step-1.parquet").write_text("no table")
    with refused("step-1.parquet", "Parquet"):
        next(posttrain.steps(none, rows=ROWS, rewards=[dice]))


SUMS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a student and a teacher."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_model(folder / "student")
    save_tiny_model(folder / "teacher", seed=1)
    return folder


def config_of(models: Path, folder: Path, teacher: dict[str, object], **algorithm: object) -> posttrain.Config:
    return config_for(
        models / "student",
        folder,
        algorithm={"name": "distill", "teacher": teacher, **algorithm},
        rollout={"prompts_per_step": 4, "max_completion_tokens": 8},
        update={"epochs_per_step": 2},
        checkpoint={"every_steps": 1, "keep_last": 3},
        run={"num_steps": 3},
    )


def trained(taught: posttrain.Config, **options: Any) -> list[dict[str, Any]]:
    run = posttrain.train(
        taught, rows=SUMS, rewards=[lambda completions: [float(len(text) % 2 == 0) for text in completions]], **options
    )
    return metrics_of(run.folder)[1:]


def test_a_run_taught_by_itself_beside_rewards_resumes_to_the_bit(models: Path, tmp_path: Path) -> None:
    taught = config_of(models, tmp_path / "run", {"sees": "sibling"}, reward_weight=1.0)
    whole = trained(taught)
    assert all(0 < step["teacher/shown"] < 1 for step in whole)
    assert any(step["kl_teacher"] != 0 for step in whole)
    assert trained(taught, resume=True, from_step=1) == whole


def test_an_answer_is_shown_to_every_completion_and_the_sampled_signal_is_told(models: Path, tmp_path: Path) -> None:
    teacher = {"sees": "answer", "weights": "start"}
    steps = trained(config_of(models, tmp_path / "run", teacher, signal="sampled", horizon="completion"))
    assert all(step["teacher/shown"] == 1 and step["kl_teacher"] != 0 for step in steps)


def test_another_model_teaches_and_the_run_knows_it_by_its_content(models: Path, tmp_path: Path) -> None:
    taught = config_of(models, tmp_path / "run", {"model": str(models / "teacher")})
    steps = trained(taught)
    assert all(step["kl_teacher"] > 0 for step in steps)
    assert all("teacher/shown" not in step for step in steps)
    save_tiny_model(models / "teacher", seed=2)
    with refused("algorithm.teacher.model"):
        trained(taught, resume=True, from_step=1)


def test_a_model_beside_the_policy_reads_as_far_as_completions_go(models: Path, tmp_path: Path) -> None:
    short = Path(shutil.copytree(models / "teacher", tmp_path / "short"))
    taught = config_of(models, tmp_path / "run", {"model": str(short)})
    changed(short / "config.json", max_position_embeddings=12)  # a prompt of 4 tokens, and 8 of the completion
    assert len(trained(taught)) == 3
    changed(short / "config.json", max_position_embeddings=11)
    anew = replace(taught, run=replace(taught.run, overwrite=True))
    critic = {"name": "ppo", "critic": {"trunk": "own", "path": str(short)}}
    with_kl = replace(anew, algorithm={"name": "grpo", "kl": {"coefficient": 0.1}})
    for option, wrong in {
        "algorithm.teacher.model": anew,
        "algorithm.critic.path": replace(anew, algorithm=critic),
        "reference.path": replace(with_kl, reference=replace(with_kl.reference, path=str(short))),
    }.items():
        with refused(f"{option}: the model reads 11 tokens, and the longest prompt with its completion has up to 12"):
            trained(wrong)


def test_what_a_teacher_shows_is_learned_where_no_reward_tells_anything(models: Path, tmp_path: Path) -> None:
    taught = config_of(models, tmp_path / "run", {"model": str(models / "teacher")})
    taught = replace(taught, grading=replace(taught.grading, max_same_reward_steps=2))
    run = posttrain.train(taught, rows=SUMS, rewards=[lambda completions: [0.0] * len(completions)])
    assert [line["reward"] for line in metrics_of(run.folder)[1:]] == [0.0] * 3
    assert not (run.folder / "alarms.jsonl").read_text()
