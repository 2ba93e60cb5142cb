"""Adapters on the experts of mixtures: values and gradients against plain autograd, and files against peft."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM, PreTrainedModel

import posttrain
from posttrain.cli import main
from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.models.adapters.adaptable import add_adapter, expert_matrices
from posttrain.models.adapters.in_force import adapter_off, adapter_tensors, merged_weights
from posttrain.models.adapters.lora import LoraExperts, lora_layers
from posttrain.models.adapters.peft_format import write_adapter
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.policy import as_policy
from posttrain.options.model import AdapterOptions, ModelOptions
from posttrain.training.update import group_logprobs
from tests.support.every_family import small_model
from tests.support.refusals import refused
from tests.support.tiny import request, some_prompts, tokenizer

FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "llama4_text", "jetmoe", "deepseek_v3")
"""gpt_oss keeps inputs before outputs; jetmoe has one array a module; deepseek_v3 has dense layers too."""
BOTH = AdapterOptions(rank=3, alpha=5.0, targets=("all-linear", "experts"))
ROWS = torch.tensor([[1, 2, 3, 4, 5, 6, 7], [8, 7, 6, 5, 4, 3, 2]])


def adapted(family: str, options: AdapterOptions = BOTH) -> PreTrainedModel:
    """A small model with an adapter that does something: both of its matrices are random."""
    model = small_model(family)
    add_adapter(model, options, seed=1)
    stream = torch.Generator().manual_seed(2)
    for layer in lora_layers(model).values():
        layer.lora_B.data = 0.3 * torch.randn(layer.lora_B.shape, generator=stream)
    return model


def logits(model: nn.Module) -> Tensor:
    out: Tensor = model(input_ids=ROWS, use_cache=False).logits
    return out


def changed_by_hand(layer: LoraExperts, down: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """W_e + s·B_e·A_e, an expert at a time: rows e·r … e·r + r of A, columns e, e + E, … of B, as in peft."""
    rank, number = layer.options.rank, len(weight)
    changes = [up[:, expert::number] @ down[expert * rank : (expert + 1) * rank] for expert in range(number)]
    return torch.stack(
        [w + layer.scale * (c.T if layer.inputs_first else c) for w, c in zip(weight, changes, strict=True)]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_explicit_weights(family: str) -> None:
    only = AdapterOptions(rank=3, alpha=5.0, targets=("experts",))
    model, plain = adapted(family, only).double(), small_model(family).double()
    for each in (model, plain):
        each.set_experts_implementation("eager")  # the only one of the library that computes in float64
    wrappers = [layer for layer in lora_layers(model).values() if isinstance(layer, LoraExperts)]
    assert {layer.name for layer in wrappers} == set(expert_matrices(plain))
    weights, leaves = dict(plain.named_parameters()), {}
    explicit = dict(weights)
    for layer in wrappers:
        down, up = (each.detach().clone().requires_grad_() for each in (layer.lora_A, layer.lora_B))
        leaves[layer.name] = (down, up)
        explicit[layer.name] = changed_by_hand(layer, down, up, weights[layer.name].detach())
    ours = logits(model)
    expected = functional_call(plain, explicit, kwargs={"input_ids": ROWS, "use_cache": False}).logits
    assert (ours - expected).abs().max() <= 1e-12
    direction = torch.randn(ours.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (ours * direction).sum().backward()
    (expected * direction).sum().backward()
    for layer in wrappers:
        for mine, leaf in zip((layer.lora_A, layer.lora_B), leaves[layer.name], strict=True):
            assert mine.grad is not None
            assert (mine.grad - leaf.grad).norm() <= 1e-10 * leaf.grad.norm()
            assert leaf.grad.norm() > 0
    with adapter_off(model), torch.no_grad():
        assert torch.equal(logits(model), logits(plain))


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_transformers_and_we_read_what_is_saved(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, base = adapted(family), tmp_path / "base"
    small_model(family).save_pretrained(base)
    tokenizer().save_pretrained(base)
    model.config.name_or_path = str(base)
    model.name_or_path = str(base)
    write_adapter(model, tmp_path / "adapter")
    with torch.no_grad():
        expected = logits(model)
        theirs = logits(
            peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
        )
        assert (theirs - expected).abs().max() <= 1e-5
        again = load_policy(ModelOptions(path=str(tmp_path / "adapter"), device="cpu")).model
        assert {name: t.tolist() for name, t in adapter_tensors(again).items()} == {
            name: t.tolist() for name, t in adapter_tensors(model).items()
        }
        assert torch.equal(logits(again), expected)
        alone = small_model(family)
        alone.load_state_dict(merged_weights(model, None))
        assert (logits(alone) - expected).abs().max() <= 1e-5


def test_what_peft_has_saved_with_target_parameters_is_read(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    small_model("mixtral").save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    given = peft.LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=["experts.down_proj", "experts.gate_up_proj"]
    )
    made = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), given)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    made.save_pretrained(tmp_path / "adapter")
    again = load_policy(ModelOptions(path=str(tmp_path / "adapter"), device="cpu")).model
    with torch.no_grad():
        assert (logits(again) - logits(made)).abs().max() <= 1e-5


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_sampler_runs_through_the_adapters_of_experts(family: str) -> None:
    policy = as_policy(adapted(family), tokenizer())
    groups = sample_groups(InProcessEngine(policy), some_prompts([3, 7]), request())
    sampled = torch.tensor([each for group in groups for rollout in group.rollouts for each in rollout.logprobs])
    alone = small_model(family)
    alone.load_state_dict(merged_weights(policy.model, None))
    for trained in (policy, as_policy(alone, tokenizer())):
        found = group_logprobs(trained, groups, temperature=1.0, max_tokens=60).float()
        torch.testing.assert_close(sampled, found, rtol=0, atol=2e-5)


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_supervised_run_learns_adapters_of_experts_and_doctor_opens_what_it_leaves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recomputes: bool
) -> None:
    small_model("qwen3_moe").save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    model = {"path": str(tmp_path / "base"), "adapter": {"rank": 2, "targets": ["all-linear", "experts"]}}
    config = posttrain.load_recipe(
        "own-sft",
        kind=posttrain.SftConfig,
        model={**model, "gradient_checkpointing": recomputes, "device": "cpu"},
        task={"held_out_share": 0},
        sft={"max_length": 32, "rows_per_batch": 2, "num_epochs": None, "learning_rate": 3e-2},
        run={"folder": str(tmp_path / "run"), "num_steps": 6, "threads": 1},
    )
    text = tokenizer().decode([5, 9, 3, 7, 12, 8, 9, 4])
    posttrain.train_sft(config, rows=[{"text": text}, {"text": text[::-1]}])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0] - 0.1
    settings = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert settings["target_parameters"] == sorted(expert_matrices(small_model("qwen3_moe")))
    capsys.readouterr()
    assert main(["doctor", "--model", str(tmp_path / "run")]) == 0
    saved = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert all(tensor.abs().max() > 0 for name, tensor in saved.items() if "experts" in name and "lora_B" in name)


def test_dropout_on_experts_and_experts_of_a_dense_model_are_refused() -> None:
    with refused("dropout = 0.1 is not supported on experts"):
        AdapterOptions(targets=("experts",), dropout=0.1)
    with refused("experts: the model has none"):
        add_adapter(small_model("llama"), AdapterOptions(targets=("experts",)), seed=0)
