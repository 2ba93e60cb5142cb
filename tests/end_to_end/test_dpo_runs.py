"""`posttrain dpo`: pairs of rows and rounds of sampled pairs, from a first look to a model, killed on the way."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from transformers import AutoModelForCausalLM

import posttrain
from posttrain.config import DpoConfig
from posttrain.config.reading import resolved_config
from tests.support.accidents import Accident
from tests.support.commands import refusal
from tests.support.conversations import chat_model, chat_tokenizer
from tests.support.refusals import refused
from tests.support.runs import command, contents, metrics_of, save_tiny_model, tiny_recipe


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


# Rounds


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
    runs = []
    for folder in folders:
        recipe = rounds_recipe(folder, dpo=options, checkpoint={"every_steps": 1})
        content = yaml.safe_load(recipe.read_text())
        content["rewards"] = [{"path": f"{folders[0]}/dice.py:dice"}]
        recipe.write_text(yaml.safe_dump(content))
        runs.append(folder / "run")
    ended = command("dpo", folders[0] / "recipe.yaml", folder=folders[0])
    assert ended.code == 0, ended.err
    accident = Accident(moment="open metrics.jsonl 4")  # in the third step, and then in the sixth
    first = command("dpo", folders[1] / "recipe.yaml", folder=folders[1], accident=accident)
    assert first.code == -9, first.err
    second = command("dpo", "--resume", "run", folder=folders[1], accident=accident)
    assert second.code == -9, second.err
    last = command("dpo", "--resume", "run", folder=folders[1])
    assert last.code == 0, last.err
    assert contents(runs[1]) == contents(runs[0])


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


def test_from_python_rows_rewards_and_policy_are_objects(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    policy = posttrain.as_policy(chat_model(tokenizer), tokenizer)
    config = posttrain.load_recipe(
        kind=DpoConfig,
        task={"name": "dataset", "held_out_share": 0.2, "prompt_format": "chat"},
        dpo={"rounds": 2, "steps_per_round": 1, "prompts_per_round": 4, "learning_rate": 1e-3},
        rollout={"group_size": 4, "max_completion_tokens": 6},
        evaluation={"samples": 1},
        run={"folder": str(tmp_path / "run"), "threads": 1},
    )

    def short(completions: list[str], **columns: object) -> list[float]:
        return [-float(len(text)) for text in completions]

    rows = [{"prompt": f"{n}+1="} for n in range(20)]
    run = posttrain.train_dpo(config, policy=policy, rows=rows, rewards=[short])
    assert run.summary["rewards"] == {"short": 1.0}
    assert (run.folder / "model" / "model.safetensors").is_file()
    inputs = json.loads((run.folder / "inputs.json").read_text())["objects"]
    assert inputs["policy"]["sha256"], "the policy is the reference, which no checkpoint holds"
    with refused("the run was made with objects that this resume lacks"):
        posttrain.train_dpo(config, resume=True)


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
