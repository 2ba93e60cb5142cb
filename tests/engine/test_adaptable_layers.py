"""Which layers of a family adapters go on by default, and what is said of those that have none, experts among them."""

from pathlib import Path

import pytest
import torch

from posttrain.models.adapters.adaptable import (
    adaptable_layers,
    add_adapter,
    expert_matrices,
    linear_layers,
    target_layers,
)
from posttrain.models.adapters.lora import lora_layers
from posttrain.models.loading.construction import hold_frozen_in
from posttrain.models.loading.description import adapter_lines
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.memory.memory_parts import MemorySetup, trained_parameters
from posttrain.models.memory.model_shape import shape_of
from posttrain.models.policy import as_policy
from posttrain.options.model import AdapterOptions, ModelOptions
from posttrain.options.training import SftOptions
from posttrain.records import Example, TokenSequence
from posttrain.training.sft.sft_run import accumulate_examples
from tests.support.every_family import small_model
from tests.support.refusals import refused
from tests.support.tiny import tokenizer

LEFT_OUT = {
    "llama4_text": {"feed_forward.router"},  # gives scores and logits, a pair
    "phimoe": {"mlp.router"},
    "hunyuan_v1_moe": {"mlp.gate.wg"},  # is read by the router around it
    "jamba": {"mamba.dt_proj"},  # is multiplied by hand
    "falcon": set(),  # a subclass with a forward pass that is the product after all
    "qwen3_moe": set(),
}


@pytest.mark.parametrize("family", LEFT_OUT)
def test_by_default_adapters_go_on_the_layers_that_can_have_one_and_the_others_are_named(family: str) -> None:
    model = small_model(family)
    linear = set(linear_layers(model))
    add_adapter(model, AdapterOptions(rank=2), seed=0)
    without = {name for name in linear if name not in lora_layers(model)}
    assert {name.partition("layers.")[2].partition(".")[2] for name in without} == LEFT_OUT[family]
    policy = as_policy(model, tokenizer())
    accumulate_examples(
        policy, [Example(TokenSequence(tokens=(1, 2, 3, 4, 5), sampled=(False, True, True, True, True)))], 64
    )
    # B is zero, so that A has no gradient yet; every B must have one, or the adapter is beside a layer of no effect.
    assert all(layer.lora_B.grad is not None for layer in lora_layers(model).values())
    said = "\n".join(adapter_lines(policy, SftOptions()))
    for name in LEFT_OUT[family]:
        assert f"{name} (" in said


def test_a_layer_that_cannot_have_an_adapter_is_refused_by_name() -> None:
    with refused("router is a Llama4Router, which has no adapter"):
        target_layers(small_model("llama4_text"), ("router",))


def test_what_all_linear_reaches_of_a_mixture_is_said_and_4_bits_of_less_than_half_are_refused(tmp_path: Path) -> None:
    model = small_model("mixtral")
    linear = sum(layer.weight.numel() for layer in adaptable_layers(model).values())
    experts = sum(matrix.numel() for matrix in expert_matrices(model).values())
    assert shape_of(model).expert_parameters == experts
    share = f"{linear / (linear + experts):.0%}"
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    asked = ModelOptions(path=str(tmp_path), quantization="nf4", adapter=AdapterOptions(rank=2), device="cpu")
    with refused("model.quantization", share):
        load_policy(asked)
    over_experts = MemorySetup(adapter_rank=2, adapts_experts=True)
    planned = trained_parameters(shape_of(model), over_experts)
    add_adapter(model, AdapterOptions(rank=2), seed=0)
    assert f"all-linear is {share} of the matrix weights" in "\n".join(
        adapter_lines(as_policy(model, tokenizer()), SftOptions())
    )
    other = small_model("mixtral")
    add_adapter(other, AdapterOptions(rank=2, targets=("all-linear", "experts")), seed=0)
    assert planned == sum(each.numel() for each in other.parameters() if each.requires_grad)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "llama4_text", "jetmoe", "qwen3_moe"])
def test_frozen_experts_are_held_in_bfloat16_and_give_what_products_in_it_give(family: str) -> None:
    model = small_model(family)
    for matrix in model.parameters():  # as a folder stores them, so that no bit is lost
        matrix.data = matrix.data.bfloat16().float()
    rows = torch.arange(8)[None] % 20
    model.set_experts_implementation("eager")  # whose products are all those of autocast
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = model(input_ids=rows).logits
        model.requires_grad_(False)
        hold_frozen_in(model, torch.bfloat16)
        after = model(input_ids=rows).logits
    assert {matrix.dtype for matrix in expert_matrices(model).values()} == {torch.bfloat16}
    assert torch.equal(before, after)
