"""Runs with an adapter, ours or a `PeftModel`: plan, folder, what finds it there, resumption, and over which base."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import posttrain
from posttrain.cli import main
from posttrain.config import Config
from posttrain.config.fit_configs import DpoConfig, RewardModelConfig, SftConfig
from posttrain.config.reading import resolved_config
from posttrain.errors import RunError
from posttrain.models.adapters.adaptable import is_4_bit
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.policy import Policy
from posttrain.options.dataset import DatasetOptions
from posttrain.options.model import AdapterOptions, ModelOptions
from posttrain.options.pairs import DpoOptions
from posttrain.training.reference import EarlierAdapter
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
def adapted_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps whose checkpoints are all there."""
    made = tmp_path_factory.mktemp("lora")
    assert main(["rl", str(recipe_of(made, 2)), "--run.folder", str(made / "run")]) == 0
    return made / "run"


def require_measured_again(run: Path, results: Path) -> None:
    """`posttrain eval` of a run finds what its summary says."""
    assert main(["eval", str(run), "--output", str(results)]) == 0
    after, again = (json.loads(file.read_text()) for file in (run / "summary.json", results))
    known = {name: value for name, value in after["after"].items() if value is not None and name != "measured_on"}
    assert {name: again[name] for name in known} == known


def test_a_run_keeps_the_adapter_for_other_commands(adapted_run: Path, tmp_path: Path, capsys) -> None:
    assert (adapted_run / "adapter" / "adapter_model.safetensors").is_file()
    assert not (adapted_run / "model").exists()
    kept = json.loads((adapted_run / "adapter" / "adapter_config.json").read_text())
    assert Path(kept["base_model_name_or_path"]) == (adapted_run.parent / "base").resolve()
    require_measured_again(adapted_run, tmp_path / "results.json")
    assert main(["chat", str(adapted_run), "--prompt", "3 and 4 make "]) == 0
    capsys.readouterr()
    recipe = recipe_of(tmp_path, 1)
    said = printed("rl", recipe, "--model.path", adapted_run, "--model.adapter", "null", "--dry-run")
    assert "adapter    rank 2, alpha 32, on 2 layers" in said


def test_a_checkpoint_holds_the_adapter_its_optimiser_and_the_digest_of_its_base(adapted_run: Path) -> None:
    path = adapted_run / "checkpoints" / "step-000002"
    policy = load_file(path / "policy.safetensors")
    assert {name.rpartition(".")[2] for name in policy} == {"lora_A", "lora_B"}
    assert len(policy) == 2 * 2
    assert len(load_file(path / "optimizer.safetensors")) == 3 * 4  # step and two means of each
    frozen = json.loads((path / "state.json").read_text())["frozen"]
    assert len(frozen["sha256"]) == 64
    assert frozen["model"].endswith("base")
    saved = load_file(adapted_run / "adapter" / "adapter_model.safetensors")
    for name, tensor in policy.items():
        assert tensor.equal(saved[f"base_model.model.{name}.weight"])


def test_a_run_is_not_resumed_over_another_base(tmp_path: Path) -> None:
    recipe, folder = recipe_of(tmp_path, 1), tmp_path / "run"
    assert main(["rl", str(recipe), "--run.folder", str(folder)]) == 0
    save_tiny_model(tmp_path / "base", seed=1)
    config = posttrain.load_recipe(folder / "config.yaml", run={"num_steps": 2, "folder": str(folder)})
    with refused("has changed since the run began"):
        posttrain.train(config, resume=True)
    with refused("frozen weights differ from", "made with", "base (SHA-256", error=RunError):
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
    require_measured_again(folder, tmp_path / "results.json")
    # Whoever goes on with the adapter goes on over a base in 4 bits, unasked.
    again = load_policy(ModelOptions(path=str(folder)))
    assert any(is_4_bit(layer) for layer in again.model.modules())


ROWS = [{"prompt": f"{i} and {i} make ", "completion": f"{2 * i}.", "answer": i} for i in range(1, 7)]
HELD_OUT = [{"prompt": f"{i} and {i} are ", "answer": i} for i in range(1, 4)]
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # transformers to peft


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("peft") / "base")


def brought(base: Path, **options: Any) -> tuple[nn.Module, Policy]:
    """A PeftModel of a folder, its B zero unless told otherwise, and the policy of it."""
    config = peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj", "down_proj"], **options})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    return model, posttrain.as_policy(model, AutoTokenizer.from_pretrained(base))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(1, 9)[None]).logits


