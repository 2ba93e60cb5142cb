"""Which layers and experts adapters go on, what is said of others; values against autograd, files against peft."""

import importlib
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
from posttrain.models.adapters.adaptable import (
    KERNEL,
    adaptable_layers,
    add_adapter,
    bitsandbytes,
    dequantized,
    expert_matrices,
    is_4_bit,
    linear_layers,
    num_parameters,
    quantize,
    target_layers,
)
from posttrain.models.adapters.in_force import adapter_off, adapter_tensors, merged_weights
from posttrain.models.adapters.lora import LoraExperts, lora_layers
from posttrain.models.adapters.peft_format import write_adapter
from posttrain.models.loading.construction import hold_frozen_in
from posttrain.models.loading.description import adapter_lines
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.memory.memory_parts import MemorySetup, trained_parameters
from posttrain.models.memory.model_shape import shape_of
from posttrain.models.policy import Policy, as_policy
from posttrain.models.shared_prompt.linear import projection
from posttrain.options.model import AdapterOptions, ModelOptions
from posttrain.options.training import SftOptions
from posttrain.records import Example, TokenSequence
from posttrain.training.sft.sft_run import accumulate_examples
from tests.support.adapted import Pair, adapted_policy, completion_logprobs
from tests.support.every_family import small_model
from tests.support.refusals import refused
from tests.support.runs import records
from tests.support.tiny import relative_distance, request, some_prompts, tiny_model, tokenizer

SHAPES = True
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
        theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
        assert (logits(theirs) - expected).abs().max() <= 1e-5
        again = load_policy(ModelOptions(path=str(tmp_path / "adapter"), device="cpu")).model
        read, made = ({n: t.tolist() for n, t in adapter_tensors(each).items()} for each in (again, model))
        assert read == made
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
    lines = records(tmp_path / "run" / "metrics.jsonl")
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
    with refused("experts: the model has no experts"):
        add_adapter(small_model("llama"), AdapterOptions(targets=("experts",)), seed=0)


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
    said = "\n".join(adapter_lines(as_policy(model, tokenizer()), SftOptions()))
    assert f"all-linear is {share} of the matrix weights" in said
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


pytest.importorskip("bitsandbytes")
EXAMPLES = [Pair((3, 9, 4), (7, 12, 8, 5)), Pair((2,), (6, 1, 5))]
each_forward = pytest.mark.parametrize("forward", ["auto", "plain"])


def layers_in_4_bits(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if is_4_bit(module)]


def gradient(policy: Policy) -> Tensor:
    policy.model.zero_grad(set_to_none=True)
    completion_logprobs(policy, EXAMPLES).sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.requires_grad])


def test_every_linear_layer_but_the_output_layer_is_in_nf4_with_quantised_scales() -> None:
    policy = adapted_policy(nf4=True)
    layers = layers_in_4_bits(policy.model)
    assert len(layers) == 14
    assert type(policy.model.lm_head) is nn.Linear
    state = layers[0].weight.quant_state
    assert (state.quant_type, state.blocksize, state.nested) == ("nf4", 64, True)
    assert layers[0].weight.data.numel() == layers[0].in_features * layers[0].out_features // 2
    assert num_parameters(policy.model) == num_parameters(adapted_policy().model)


def test_beside_a_layer_in_4_bits_a_dense_one_is_read_as_it_is() -> None:
    model = tiny_model("qwen3", torch.float32)
    quantize(model, torch.float32)
    attention = model.model.layers[0].self_attn
    dense = nn.Linear(attention.q_proj.in_features, 5, bias=False).requires_grad_(False)
    x = torch.linspace(-1, 1, 3 * attention.q_proj.in_features).view(3, -1)
    expected = torch.cat([x @ dequantized(attention.q_proj).T, dense(x)], dim=1)
    both = projection([attention.q_proj, dense], torch.float32).product(x)
    torch.testing.assert_close(both, expected, rtol=0, atol=1e-6)


@each_forward
def test_values_and_gradients_are_those_of_the_dequantised_model(forward: str) -> None:
    policy, dense = adapted_policy(nf4=True, forward=forward), adapted_policy(forward=forward)
    for name, layer in lora_layers(policy.model).items():
        dense.model.get_submodule(name).base_layer.weight.data.copy_(dequantized(layer.base_layer))
    with torch.no_grad():
        expected, actual = (completion_logprobs(each, EXAMPLES) for each in (dense, policy))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    assert relative_distance(gradient(policy), gradient(dense)) < 1e-5


@each_forward
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_the_gradient_before_sampling_is_the_gradient_after_it(forward: str, compute: str) -> None:
    policy = adapted_policy(nf4=True, forward=forward, compute=compute)
    before = gradient(policy)
    sample_groups(InProcessEngine(policy), some_prompts([3, 7]), request())
    with torch.no_grad():
        policy.model(input_ids=torch.tensor([[1, 2, 3]]))  # an evaluation by somebody's own code
    assert torch.equal(gradient(policy), before)


def test_the_packed_kernel_is_for_inference_in_bfloat16_alone() -> None:
    for inference in (False, True):
        model = tiny_model("qwen3", torch.float32)
        quantize(model, torch.bfloat16, packed_kernel=inference)
        here = bitsandbytes().nn.modules.has_avx512bf16()
        assert {getattr(layer, KERNEL) for layer in layers_in_4_bits(model)} == {inference and here}


def test_a_merged_model_is_the_policy_over_dequantised_weights() -> None:
    policy = adapted_policy(nf4=True)
    plain = tiny_model("qwen3", torch.float32, exact=False)
    plain.load_state_dict(merged_weights(policy.model, torch.float32))
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(input_ids=ids).logits, policy.model(input_ids=ids).logits, rtol=0, atol=1e-5)


def test_the_base_is_not_touched_by_merging() -> None:
    policy = adapted_policy()
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    for _ in range(3):
        merged_weights(policy.model, torch.float32)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.model.state_dict().items())


def test_without_bitsandbytes_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(importlib.import_module("sys").modules, "bitsandbytes", None)
    with refused("quantization = nf4: bitsandbytes is not installed", "posttrain[qlora]"):
        quantize(tiny_model("qwen3", torch.float32), torch.float32)


def test_4_bits_without_an_adapter_or_without_linear_layers_are_refused() -> None:
    with refused("quantization = nf4 keeps weights in 4 bits, which cannot be trained"):
        ModelOptions(quantization="nf4")
    with refused("family (gpt2) has no torch.nn.Linear"):
        quantize(tiny_model("gpt2_plain", torch.float32), torch.float32)
