"""A frozen base in 4 bits: what it holds, its gradients, and the kernel that would break them in silence."""

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.models.adapters import adaptable
from posttrain.models.adapters.adaptable import (
    KERNEL,
    bitsandbytes,
    dequantized,
    is_4_bit,
    num_parameters,
    quantize,
)
from posttrain.models.adapters.in_force import merged_weights
from posttrain.models.adapters.lora import LoraLinear, lora_layers
from posttrain.models.policy import Policy
from posttrain.models.shared_prompt.linear import projection
from posttrain.options.model import ModelOptions
from tests.support.adapted import LORA, Pair, adapted_policy, completion_logprobs
from tests.support.refusals import refused
from tests.support.tiny import relative_distance, request, some_prompts, tiny_model

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


def test_weights_are_off_by_what_4_bits_explain() -> None:
    """NF4's levels are those of a normal distribution; uniform numbers are off by a tenth or so."""
    dense, packed = tiny_model("qwen3", torch.float32), tiny_model("qwen3", torch.float32)
    quantize(packed, torch.float32)
    for name, layer in packed.named_modules():
        if is_4_bit(layer):
            weight = dense.get_submodule(name).weight
            assert 0.02 < (dequantized(layer) - weight).abs().mean() / weight.abs().mean() < 0.15


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


@pytest.fixture
def kernel() -> Callable[[nn.Module], None]:
    if not bitsandbytes().nn.modules.has_avx512bf16():
        pytest.skip("this CPU has no AVX512-BF16, so that bitsandbytes packs nothing")

    def leave_on(model: nn.Module) -> None:
        for layer in layers_in_4_bits(model):
            setattr(layer, KERNEL, True)

    return leave_on


def test_with_the_kernel_left_on_the_gradient_after_sampling_is_another(kernel: Callable[[nn.Module], None]) -> None:
    """The trap itself: were it gone, the attribute could be left alone."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    library = bitsandbytes()
    for index, layer in enumerate(list(model)):
        made = adaptable.in_4_bits(library, layer, torch.bfloat16, packed_kernel=False)
        model[index] = LoraLinear(made, str(index), LORA, seed=0)
    with torch.no_grad():
        for layer in lora_layers(model).values():
            layer.lora_B.normal_(generator=torch.Generator().manual_seed(0))
    kernel(model)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)

    def of_first_layer() -> Tensor:
        model.zero_grad(set_to_none=True)
        model(x).float().square().sum().backward()
        return torch.cat([p.grad.flatten() for p in model[0].parameters() if p.requires_grad])

    model.train()
    before = of_first_layer()
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
    assert relative_distance(of_first_layer(), before) > 0.05


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
