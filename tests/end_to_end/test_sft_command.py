"""`posttrain sft` from end to end: the loss falls, and a killed run ends as one that was never stopped."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.cli import main
from posttrain.config import SftConfig, build
from posttrain.config.recipes import RecipeLayer
from posttrain.runs.reports import CheckpointReport, EndReport, EvaluationReport, StepReport
from posttrain.runs.watchers import Watcher
from posttrain.training.sft.sft_run import train_sft
from tests.support.commands import printed, refusal
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


class Notes(Watcher):
    """Keeps what it is told, and adds a metric."""

    def __init__(self) -> None:
        self.evaluations: list[EvaluationReport] = []
        self.saves: list[int] = []
        self.ends: list[EndReport] = []

    def on_step(self, report: StepReport) -> dict[str, float]:
        return {"own/tokens": report.num_tokens}

    def on_evaluation(self, report: EvaluationReport) -> None:
        self.evaluations.append(report)

    def on_save(self, report: CheckpointReport) -> None:
        self.saves.append(report.step)

    def on_end(self, report: EndReport) -> None:
        self.ends.append(report)


def config_of(place: Path) -> SftConfig:
    file = recipe(place)
    return build(SftConfig, [RecipeLayer(where=str(file), sections=yaml.safe_load(file.read_text()))])


def test_a_watcher_of_ones_own_sees_steps_evaluations_checkpoints_and_the_end(whole: Path) -> None:
    place, notes = whole.parent.parent / "watched", Notes()
    run = train_sft(config_of(place), watchers=[notes])
    assert run.model_folder == place / "run" / "model"
    assert json.loads((run.folder / "summary.json").read_text()) == run.summary
    (first, *lines), tokens = metrics_of(place / "run"), 0
    for line in lines:
        tokens += line.pop("own/tokens")
        assert tokens == line["num_tokens"]
    assert [first, *lines] == metrics_of(whole), "a watcher changes nothing"
    measured = {
        line["step"]: {name: value for name, value in line.items() if name.startswith("eval/")}
        for line in [first, *lines]
        if "eval/loss" in line
    }
    assert {report.step: report.results for report in notes.evaluations} == measured
    assert list(measured) == [0, *notes.saves] == [0, 4, 8, 12]
    (end,) = notes.ends
    assert end.summary["eval_loss"] == measured[12]["eval/loss"]


def test_the_loss_falls_and_the_model_loads_without_posttrain(whole: Path) -> None:
    before, *steps = metrics_of(whole)
    losses = [step["loss"] for step in steps]
    # From ln 390 = 5.97 nats, a uniform guess, to far below the 4.8 of knowing the digits and tags from the rest.
    assert losses[0] == pytest.approx(5.97, abs=0.3)
    assert losses[-1] < 4.0
    summary = json.loads((whole / "summary.json").read_text())
    measured = [step["eval/loss"] for step in steps if "eval/loss" in step]
    assert (summary["before"]["loss"], summary["after"]["loss"]) == (before["eval/loss"], measured[-1])
    assert summary["eval_loss"] == measured[-1], "the loss of the weights that are saved"
    assert summary["best_eval_loss"] == min(measured)
    manifest = json.loads((whole / "checkpoints" / "step-000012" / "manifest.json").read_text())
    assert manifest["score"] == -measured[-1], "the best checkpoint is the one with the lowest loss"
    model, tokenizer = (kind.from_pretrained(whole / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert tokenizer.decode(tokenizer.encode("<think>1+2=3</think>")) == "<think>1+2=3</think>"
    assert model.config.vocab_size == len(tokenizer)


def test_a_diverging_run_says_which_rate_to_lower(tmp_path: Path) -> None:
    said = refusal("sft", recipe(tmp_path / "place"), "--sft.learning-rate", "1e38", code=1)
    assert "No step was taken.  Start again with a lower sft.learning_rate." in said


def test_the_command_that_a_damaged_checkpoint_names_leads_to_the_same_bits(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    (run / "checkpoints" / "step-000012" / "state.json").write_text("{}")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([lines[0], *lines[4:]]))
    assert main(["sft", "--resume", str(run)]) == 1
    told = capsys.readouterr()
    assert f"\n    posttrain sft --resume {run} --from-step 8\n" in told.err
    out = printed("sft", "--resume", run, "--from-step", "8")
    assert "Removed: the checkpoints of steps 12, and everything else after step 8." in out
    assert "metrics.jsonl lacks steps 1-3, which were finished" in out
    assert "scores.jsonl" not in out  # there are none of a supervised run
    for file in ("model/model.safetensors", "checkpoints/step-000012/optimizer.safetensors"):
        assert (run / file).read_bytes() == (whole / file).read_bytes()
    assert metrics_of(run) == [metrics_of(whole)[0], *metrics_of(whole)[4:]]
