"""What an adapter computes, and what its gradients are: y = W·x + b + s·B·(A·x), dB = s·G·Aᵀ, dA = s·Bᵀ·G."""

import math

import pytest
import torch
from torch import Tensor, nn

from posttrain.models.adapters.adaptable import add_adapter, target_layers
from posttrain.models.adapters.in_force import adapter_off, adapter_tensors
from posttrain.models.adapters.lora import LoraLinear, lora_layers
from posttrain.options.model import ALL_LINEAR, AdapterOptions
from tests.support.adapted import LORA, Pair, adapted_policy, completion_logprobs
from tests.support.refusals import refused
from tests.support.tiny import flat_gradient, plain_logprobs, relative_distance, tiny_model, tiny_policy

EXAMPLES = [Pair((3, 9, 4), (7, 12, 8, 5)), Pair((2,), (6, 1, 5)), Pair((9, 9, 1, 0, 4), (8, 5))]
each_family = pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "gpt2_plain"])
each_forward = pytest.mark.parametrize("forward", ["auto", "plain"])


def merged_by_hand(family: str, layers: dict[str, LoraLinear]) -> nn.Module:
    """The model with W + s·B·A in place of every W."""
    model = tiny_model(family, torch.float64, exact=False).eval()
    with torch.no_grad():
        for name, layer in layers.items():
            change = layer.scale * layer.lora_B @ layer.lora_A
            weight = model.get_submodule(name).weight
            weight += change.T if family == "gpt2_plain" else change
    return model


def test_a_layer_adds_the_scaled_product_of_its_two_matrices() -> None:
    base = nn.Linear(5, 4, dtype=torch.float64)
    layer = LoraLinear(base, "here", AdapterOptions(rank=2, alpha=6), seed=0)
    with torch.no_grad():
        layer.lora_B.normal_()
    x = torch.randn(3, 7, 5, dtype=torch.float64)
    expected = base(x) + 6 / 2 * torch.einsum("or,ri,bti->bto", layer.lora_B, layer.lora_A, x)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


@each_family
@each_forward
def test_log_probs_are_those_of_the_merged_model(family: str, forward: str) -> None:
    policy = adapted_policy(family, dtype=torch.float64, forward=forward)
    assert (policy.forward_reason is None) == (forward == "auto" and family != "gpt2_plain")
    merged = merged_by_hand(family, lora_layers(policy.model))
    expected = torch.cat([plain_logprobs(merged, e.prompt, e.completion) for e in EXAMPLES])
    # The library's norms and angles are in float32 whatever the model's type.
    torch.testing.assert_close(completion_logprobs(policy, EXAMPLES), expected, rtol=0, atol=1e-5)
    assert (expected - completion_logprobs(tiny_policy(family), EXAMPLES)).abs().max() > 0.1


@each_forward
def test_gradients_are_those_of_the_dense_model_projected(forward: str) -> None:
    policy = adapted_policy(dtype=torch.float64, forward=forward)
    layers = lora_layers(policy.model)
    completion_logprobs(policy, EXAMPLES).sum().backward()
    merged = merged_by_hand("qwen3", layers)
    dense = {name: merged.get_submodule(name).weight for name in layers}
    torch.cat([plain_logprobs(merged, e.prompt, e.completion) for e in EXAMPLES]).sum().backward()
    for name, layer in layers.items():
        gradient = dense[name].grad
        assert relative_distance(layer.lora_B.grad, layer.scale * gradient @ layer.lora_A.T) < 1e-5, name
        assert relative_distance(layer.lora_A.grad, layer.scale * layer.lora_B.T @ gradient) < 1e-5, name


def test_both_forward_passes_give_the_same_gradients_with_some_layers_unadapted() -> None:
    options = AdapterOptions(rank=2, targets=("q_proj", "v_proj", "up_proj"))
    both = [adapted_policy(options=options, dtype=torch.float64, forward=forward) for forward in ("auto", "plain")]
    for policy in both:
        completion_logprobs(policy, EXAMPLES).sum().backward()
    assert relative_distance(*map(flat_gradient, both)) < 1e-6


def test_the_frozen_base_gets_no_gradient() -> None:
    policy = adapted_policy()
    completion_logprobs(policy, EXAMPLES).sum().backward()
    with_gradient = {name for name, parameter in policy.model.named_parameters() if parameter.grad is not None}
    assert with_gradient == set(adapter_tensors(policy.model))


@each_family
@each_forward
def test_with_the_adapter_off_the_model_is_its_base_to_the_bit(family: str, forward: str) -> None:
    policy = adapted_policy(family, forward=forward)
    base = adapted_policy(family, forward=forward, filled=False)
    with torch.no_grad():
        on = completion_logprobs(policy, EXAMPLES)
        with adapter_off(policy.model):
            off = completion_logprobs(policy, EXAMPLES)
        own = tiny_model(family, torch.float32, exact=False).eval()
        plain = torch.cat([plain_logprobs(own, e.prompt, e.completion) for e in EXAMPLES])
        with adapter_off(base.model):
            assert torch.equal(off, completion_logprobs(base, EXAMPLES))
        assert torch.equal(completion_logprobs(policy, EXAMPLES), on)
    torch.testing.assert_close(off, plain, rtol=0, atol=1e-5)
    assert (on - off).abs().max() > 0.1