def digits(completions: list[str], **columns: object) -> list[float]:
    return [float(sum(each.isdigit() for each in text)) for text in completions]


def by_reward(folder: Path, policy: Policy, steps: int = 2, *, resume: bool = False, **sections: Any) -> posttrain.Run:
    given: dict[str, Mapping[str, Any]] = {
        "task": {"name": "dataset", "held_out_share": 0.0},
        "algorithm": {"name": "grpo", "kl": {"coefficient": 0.1}},
        "rollout": {"prompts_per_step": 3, "group_size": 4, "max_completion_tokens": 5},
        "update": {"learning_rate": 0.05},
        "evaluation": {"every_steps": 0},
        "checkpoint": {"every_steps": 1},
        "run": {"folder": str(folder), "num_steps": steps, "threads": 1},
    }
    config = posttrain.load_recipe(**{**given, **sections})
    return posttrain.train(config, policy=policy, rows=ROWS, rewards=[digits], resume=resume)


def supervised(folder: Path, policy: Policy, steps: int = 2, *, resume: bool = False, **sections: Any) -> posttrain.Run:
    given: dict[str, Mapping[str, Any]] = {
        "task": {"name": "dataset", "held_out_share": 0.0},
        "sft": {"learning_rate": 0.05, "rows_per_batch": 3},
        "checkpoint": {"every_steps": 1},
        "run": {"folder": str(folder), "num_steps": steps, "threads": 1},
    }
    config = posttrain.load_recipe(kind=posttrain.SftConfig, **{**given, **sections})
    return posttrain.train_sft(config, policy=policy, rows=ROWS, resume=resume)


each_kind = pytest.mark.parametrize("train", [by_reward, supervised])
KINDS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "dropout": {"lora_dropout": 0.5},
    "dora": {"use_dora": True},
    "saved whole": {"modules_to_save": ["norm"]},
}


@pytest.mark.parametrize(("train", "kind"), [(by_reward, "plain"), *((supervised, kind) for kind in KINDS)])
def test_what_was_trained_is_saved_as_peft_reads_it(train: Any, kind: str, base: Path, tmp_path: Path, capsys) -> None:
    model, policy = brought(base, **KINDS[kind])
    before = logits(model)
    run = train(tmp_path / "run", policy)
    assert run.model_folder == tmp_path / "run" / "adapter"
    assert not (tmp_path / "run" / "model").exists()
    assert train is by_reward or f"model        {run.model_folder}\n" in capsys.readouterr().out
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run.model_folder)
    assert torch.equal(logits(again), logits(model))
    assert (logits(again) - before).abs().max() > 1e-3
    assert AutoTokenizer.from_pretrained(run.model_folder).get_vocab() == policy.tokenizer.get_vocab()
    if kind == "plain":
        asked = {"rows": ROWS, "held_out_rows": HELD_OUT, "rewards": [digits]}
        found = posttrain.evaluate(run.folder, config_of_counting(), **asked)
        here = posttrain.evaluate(None, config_of_counting(), policy=policy, **asked)
        assert found == here


@pytest.mark.parametrize(
    ("train", "section", "expected"),
    [(by_reward, "update", 1e-5), (supervised, "sft", 1e-4)],  # ten times what suits a whole model
)
def test_it_gets_the_default_rate_of_an_adapter_and_a_given_one_stays(
    train: Any, section: str, expected: float, base: Path, tmp_path: Path
) -> None:
    more = {"rows_per_batch": 3} if section == "sft" else {}
    made = train(tmp_path / "run", brought(base)[1], 1, **{section: more}).folder
    assert metrics_of(made)[1]["learning_rate"] == pytest.approx(expected)
    # The folder's own recipe says it, and goes on with it.
    assert yaml.safe_load((made / "config.yaml").read_text())[section]["learning_rate"] == pytest.approx(expected)
    train(made, brought(base)[1], 2, resume=True, **{section: more})
    assert metrics_of(made)[2]["learning_rate"] == pytest.approx(expected)
    given = {**more, "learning_rate": expected / 10}  # what would be the default without an adapter
    run = train(tmp_path / "given", brought(base)[1], 1, **{section: given})
    assert metrics_of(run.folder)[1]["learning_rate"] == pytest.approx(expected / 10)


