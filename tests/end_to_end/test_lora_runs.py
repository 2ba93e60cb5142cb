"""A run with an adapter: its plan, its folder, what finds it there, how it is resumed, and over which base."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

import posttrain
from posttrain.cli import main
from posttrain.config import Config
from posttrain.config.fit_configs import DpoConfig, RewardModelConfig, SftConfig
from posttrain.config.reading import resolved_config
from posttrain.errors import RunError
from posttrain.models.adapters.adaptable import is_4_bit
from posttrain.models.loading.model_folder import load_policy
from posttrain.options.dataset import DatasetOptions
from posttrain.options.model import AdapterOptions, ModelOptions
from posttrain.options.pairs import DpoOptions
from posttrain.options.training import OptimizerOptions, rated
from tests.support.commands import printed, refusal
from tests.support.refusals import refused
from tests.support.runs import metrics_of, save_tiny_model, tiny_recipe

ADAPTER = {"rank": 2, "targets": ["q_proj", "down_proj"]}


def recipe_of(folder: Path, num_steps: int, **model: object) -> Path:
    """A recipe of a run with an adapter and a KL to its base."""
    base = folder / "base"
    if not base.is_dir():
        save_tiny_model(base)
    recipe = tiny_recipe(folder, algorithm={"name": "grpo", "kl": {"coefficient": 0.1}})
    content: dict[str, Any] = yaml.safe_load(recipe.read_text())
    content["model"] = {"path": str(base), "adapter": ADAPTER, **model}
    content["run"] = {**content["run"], "num_steps": num_steps}
    content["checkpoint"] = {"every_steps": 1}
    content["update"] = {**content.get("update", {}), "learning_rate": 0.01}
    recipe.write_text(yaml.safe_dump(content))
    return recipe


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps whose checkpoints are all there."""
    made = tmp_path_factory.mktemp("lora")
    assert main(["rl", str(recipe_of(made, 2)), "--run.folder", str(made / "run")]) == 0
    return made / "run"


def test_a_run_keeps_the_adapter_for_other_commands(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
    assert not (run / "model").exists()
    kept = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert Path(kept["base_model_name_or_path"]) == (run.parent / "base").resolve()
    assert main(["eval", str(run), "--output", str(tmp_path / "results.json")]) == 0
    again, after = json.loads((tmp_path / "results.json").read_text()), json.loads((run / "summary.json").read_text())
    assert {name: again[name] for name, value in after["after"].items() if value is not None} == {
        name: value for name, value in after["after"].items() if value is not None
    }
    assert main(["chat", str(run), "--prompt", "3 and 4 make "]) == 0
    capsys.readouterr()
    recipe = recipe_of(tmp_path, 1)
    said = printed("rl", recipe, "--model.path", run, "--model.adapter", "null", "--dry-run")
    assert "adapter    rank 2, alpha 32, on 2 layers" in said


def test_a_checkpoint_holds_the_adapter_its_optimiser_and_the_digest_of_its_base(run: Path) -> None:
    path = run / "checkpoints" / "step-000002"
    policy = load_file(path / "policy.safetensors")
    assert {name.rpartition(".")[2] for name in policy} == {"lora_A", "lora_B"}
    assert len(policy) == 2 * 2
    assert len(load_file(path / "optimizer.safetensors")) == 3 * 4  # step and two means of each
    frozen = json.loads((path / "state.json").read_text())["frozen"]
    assert len(frozen["sha256"]) == 64
    assert frozen["model"].endswith("base")
    saved = load_file(run / "adapter" / "adapter_model.safetensors")
    for name, tensor in policy.items():
        assert tensor.equal(saved[f"base_model.model.{name}.weight"])


def test_a_resumed_run_gives_the_bits_of_one_that_never_stopped(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    recipe = recipe_of(tmp_path, 3, adapter={**ADAPTER, "dropout": 0.2})
    assert main(["rl", str(recipe), "--run.folder", str(whole)]) == 0
    assert main(["rl", str(recipe), "--run.folder", str(parts), "--run.num-steps", "1"]) == 0
    assert main(["rl", "--resume", str(parts), "--run.num-steps", "3"]) == 0
    ours, theirs = (load_file(each / "adapter" / "adapter_model.safetensors") for each in (whole, parts))
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())
    assert [line["loss"] for line in metrics_of(whole)[1:4]] == [line["loss"] for line in metrics_of(parts)[1:4]]


def test_a_run_is_not_resumed_over_another_base(tmp_path: Path) -> None:
    recipe, folder = recipe_of(tmp_path, 1), tmp_path / "run"
    assert main(["rl", str(recipe), "--run.folder", str(folder)]) == 0
    save_tiny_model(tmp_path / "base", seed=1)
    config = posttrain.load_recipe(folder / "config.yaml", run={"num_steps": 2, "folder": str(folder)})
    with refused("has changed since the run began"):
        posttrain.train(config, resume=True)
    with refused("frozen weights are not those", "made over", "base (SHA-256", error=RunError):
        posttrain.train(config, resume=True, accept_changes=True)


def test_a_run_goes_on_where_its_base_has_moved_and_says_how(tmp_path: Path) -> None:
    recipe, folder, base = recipe_of(tmp_path, 1), tmp_path / "run", tmp_path / "base"
    whole = tmp_path / "whole"
    assert main(["rl", str(recipe), "--run.folder", str(whole), "--run.num-steps", "3"]) == 0
    assert main(["rl", str(recipe), "--run.folder", str(folder)]) == 0
    moved = base.rename(tmp_path / "moved")
    told = refusal("rl", "--resume", folder, "--run.num-steps", "2")
    assert f"model.path = {base}: no such folder.  If the model has moved" in told
    assert told.endswith(f"--resume {folder} --model.path NEW.\n")
    other = save_tiny_model(tmp_path / "other", seed=1)
    said = refusal("rl", "--resume", folder, "--model.path", other, "--run.num-steps", "2")
    assert f"its files differ from those in {base}" in said
    said = printed("rl", "--resume", folder, "--model.path", moved, "--run.num-steps", "2")
    assert f"model.path = {moved}, the same files that were in {base}" in said
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"]["path"] == str(moved)
    # From here on the run knows the new place, and still takes a checkpoint that was made in the old one.
    assert main(["rl", "--resume", str(folder), "--from-step", "1", "--run.num-steps", "3"]) == 0
    ours, theirs = (load_file(each / "adapter" / "adapter_model.safetensors") for each in (whole, folder))
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())