def test_with_b_at_zero_training_starts_from_the_base() -> None:
    policy = adapted_policy(filled=False)
    assert all(not bool(layer.lora_B.any()) for layer in lora_layers(policy.model).values())
    with torch.no_grad():
        on = completion_logprobs(policy, EXAMPLES)
        with adapter_off(policy.model):
            assert torch.equal(on, completion_logprobs(policy, EXAMPLES))


def test_rank_alpha_and_rslora_decide_shape_and_scale() -> None:
    for rank, alpha, rslora, scale in ((4, 32, False, 8.0), (16, 32, False, 2.0), (16, 32, True, 8.0)):
        layer = LoraLinear(nn.Linear(6, 5), "x", AdapterOptions(rank=rank, alpha=alpha, rslora=rslora), seed=0)
        assert layer.scale == scale
        assert (layer.lora_A.shape, layer.lora_B.shape) == ((rank, 6), (5, rank))


def test_adapter_weights_are_float32_over_a_base_in_bfloat16() -> None:
    layer = LoraLinear(nn.Linear(6, 5, dtype=torch.bfloat16), "x", LORA, seed=0)
    assert {layer.lora_A.dtype, layer.lora_B.dtype} == {torch.float32}
    assert layer(torch.ones(2, 6, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_is_drawn_as_peft_draws_it() -> None:
    """kaiming_uniform_ with a = √5 over fan-in n is uniform within ±√(6 / ((1 + 5) n)) = ±1/√n."""
    drawn = LoraLinear(nn.Linear(64, 5), "x", AdapterOptions(rank=256), seed=0).lora_A.detach()
    assert drawn.abs().max() <= 1 / 8
    assert drawn.std().item() == pytest.approx(1 / 8 / math.sqrt(3), rel=0.02)
    assert drawn.mean().abs() < 2e-3


def test_a_layer_s_draw_depends_on_the_seed_and_its_name_alone() -> None:
    def draws(seed: int, *targets: str) -> dict[str, Tensor]:
        policy = adapted_policy(options=AdapterOptions(rank=2, targets=targets), seed=seed, filled=False)
        return {name: each for name, each in adapter_tensors(policy.model).items() if name.endswith("lora_A")}

    some, more, others = draws(0, "q_proj"), draws(0, "q_proj", "o_proj"), draws(1, "q_proj")
    assert some.keys() < more.keys()
    for name, matrix in some.items():
        assert torch.equal(matrix, more[name])
        assert not torch.equal(matrix, others[name])
    first, second = some.values()
    assert not torch.equal(first, second)


MEANT = {(ALL_LINEAR,): 14, ("q_proj", "v_proj"): 4, ("mlp.down_proj",): 2, ("model.layers.1.self_attn.q_proj",): 1}
MEANT |= {("*.layers.0.*",): 7, ("*",): 14}


@pytest.mark.parametrize("targets", MEANT)
def test_targets_are_names_endings_patterns_or_all_linear_layers_but_the_output_layer(targets) -> None:
    model = tiny_model("qwen3", exact=False)
    add_adapter(model, AdapterOptions(targets=targets), seed=0)
    assert len(lora_layers(model)) == MEANT[targets]
    assert type(model.lm_head) is nn.Linear
    trained = {name.rpartition(".")[2] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"lora_A", "lora_B"}


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("q_porj", "targets: q_porj…Did you mean q_proj"),
        ("wqkv_x", "There are: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
        ("lm_head", "lm_head is a Linear, which has no adapter"),
        ("embed_tokens", "model.embed_tokens is a Embedding, which has no adapter"),
    ],
)
def test_a_target_that_is_no_layer_is_told_with_those_that_are_near(target: str, says: str) -> None:
    with refused(says):
        target_layers(tiny_model("qwen3", exact=False), ("q_proj", target))


def test_code_that_reads_the_matrix_of_an_adapted_layer_itself_is_refused() -> None:
    layer = LoraLinear(nn.Linear(3, 3), "mixer.dt_proj", LORA, seed=0)
    with refused("reads the matrix of mixer.dt_proj itself", "Name other layers"):
        layer.weight.sum()


@pytest.mark.parametrize(
    ("given", "says"), [({"alpha": math.inf}, "alpha = inf"), ({"targets": ()}, "targets = []…all-linear")]
)
def test_an_option_that_makes_no_sense_is_refused(given: dict[str, object], says: str) -> None:
    with refused(says):
        AdapterOptions(**given)
