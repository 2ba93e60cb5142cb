"""`posttrain reward-model`: from rows to a folder that `rewards` and transformers take, killed and resumed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from matplotlib.figure import Figure
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import posttrain
from posttrain.config import Config, RewardModelConfig
from posttrain.config.reading import resolved_config
from tests.support.conversations import turns
from tests.support.fit_places import KINDS
from tests.support.runs import metrics_of

ROWS = KINDS["reward-model"].rows


@pytest.fixture
def whole(finished: Callable[[str], Path]) -> Path:
    return finished("reward-model")


def test_a_run_leaves_a_classifier_that_is_right_and_its_scores_of_held_out_pairs(whole: Path) -> None:
    summary = json.loads((whole / "run" / "summary.json").read_text())
    after, apart = summary["after"], summary["pairs"]["held_out"]
    assert after["accuracy"] == 1.0
    assert after["accuracy_interval"] == [pytest.approx(0.78, abs=0.05), 1.0], "few prompts, all right: no point"
    assert sum(each["num_pairs"] for each in after["calibration"]) == apart
    assert summary["before"]["loss"] > after["loss"]
    told = [json.loads(line) for line in (whole / "run" / "held_out.jsonl").read_text().splitlines()]
    assert len(told) == apart
    assert all(each["chosen"] > each["rejected"] and each["where"].startswith("rows.jsonl:") for each in told)
    margins = [each["chosen"] - each["rejected"] for each in told]
    assert after["margin"] == pytest.approx(sum(margins) / len(margins), rel=1e-6)
    assert (whole / "run" / "model" / "README.md").read_text().startswith("# Reward model")


def test_transformers_and_the_reward_read_the_held_out_scores_from_the_folder(whole: Path) -> None:
    folder = whole / "run" / "model"
    told = [json.loads(line) for line in (whole / "run" / "held_out.jsonl").read_text().splitlines()]
    rows = [ROWS[int(each["where"].rpartition(":")[2]) - 1] for each in told]
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.apply_chat_template(row["chosen"], tokenize=False) for row in rows]
    with torch.no_grad():
        scores = model(**tokenizer(texts, return_tensors="pt", padding=True)).logits[:, 0]
    expected = torch.tensor([each["chosen"] for each in told])
    assert (scores - expected).abs().max() <= 1e-5
    reward = posttrain.RewardModel(folder)
    found = reward(
        prompts=[turns(row["rejected"][0]["content"]) for row in rows],
        completions=[row["rejected"][1:] for row in rows],
    )
    assert (torch.tensor(found) - torch.tensor([each["rejected"] for each in told])).abs().max() <= 1e-5


def test_rates_are_those_of_what_is_trained_and_an_adapter_is_merged() -> None:
    whole_model = posttrain.load_recipe(kind=RewardModelConfig, task="dataset")
    assert resolved_config(whole_model).reward_model.learning_rate == 1e-5
    adapter = posttrain.load_recipe(kind=RewardModelConfig, task="dataset", model={"adapter": {"rank": 4}})
    assert resolved_config(adapter).reward_model.learning_rate == 1e-4
    assert adapter.model.adapter is not None
    assert adapter.model.adapter.save == "merged"
    again = posttrain.as_recipe(adapter)
    assert posttrain.load_recipe(kind=RewardModelConfig, **yaml.safe_load(again)) == resolved_config(adapter)


def test_from_python_a_policy_and_rows_are_given_and_rl_goes_on_by_what_was_learned(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **look: None)
    tokenizer = AutoTokenizer.from_pretrained(whole / "model")
    policy = posttrain.as_policy(posttrain_model(whole / "model"), tokenizer)
    config = posttrain.load_recipe(
        kind=RewardModelConfig,
        task={"name": "dataset", "held_out_share": 0},
        reward_model={"num_epochs": None, "center_coefficient": 0, "margin_scale": 0, "head_rate_scale": 3.0},
        run={"folder": "rm", "num_steps": 2, "threads": 1},
    )
    run = posttrain.train_reward_model(config, policy=policy, rows=ROWS[:8])
    assert run.summary["steps"] == 2
    assert run.summary["after"] == {}
    assert [path.name for path in run.folder.glob("*.png")] == ["curves.png"]
    rl = posttrain.load_recipe(
        kind=Config,
        model={"path": str(whole / "model")},
        task={"name": "dataset", "held_out_share": 0},
        rewards=[{"model": str(run.model_folder), "ensemble": [str(whole / "run" / "model")], "combine": "least"}],
        rollout={"prompts_per_step": 2, "group_size": 2, "max_completion_tokens": 4},
        run={"folder": "rl", "num_steps": 1, "threads": 1},
    )
    found = posttrain.train(rl, rows=[{"prompt": turns("2?")}, {"prompt": turns("3?")}])
    (line,) = [line for line in metrics_of(found.folder) if "rewards/model/mean" in line]
    assert line["logged/model/deviation"] > 0


def posttrain_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)
