"""`posttrain reward-model`: from rows to a folder that `rewards` and transformers take, killed and resumed."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import yaml
from matplotlib.figure import Figure
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import posttrain
from posttrain.cli import main
from posttrain.config import Config, RewardModelConfig
from posttrain.config.kinds import resolved_config
from posttrain.errors import UserError
from posttrain.runs.reports import StepReport
from tests.support.accidents import Accident
from tests.support.conversations import save_chat_model, turns
from tests.support.runs import command, metrics_of

ROWS = [
    {"chosen": turns(f"{n}?", f"yes {n}"), "rejected": turns(f"{n}?", f"no {n}"), "margin": 0.5 * (n % 2)}
    for n in range(40)
]
RECIPE: dict[str, Any] = {
    "task": {"name": "dataset", "path": "pairs.jsonl", "held_out_share": 0.2},
    "model": {"path": "model"},
    "reward_model": {"learning_rate": 1e-2, "pairs_per_batch": 5, "num_epochs": 2, "eval_every": 4},
    "checkpoint": {"every_steps": 4},
    "run": {"folder": "run", "threads": 1},
}


def place(folder: Path, **sections: Any) -> Path:
    """A folder with model, pairs and recipe."""
    folder.mkdir(exist_ok=True)
    save_chat_model(folder / "model")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    recipe = {name: {**options, **sections.get(name, {})} for name, options in RECIPE.items()}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    folder = place(tmp_path_factory.mktemp("rm") / "whole")
    ended = command("reward-model", "recipe.yaml", folder=folder)
    assert ended.code == 0, ended.err
    assert ended.out.endswith("use it       posttrain rl RECIPE.yaml --rewards run/model\n")
    return folder


def test_a_run_measures_before_along_and_after_and_leaves_a_classifier_that_is_right(whole: Path) -> None:
    lines, summary = metrics_of(whole / "run"), json.loads((whole / "run" / "summary.json").read_text())
    trained, apart = summary["pairs"]["trained"], summary["pairs"]["held_out"]
    assert trained + apart == 40
    num_steps = 2 * -(-trained // 5)
    assert [line["step"] for line in lines] == [*range(num_steps + 1)]
    measured = {line["step"]: line for line in lines if "eval/accuracy" in line}
    assert [*measured] == sorted({0, num_steps, *range(4, num_steps, 4)})
    after = summary["after"]
    assert after["accuracy"] == measured[num_steps]["eval/accuracy"] == 1.0
    assert after["accuracy_interval"] == [pytest.approx(0.78, abs=0.05), 1.0], "few prompts, all right: no point"
    assert sum(each["num_pairs"] for each in after["calibration"]) == apart
    assert summary["before"]["loss"] == measured[0]["eval/loss"] > after["loss"]
    assert summary["pairs_learned"] == 2 * trained
    best = min((step for step in measured if step), key=lambda step: measured[step]["eval/loss"])
    assert (whole / "run" / "checkpoints" / f"step-{best:06d}").is_dir(), "the best by held-out loss is kept"
    told = [json.loads(line) for line in (whole / "run" / "held_out.jsonl").read_text().splitlines()]
    assert len(told) == apart
    assert all(each["chosen"] > each["rejected"] and each["where"].startswith("pairs.jsonl:") for each in told)
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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a_stopped_run_is_resumed_to_the_same_bits(whole: Path, number: int, code: int) -> None:
    folder = place(whole.parent / f"stopped-{number}")
    accident = Accident(moment="open metrics.jsonl 8", signal=number)  # in the sixth step
    ended = command("reward-model", "recipe.yaml", folder=folder, accident=accident)
    assert ended.code == code, ended.err
    resumed = command("reward-model", "--resume", "run", folder=folder)
    assert resumed.code == 0, resumed.err
    assert metrics_of(folder / "run") == metrics_of(whole / "run")
    last = max(path.name for path in (whole / "run" / "checkpoints").iterdir())
    for file in ("model/model.safetensors", f"checkpoints/{last}/optimizer.safetensors", "held_out.jsonl"):
        assert (folder / "run" / file).read_bytes() == (whole / "run" / file).read_bytes()


def test_other_pairs_are_refused_when_a_run_goes_on(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(whole, folder)
    with (folder / "pairs.jsonl").open("a") as rows:
        rows.write(json.dumps(ROWS[0]) + "\n")
    refused = command("reward-model", "--resume", "run", "--from-step", 4, folder=folder)
    assert refused.code == 2
    assert "task.path = pairs.jsonl has changed since the run began" in refused.err


def test_a_dry_run_shows_plan_and_pairs_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place(tmp_path / "place"))
    assert main(["reward-model", "recipe.yaml", "--model.adapter.rank", "2", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "merged into the base when it is saved" in out
    assert "loss       -log σ(r_chosen - r_rejected), centring 0.01, margins of " in out
    assert "pairs of " in out
    assert "⟪yes " in out
    assert not Path("run").exists()
    assert main(["plan", "recipe.yaml"]) == 0
    assert "It fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"task": {"name": "countdown"}}, "what is learned are pairs"),
        ({"task": {"name": "dataset", "max_prompt_tokens": 5}}, "pairs hold whole answers"),
        ({"run": {"num_steps": 7}}, "both say when the run ends"),
        ({"run": {"num_steps": 0}}, "trains nothing"),
        ({"run": {"time_limit_minutes": 1}}, "stops runs of `posttrain rl` only"),
        ({"run": {"token_limit": 10}}, "run.token_limit = 10 stops runs of `posttrain rl` only"),
        ({"model": {"adapter": {}}, "reward_model": {"weight_decay": 0.1}}, "an adapter .* is not decayed"),
    ],
)
def test_a_recipe_that_says_nonsense_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        posttrain.load_recipe(kind=RewardModelConfig, **{"task": "dataset"} | sections)


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


class Ends(posttrain.Watcher):
    """After a step at which nothing is measured."""

    def on_step(self, report: StepReport) -> None:
        self.stopping = report.step == 3


def test_a_run_that_a_watcher_ends_is_measured_as_it_ended(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first measurement along the way; what is told is of the weights that are saved."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **look: None)
    config = posttrain.load_recipe(
        kind=RewardModelConfig,
        model={"path": str(whole / "model")},
        task={"name": "dataset", "held_out_share": 0.25},
        reward_model={"num_epochs": None, "pairs_per_batch": 2},
        run={"folder": "rm", "num_steps": 9, "threads": 1},
    )
    run = posttrain.train_reward_model(config, rows=ROWS, watchers=[Ends()])
    assert run.summary["steps"] == 3
    rows = [json.loads(line) for line in (run.folder / "held_out.jsonl").read_text().splitlines()]
    margins = [row["chosen"] - row["rejected"] for row in rows]
    after = cast(dict[str, float], run.summary["after"])
    assert after["margin"] == pytest.approx(sum(margins) / len(margins), rel=1e-6)


def test_an_adapter_that_is_brought_has_the_rate_of_adapters(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peft

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **look: None)
    lora = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(posttrain_model(whole / "model"), lora)
    policy = posttrain.as_policy(adapted, AutoTokenizer.from_pretrained(whole / "model"))
    config = posttrain.load_recipe(
        kind=RewardModelConfig,
        task={"name": "dataset", "held_out_share": 0},
        reward_model={"num_epochs": None, "warmup_steps": 0, "schedule": "constant"},
        run={"folder": "rm", "num_steps": 1, "threads": 1},
    )
    run = posttrain.train_reward_model(config, policy=policy, rows=ROWS[:8])
    assert [line["learning_rate"] for line in metrics_of(run.folder) if "learning_rate" in line] == [1e-4]
