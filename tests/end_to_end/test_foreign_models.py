"""Models of other families: they train as they are sampled, and peft and our commands read the adapters over them."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

import posttrain
from posttrain.cli import main
from posttrain.models.adapters import peft_format
from posttrain.models.adapters.peft_layers import WEIGHTS
from posttrain.models.loading.new_model import new_tokenizer
from posttrain.models.loading.saving import save_adapter
from posttrain.models.policy import as_policy
from posttrain.runs.alarms import GAP, GAP_LIMIT
from posttrain.trl import SFTConfig, SFTTrainer
from tests.support.families import family_model
from tests.support.family_measures import apart, few_steps, loaded, read_by_peft, saved
from tests.support.refusals import mentions, refused
from tests.support.runs import tiny_recipe

QUICK = {
    "run": {"num_steps": 2},
    "evaluation": {"every_steps": 0},
    "checkpoint": {"every_steps": 0},
    "algorithm": {"name": "grpo", "kl": {"coefficient": 0.1, "estimator": "full"}},
}


@pytest.mark.parametrize(
    ("family", "dtype", "says"),
    [
        ("lfm2", "float32", "sampled without a cache, whole rows again for every token: layers of a lfm2 keep more"),
        ("mistral", "bfloat16", "by the model's own forward pass"),
        ("gptj", "float32", "by the model's own forward pass"),
        ("granite", "float32", "by the model's own forward pass"),
    ],
)
def test_a_foreign_family_trains_and_sampler_and_trainer_stay_together(
    family: str, dtype: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = new_tokenizer()
    model = family_model(family, vocab_size=len(tokenizer))
    before = model.get_input_embeddings().weight.detach().clone()
    folder = tiny_recipe(tmp_path / "case", **QUICK).parent
    policy = as_policy(model, tokenizer, dtype=dtype, forward="plain", context=64)
    posttrain.train(posttrain.load_recipe(folder / "recipe.yaml"), policy=policy)
    printed = capsys.readouterr()
    assert says in printed.out + printed.err
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [step for step in steps if "loss" in step]
    assert [step["step"] for step in trained] == [1, 2]
    assert all(step[GAP] <= step[GAP_LIMIT] / (100 if dtype == "float32" else 1) for step in trained)
    assert trained[1]["kl"] > 0  # the whole divergence, through the same kind of output layer
    assert not model.get_input_embeddings().weight.equal(before)


READ_AS_EXPERTS = ("qwen3_moe with dense layers", "qwen3_next")
"""Families of which peft takes layers for experts that are none, where `target_modules` names them."""
WRAPPERS = ("gemma3", "llava")


ADAPTER = ("--model.adapter.rank", "2")


def sft(base: Path, run: Path, *more: str) -> int:
    """Supervised training with an adapter."""
    return few_steps(base, run, *ADAPTER, *more)


@pytest.mark.parametrize("label", READ_AS_EXPERTS)
def test_a_mixtures_adapter_is_the_same_model_in_peft(label: str, tmp_path: Path) -> None:
    base = saved(label, tmp_path / "base")
    assert sft(base, tmp_path / "run") == 0
    trained = loaded(tmp_path / "run").model
    assert apart(trained, read_by_peft(base, tmp_path / "run" / "adapter")) < 1e-4
    assert apart(trained, loaded(base).model) > 0.1


@pytest.mark.parametrize("label", WRAPPERS)
def test_an_adapter_over_a_wrapper_is_read_by_peft_and_by_every_command(label: str, tmp_path: Path) -> None:
    base, run = saved(label, tmp_path / "base"), tmp_path / "run"
    assert sft(base, run) == 0
    trained = loaded(run).model
    assert apart(trained, read_by_peft(base, run / "adapter")) < 1e-4
    assert apart(trained, loaded(base).model) > 0.1
    assert json.loads((run / "adapter" / "base_model.json").read_text())["sha256"]
    assert main(["doctor", "--model", str(run)]) == 0
    second = sft(run, tmp_path / "second")  # the flag of a new adapter means the one that is there, of the same rank
    assert second == 0
    assert apart(loaded(tmp_path / "second").model, read_by_peft(base, tmp_path / "second" / "adapter")) < 1e-4


def test_an_adapter_over_a_wrapper_that_names_layers_as_the_text_model_does_still_loads(tmp_path: Path) -> None:
    """As runs of earlier versions wrote them, once their user has written the base into adapter_config.json."""
    base, run = saved("gemma3", tmp_path / "base"), tmp_path / "run"
    assert sft(base, run) == 0
    written = load_file(run / "adapter" / WEIGHTS)
    expected = loaded(run).model
    older = {name.replace(".language_model.", "."): tensor for name, tensor in written.items()}
    assert older.keys() != written.keys()
    save_file(older, run / "adapter" / WEIGHTS)
    assert apart(loaded(run).model, expected) == 0


def test_default_targets_leave_out_what_peft_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, run = saved("mamba2", tmp_path / "base"), tmp_path / "run"
    assert sft(base, run) == 0
    assert apart(loaded(run).model, read_by_peft(base, run / "adapter")) < 1e-4
    named = ("--model.adapter.targets", "[in_proj, out_proj]")
    assert sft(base, tmp_path / "refused", *named) == 2
    said = capsys.readouterr().err
    mentions(said, "out_proj", "model.adapter.save: merged")
    assert not (tmp_path / "refused").exists()
    assert sft(base, tmp_path / "merged", *named, "--model.adapter.save", "merged") == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged" / "model")


def test_dropout_before_what_peft_takes_for_an_expert_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = saved("qwen3_moe with dense layers", tmp_path / "base")
    drops = ("--model.adapter.dropout", ".1")
    assert sft(base, tmp_path / "refused", *drops) == 2
    said = capsys.readouterr().err
    mentions(said, "model.adapter.dropout = 0.1", "save: merged")
    assert sft(base, tmp_path / "run", *drops, "--model.adapter.targets", "[q_proj, v_proj]") == 0
    assert apart(loaded(tmp_path / "run").model, read_by_peft(base, tmp_path / "run" / "adapter")) < 1e-4


def test_an_adapter_that_peft_would_not_find_layers_for_is_said_when_it_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, run = saved("gemma3", tmp_path / "base"), tmp_path / "run"
    monkeypatch.setattr(peft_format, "peft_name", lambda model, layer: layer)  # as the text model alone has it
    assert sft(base, run) == 1
    said = capsys.readouterr().err
    assert "peft would not load what was saved (the model has no linear layer model.layers.0." in said
    assert str(run / "adapter") in said


def wrapped(label: str, base: Path, kind: Any) -> Any:
    """The library's model of a family under an adapter of peft."""
    model = kind.from_pretrained(saved(label, base), dtype=torch.float32)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))