def test_a_supervised_run_trains_an_adapter_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "base")
    rows = [{"prompt": f"{i} and {i} make ", "completion": f"{2 * i}"} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    typed = ["sft", "--model.path", str(base), "--model.adapter.rank", "2", "--task.path", str(tmp_path / "rows.jsonl")]
    typed += ["--checkpoint.every-steps", "1", "--sft.rows-per-batch", "4", "--run.threads", "1"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    said = printed(*typed, "--run.num-steps", "3", "--run.folder", whole)
    assert "learning rate 0.0001; the default is 0.0001, of a whole model 1e-05" in said
    assert main([*typed, "--run.num-steps", "1", "--run.folder", str(parts)]) == 0
    assert main(["sft", "--resume", str(parts), "--run.num-steps", "3"]) == 0
    ours, theirs = (load_file(each / "adapter" / "adapter_model.safetensors") for each in (whole, parts))
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())
    assert any(bool(tensor.any()) for name, tensor in ours.items() if "lora_B" in name)
    moved = base.rename(tmp_path / "moved")
    assert "If the model has moved, name its new place" in refusal("sft", "--resume", parts, "--run.num-steps", "4")
    assert main(["sft", "--resume", str(parts), "--model.path", str(moved), "--run.num-steps", "4"]) == 0
    state = json.loads((whole / "checkpoints" / "step-000003" / "state.json").read_text())
    assert len(state["frozen"]["sha256"]) == 64


# The learning rate.


def test_the_default_learning_rate_with_an_adapter_is_ten_times_that_without() -> None:
    with_adapter = ModelOptions(adapter=AdapterOptions())
    assert resolved_config(Config()).update.learning_rate == 1e-6
    assert resolved_config(Config(model=with_adapter)).update.learning_rate == 1e-5
    own = posttrain.load_recipe("own-model", model={"adapter": {"rank": 2}}, task={"path": "rows.jsonl"})
    assert resolved_config(own).update.learning_rate == 1e-5
    given = OptimizerOptions(learning_rate=3e-4)
    for adapter in (False, True):
        assert rated(given, adapter=adapter).learning_rate == 3e-4


@pytest.mark.parametrize("kind", [Config, SftConfig, RewardModelConfig, DpoConfig])
def test_a_rate_that_was_left_out_is_left_out_of_every_copy_too(kind: Any) -> None:
    """Until it is known what is trained: a copy with another option, or another model, has the rate of that model."""
    rows = {} if kind is Config else {"task": DatasetOptions(path="rows.jsonl")}
    config, section = kind(**rows), kind.optimizer_section
    again = replace(config, **{section: replace(getattr(config, section), beta2=0.99)})
    assert getattr(again, section).learning_rate is None
    whole, adapted = (getattr(resolved_config(again, adapter=each), section).largest_rate for each in (False, True))
    assert adapted == pytest.approx(10 * whole)
    other = replace(again, model=ModelOptions(adapter=AdapterOptions()))
    assert getattr(resolved_config(other), section).largest_rate == adapted
    text = posttrain.as_recipe(other)
    assert yaml.safe_load(text)[section]["learning_rate"] == adapted


@pytest.mark.parametrize("first", ["sigmoid", "ipo"])
def test_what_follows_from_a_loss_follows_from_that_of_a_copy(first: Any) -> None:
    other = {"sigmoid": "ipo", "ipo": "sigmoid"}[first]
    options = replace(DpoOptions(loss=first), loss=other)
    assert options.resolved().length_normalized is (other == "ipo")
    assert replace(DpoOptions(rounds=2), rounds=0).resolved().num_epochs == 1


def test_the_plan_says_both_rates_and_which_is_used(tmp_path: Path) -> None:
    said = printed("rl", recipe_of(tmp_path, 1), "--dry-run")
    assert "learning rate 0.01; the default is 1e-05, of a whole model 1e-06" in said
    said = printed("rl", recipe_of(tmp_path, 1), "--update.learning-rate", "null", "--dry-run")
    assert "learning rate 1e-05\n" in said


def test_nf4_trains_and_is_measured_over_the_same_base(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    recipe, folder = recipe_of(tmp_path, 1, quantization="nf4"), tmp_path / "run"
    said = printed("rl", recipe, "--run.folder", folder)
    assert "layers of it in nf4 (scales quantised too), products in float32" in said
    assert main(["eval", str(folder), "--output", str(tmp_path / "results.json")]) == 0
    after = json.loads((folder / "summary.json").read_text())["after"]
    measured = json.loads((tmp_path / "results.json").read_text())
    assert {name: measured[name] for name in after if after[name] is not None} == {
        name: value for name, value in after.items() if value is not None
    }
    # Whoever goes on with the adapter goes on over a base in 4 bits, unasked.
    again = load_policy(ModelOptions(path=str(folder)))
    assert any(is_4_bit(layer) for layer in again.model.modules())
