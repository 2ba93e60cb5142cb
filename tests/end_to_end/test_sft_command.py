"""`posttrain sft` from end to end: the loss falls, and a killed run ends as one that was never stopped."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.cli import main
from tests.support.accidents import Accident
from tests.support.runs import command, metrics_of

RECIPE: dict[str, dict[str, Any]] = {
    "model": {"hidden_size": 16, "mlp_size": 24, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1},
    "sft": {
        "learning_rate": 2e-2,
        "schedule": "cosine",
        "weight_decay": 0.01,
        "tokens_per_batch": 512,
        "tokens_per_microbatch": 256,
        "eval_every": 4,
        "eval_size": 8,
    },
    "checkpoint": {"every_steps": 4},
    "run": {"num_steps": 12, "threads": 1},
}


def recipe(place: Path) -> Path:
    place.mkdir()
    content = {**RECIPE, "run": {**RECIPE["run"], "folder": str(place / "run")}}
    (place / "recipe.yaml").write_text(yaml.safe_dump(content))
    return place / "recipe.yaml"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    place = tmp_path_factory.mktemp("sft") / "whole"
    ended = command("sft", recipe(place), folder=place.parent)
    assert ended.code == 0, ended.err
    return place / "run"


def require_same_weights(run: Path, other: Path) -> None:
    assert metrics_of(run) == metrics_of(other)
    assert (run / "model" / "model.safetensors").read_bytes() == (other / "model" / "model.safetensors").read_bytes()
    for name in ("policy", "optimizer"):
        file = f"checkpoints/step-000012/{name}.safetensors"
        assert (run / file).read_bytes() == (other / file).read_bytes()


def test_the_loss_falls_and_the_model_loads_without_posttrain(whole: Path) -> None:
    losses = [step["loss"] for step in metrics_of(whole)]
    # From ln 390 = 5.97 nats, a uniform guess, to far below the 4.8 of knowing the digits and tags from the rest.
    assert losses[0] == pytest.approx(5.97, abs=0.3)
    assert losses[-1] < 4.0
    summary = json.loads((whole / "summary.json").read_text())
    measured = [step["eval/loss"] for step in metrics_of(whole) if "eval/loss" in step]
    assert summary["eval_loss"] == measured[-1], "the loss of the weights that are saved"
    assert summary["best_eval_loss"] == min(measured)
    manifest = json.loads((whole / "checkpoints" / "step-000012" / "manifest.json").read_text())
    assert manifest["score"] == -measured[-1], "the best checkpoint is the one with the lowest loss"
    model, tokenizer = (kind.from_pretrained(whole / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert tokenizer.decode(tokenizer.encode("<think>1+2=3</think>")) == "<think>1+2=3</think>"
    assert model.config.vocab_size == len(tokenizer)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a_stopped_run_is_resumed_to_the_same_bits(whole: Path, number: int, code: int) -> None:
    place = whole.parent.parent / f"stopped-{number}"
    accident = Accident(moment="open metrics.jsonl 7", signal=number)  # once made, six times written to
    ended = command("sft", recipe(place), folder=place, accident=accident)
    assert ended.code == code, ended.err
    if number == signal.SIGINT:
        assert f"stopped after step 6; go on with   posttrain sft --resume {place / 'run'}" in ended.out
    resumed = command("sft", "--resume", place / "run", folder=place)
    assert resumed.code == 0, resumed.err
    assert f"Resumed after step {4 if number == signal.SIGKILL else 6}." in resumed.out
    require_same_weights(place / "run", whole)


def test_a_diverging_run_and_options_without_effect_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(recipe(tmp_path / "place"))
    assert main(["sft", path, "--sft.learning-rate", "1e38"]) == 1
    assert "lower sft.learning_rate" in capsys.readouterr().err
    assert main(["sft", path, "--run.time-limit-minutes", "3"]) == 2
    assert "run.time_limit_minutes = 3.0 stops runs of `posttrain rl` only" in capsys.readouterr().err