@pytest.mark.parametrize("label", ["gemma3", "llava"])
def test_untrained_layers_beside_the_text_part_of_a_wrapper_are_left_out(label: str, tmp_path: Path) -> None:
    model = wrapped(label, tmp_path / "base", AutoModelForImageTextToText)
    up = {name: each for name, each in model.named_parameters() if "lora_B" in name}
    for name, each in up.items():
        if ".language_model." in name:
            torch.nn.init.normal_(each, std=0.3)
    policy = as_policy(model, AutoTokenizer.from_pretrained(tmp_path / "base"))
    save_adapter(policy, tmp_path / "adapter")
    assert apart(loaded(tmp_path / "adapter").model, model) == 0
    assert apart(loaded(tmp_path / "adapter").model, loaded(tmp_path / "base").model) > 0.01
    next(each for name, each in up.items() if ".vision_tower." in name).data.fill_(1.0)
    save_adapter(policy, tmp_path / "adapter")
    with refused("its adapter has trained model.vision_tower", "Merge the adapter with peft"):
        loaded(tmp_path / "adapter")


def test_an_adapter_that_only_peft_reads_is_told_at_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = wrapped("qwen3_moe", tmp_path / "base", AutoModelForCausalLM)
    SFTTrainer(model, SFTConfig(str(tmp_path / "run")), train_dataset=[{"text": "1"}])
    said = capsys.readouterr().out
    mentions(said, "peft will read the adapter that is saved, and posttrain's commands will not", "gate.weight")