def test_a_whole_model_keeps_its_rate_whatever_the_recipe_says_of_adapters(base: Path, tmp_path: Path) -> None:
    policy = posttrain.as_policy(AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base))
    run = by_reward(tmp_path / "run", policy, 1, update={}, model={"adapter": {"rank": 2}})
    assert metrics_of(run.folder)[1]["learning_rate"] == pytest.approx(1e-6)


def config_of_counting() -> posttrain.Config:
    return posttrain.load_recipe(
        task={"name": "dataset"}, rollout={"max_completion_tokens": 5}, evaluation={"samples": 2}, run={"threads": 1}
    )


def test_it_is_merged_where_the_recipe_says_so(base: Path, tmp_path: Path) -> None:
    model, policy = brought(base)
    run = supervised(tmp_path / "run", policy, model={"path": str(base), "adapter": {"save": "both"}})
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    torch.testing.assert_close(logits(merged), logits(model), rtol=0, atol=1e-5)
    assert (logits(merged) - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 1e-3
    assert (run.folder / "adapter" / "adapter_config.json").is_file()


def test_more_than_plain_matrices_is_not_merged_and_peft_is_named(base: Path, tmp_path: Path) -> None:
    _, policy = brought(base, use_dora=True)
    with refused("q_proj has an adapter that is more than plain LoRA", "merge_and_unload"):
        supervised(tmp_path / "run", policy, 1, model={"path": str(base), "adapter": {"save": "merged"}})


@each_kind
def test_a_checkpoint_holds_what_is_trained_and_resumes_to_the_bit(train: Any, base: Path, tmp_path: Path) -> None:
    train(tmp_path / "whole", brought(base)[1], 3)
    train(tmp_path / "parts", brought(base)[1], 1)
    held = load_file(tmp_path / "parts" / "checkpoints" / "step-000001" / "policy.safetensors")
    assert len(held) == 2 * 2
    assert all(".lora_" in name for name in held)
    train(tmp_path / "parts", brought(base)[1], 3, resume=True)
    name = "adapter_model.safetensors"
    ours, theirs = (load_file(tmp_path / each / "adapter" / name) for each in ("whole", "parts"))
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())
    assert metrics_of(tmp_path / "whole")[1:] == metrics_of(tmp_path / "parts")[1:]


@pytest.mark.parametrize("forward", ["auto", "plain"])
def test_with_the_reference_entered_the_model_is_its_base_to_the_bit_and_then_itself(forward: str, base: Path) -> None:
    model, _ = brought(base)
    policy = posttrain.as_policy(model, AutoTokenizer.from_pretrained(base), forward=forward)
    reference, frozen = EarlierAdapter(policy), [each.requires_grad for each in model.parameters()]
    next(each for name, each in model.named_parameters() if "lora_B" in name).data.fill_(0.3)
    now = logits(model)
    with reference.entered() as entered:
        assert entered.model is policy.model
        assert torch.equal(logits(model), logits(AutoModelForCausalLM.from_pretrained(base)))
    assert torch.equal(logits(model), now)
    assert [each.requires_grad for each in model.parameters()] == frozen
    later = EarlierAdapter(policy)
    next(each for name, each in model.named_parameters() if "lora_B" in name).data.fill_(0.7)
    with later.entered():
        assert torch.equal(logits(model), now)
    assert not torch.equal(logits(model), now)


def train_norm(model: nn.Module) -> None:
    model.get_base_model().model.norm.weight.requires_grad_(True)


def freeze_adapter(model: nn.Module) -> None:
    model.requires_grad_(False)
    train_norm(model)


UNSAVEABLE = {
    "beside it": (train_norm, "norm.weight…adapter default…modules_to_save"),
    "none of it": (freeze_adapter, "norm.weight…files of its adapter"),
    "merged": (lambda model: model.merge_adapter(), "is merged into its weights…unmerge_adapter"),
}


@pytest.mark.parametrize(("train", "what"), [(by_reward, "merged"), *((supervised, what) for what in UNSAVEABLE)])
def test_what_the_files_of_an_adapter_would_not_hold_is_refused_before_anything_is_trained(
    train: Any, what: str, base: Path, tmp_path: Path
) -> None:
    change, says = UNSAVEABLE[what]
    model, _ = brought(base)
    change(model)
    with refused(says):
        train(tmp_path / "run", posttrain.as_policy(model, AutoTokenizer.from_pretrained(base)))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
