"""Layers and output layer in C: gradients of the trainer in float64, the same bits on any number of threads."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from posttrain.algorithms.table import build_algorithm
from posttrain.models.forward import Completions, ForwardNeeds, SharedPromptForward
from posttrain.models.loading.description import policy_summary
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.logprobs import token_logprobs
from posttrain.models.model_outputs import OutputLayer
from posttrain.models.native import native_layers
from posttrain.models.native.native_layers import NativeForward, layers_refusal, training_forward
from posttrain.models.native.native_output import native_token_logprobs
from posttrain.models.policy import Policy
from posttrain.models.shared_prompt.fused import gradients_in_place
from posttrain.options.algorithm import CriticOptions
from posttrain.options.model import ModelOptions
from posttrain.training.critic import Critic
from posttrain.training.update import Objective
from tests.support.native_builds import BUILDS, use_build
from tests.support.refusals import mentions
from tests.support.tiny import (
    SIX,
    SIX_ADVANTAGES,
    batch_of,
    gradient_of_update,
    relative_distance,
    some_prompts,
    tiny_policy,
)

MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "heads 24 wide with norms": ("qwen3", {"hidden_size": 48, "intermediate_size": 80, "head_dim": 24}),
    "heads 128 wide, not grouped": (
        "qwen3",
        {"hidden_size": 32, "intermediate_size": 48, "head_dim": 128, "num_attention_heads": 2},
    ),
    "biases of all four": ("llama", {"hidden_size": 128, "intermediate_size": 112}),
    "wider than what is near": ("qwen3", {"hidden_size": 528, "intermediate_size": 560, "head_dim": 64}),
    "three heads share a key": ("qwen2", {"hidden_size": 96, "intermediate_size": 64, "num_attention_heads": 6}),
}
ROUNDING = 2e-6
"""Relative, of the gradient of a parameter in float32."""


@pytest.fixture(params=BUILDS)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The library as it is compiled for some CPU."""
    use_build(request.param, monkeypatch)
    return str(request.param)


def trained_natively(policy: Policy) -> Policy:
    torch.set_num_threads(1)
    policy = replace(policy, native_reason=None)
    assert layers_refusal(policy) is None
    return replace(policy, forward=training_forward(policy))


def uneven_batch(lengths: Sequence[int] = (1, 40, 25, 24, 3, 1, 1, 60), *, shared: bool = True) -> Completions:
    """Groups of 5, 2, none and 1; completions of one token have an empty branch."""
    dice = torch.Generator().manual_seed(0)
    prompts = [prompt.tokens for prompt in some_prompts((3, 33, 5, 1) if shared else range(1, len(lengths) + 1))]
    tokens = [tuple(torch.randint(0, 20, (length,), generator=dice).tolist()) for length in lengths]
    of = [0, 1, 0, 0, 3, 0, 1, 0] if shared else range(len(lengths))
    sampled = torch.rand(sum(lengths), generator=dice) < 0.8
    return Completions(prompts, tokens, of, sampled=sampled)


def gradients(policy: Policy, batch: Completions) -> dict[str, Tensor]:
    """Of a weighted sum of log-probs and of values, for every parameter."""
    policy.model.zero_grad(set_to_none=True)

    def head(hidden: Tensor) -> Tensor:
        return hidden @ torch.linspace(-1, 1, hidden.shape[1]).to(hidden)

    parts = policy.forward.completion_logprobs(batch, ForwardNeeds(temperature=0.8, values=head))
    assert parts.logprobs is not None
    assert parts.values is not None
    for which in (parts.logprobs, parts.values):
        dice = torch.Generator().manual_seed(1)
        weights = torch.rand(len(which), generator=dice, dtype=torch.float64) + 0.1
        (weights.to(which) * which).sum().backward(retain_graph=which is parts.logprobs)
    named = policy.model.named_parameters()
    return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


@pytest.mark.parametrize("shared", [True, False], ids=["shared prompts", "whole rows"])
@pytest.mark.parametrize("which", MODELS)
def test_gradients_are_those_of_the_trainer_in_float64(which: str, shared: bool, build: str) -> None:
    (family, shape), batch = MODELS[which], uneven_batch(shared=shared)
    exact = gradients(tiny_policy(family, **shape), batch)
    policy = tiny_policy(family, torch.float32, **shape)
    in_torch, found = gradients(policy, batch), gradients(trained_natively(policy), batch)
    assert found.keys() == exact.keys()
    for name, gradient in exact.items():
        # A key bias shifts all scores of a query alike: its exact gradient is 0.
        allowed = max(ROUNDING * gradient.norm().item(), 2 * (in_torch[name] - gradient).norm().item())
        assert (found[name] - gradient).norm().item() <= allowed, name


def test_threads_change_no_bit_of_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = trained_natively(load_policy(ModelOptions(path="bundled")))
    found = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(gradients(policy, uneven_batch()))
    for name, gradient in found[0].items():
        assert all(torch.equal(gradient, other[name]) for other in found[1:]), name


def test_it_is_as_near_to_float64_as_torch_is() -> None:
    policy = load_policy(ModelOptions(path="bundled"))
    double, batch = policy.copy(), uneven_batch()
    double.model.double()
    exact = gradients(replace(double, forward=SharedPromptForward(double.model, torch.float64)), batch)
    in_torch, found = gradients(policy, batch), gradients(trained_natively(policy), batch)

    def error(of: dict[str, Tensor]) -> float:
        vectors = [torch.cat([each[name].double().flatten() for name in exact]) for each in (of, exact)]
        return relative_distance(*vectors)

    assert error(found) <= max(1.5 * error(in_torch), ROUNDING)


def logprobs_and_gradients(
    of: Callable[[Tensor, Tensor, Tensor], Tensor], given: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Log-probs, and gradients of hidden states and matrix, of a weighted sum of log-probs."""
    hidden, matrix = (tensor.detach().clone().to(dtype).requires_grad_() for tensor in given[:2])
    logprobs = of(hidden, matrix, given[2])
    (logprobs * torch.linspace(-1, 2, len(logprobs), dtype=dtype)).sum().backward()
    assert hidden.grad is not None
    assert matrix.grad is not None
    return [logprobs.detach(), hidden.grad, matrix.grad]


def in_torch(hidden: Tensor, matrix: Tensor, targets: Tensor) -> Tensor:
    return token_logprobs(hidden, OutputLayer(matrix), targets, temperature=0.7)


def natively(hidden: Tensor, matrix: Tensor, targets: Tensor) -> Tensor:
    return native_token_logprobs(hidden, matrix, targets, 0.7)


def output_layer_case(tokens: int, hidden: int, vocab: int, *, spread: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(tokens)
    targets = torch.randint(0, vocab, (tokens,), generator=dice)
    targets[0], targets[-1] = vocab - 1, 0
    shown = torch.randn(tokens, hidden, generator=dice, dtype=torch.float64)
    return shown, spread * torch.randn(vocab, hidden, generator=dice, dtype=torch.float64), targets


@pytest.mark.parametrize(
    ("tokens", "hidden", "vocab"), [(1, 16, 5), (2, 48, 103), (300, 32, 997), (129, 16, 20_011)], ids=str
)
def test_an_output_layer_has_the_log_probs_and_gradients_of_torch(
    tokens: int, hidden: int, vocab: int, build: str
) -> None:
    case = output_layer_case(tokens, hidden, vocab)
    exact, other, found = (
        logprobs_and_gradients(of, case, dtype)
        for of, dtype in ((in_torch, torch.float64), (in_torch, torch.float32), (natively, torch.float32))
    )
    for name, right, by_torch, ours in zip(("log-probs", "hidden", "matrix"), exact, other, found, strict=True):
        allowed = max(ROUNDING * right.norm().item(), 2 * (by_torch - right).norm().item())
        assert (ours - right).norm().item() <= allowed, name


def test_threads_change_no_bit_of_an_output_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    case, found = output_layer_case(600, 32, 5_000), []
    for threads in (1, 2, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(logprobs_and_gradients(natively, case, torch.float32))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_large_logits_overflow_nothing_and_one_that_is_not_finite_is_seen() -> None:
    hidden, matrix, targets = output_layer_case(40, 16, 300, spread=200)
    exact = logprobs_and_gradients(in_torch, (hidden, matrix, targets), torch.float64)
    found = logprobs_and_gradients(natively, (hidden, matrix, targets), torch.float32)
    assert relative_distance(found[0].double(), exact[0]) < 1e-6
    matrix[299, 3] = torch.nan
    assert natively(hidden.float(), matrix.float(), targets).isnan().all()
    matrix[299, 3] = torch.inf
    finite = in_torch(hidden, matrix, targets).isfinite()
    assert 0 < finite.sum() < len(finite), "an infinite logit of either sign"
    assert torch.equal(natively(hidden.float(), matrix.float(), targets).isfinite(), finite)


def test_a_weight_of_many_tokens_has_the_gradient_of_torch() -> None:
    random = torch.Generator().manual_seed(0)
    dy, x = (torch.randn(700, width, generator=random, dtype=torch.float64) for width in (112, 48))
    dw, db = native_layers._weight_gradient(dy.float(), x.float(), with_bias=True)
    assert relative_distance(dw, dy.T @ x) < ROUNDING
    assert db is not None
    assert relative_distance(db, dy.sum(0)) < ROUNDING


@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
def test_a_gradient_in_place_is_added_to_what_is_there(contiguous: bool) -> None:
    hidden, matrix, targets = output_layer_case(50, 32, 200)
    expected = logprobs_and_gradients(natively, (hidden, matrix, targets), torch.float32)[2]
    kept = matrix.float() if contiguous else matrix.float().T.contiguous().T
    parameter = torch.nn.Parameter(kept)
    parameter.grad = torch.ones_like(parameter)
    shown = hidden.float().requires_grad_()
    with gradients_in_place():
        logprobs = natively(shown, parameter, targets)
    (logprobs * torch.linspace(-1, 2, 50)).sum().backward()
    assert relative_distance(parameter.grad - 1, expected) < 1e-5


def test_a_critic_of_its_own_is_trained_as_by_torch() -> None:
    policy = load_policy(ModelOptions(path="bundled"))
    found = []
    for each in (policy, replace(policy, native_reason=None)):
        critic = Critic(each, CriticOptions(trunk="own", head="mlp"), seed=0)
        assert critic.own_trunk is not None
        assert isinstance(training_forward(critic.trunk), NativeForward) == (each is not policy)
        torch.nn.init.constant_(critic.head.output.weight, 0.1)
        batch = batch_of(SIX, SIX_ADVANTAGES, build_algorithm({"name": "grpo"}))
        values = critic.values_of(batch)
        (values * torch.linspace(-1, 2, len(values))).sum().backward()
        gradient = {name: each.grad for name, each in critic.trunk.model.named_parameters() if each.grad is not None}
        found.append((values.detach(), gradient))
    (expected, of_torch), (values, of_kernel) = found
    assert relative_distance(values, expected) < 1e-5
    assert of_kernel.keys() == of_torch.keys()
    vectors = [torch.cat([each[name].flatten() for name in of_torch]) for each in (of_kernel, of_torch)]
    assert relative_distance(*vectors) < 2e-5


def test_an_update_with_a_kl_is_that_of_torch() -> None:
    family, shape = MODELS["heads 24 wide with norms"]
    policy = replace(tiny_policy(family, torch.float32, **shape), native_reason=None)
    algorithm = build_algorithm({"name": "grpo", "kl": {"coefficient": 0.3}})
    reference = torch.linspace(-3, -1, 13, dtype=torch.float64)
    batch = batch_of(SIX, SIX_ADVANTAGES, algorithm, reference_logprobs=reference)
    objective = Objective(algorithm=algorithm, temperature=1.0)
    found, metrics = gradient_of_update(policy, batch, objective, tokens_per_microbatch=12)
    expected, others = gradient_of_update(replace(policy, native_reason="the other way"), batch, objective)
    assert isinstance(training_forward(policy), NativeForward)
    assert relative_distance(found, expected) < 1e-5
    assert {name: metrics[name] for name in ("loss", "kl", "ratio/mean")} == pytest.approx(
        {name: others[name] for name in ("loss", "kl", "ratio/mean")}, rel=1e-5
    )


@pytest.mark.parametrize(
    "parts",
    [
        ("layers.0.mlp", "k_proj", "layers.1.input_layernorm"),
        ("gate_proj", "up_proj"),
        ("down_proj", "post_attention_layernorm"),
    ],
    ids=" ".join,
)
def test_a_frozen_parameter_gets_no_gradient_and_the_others_keep_theirs(parts: Sequence[str]) -> None:
    family, shape = MODELS["biases of all four"]
    policy = trained_natively(tiny_policy(family, torch.float32, **shape))
    whole = gradients(policy, uneven_batch())
    frozen = [name for name in whole if any(part in name for part in parts)]
    for name in frozen:
        policy.model.get_parameter(name).requires_grad_(False)
    found = gradients(policy, uneven_batch())
    assert found.keys() == whole.keys() - set(frozen)
    for name, gradient in found.items():
        assert torch.equal(gradient, whole[name]), name


def test_it_keeps_less_for_the_backward_pass_than_torch() -> None:
    policy = load_policy(ModelOptions(path="bundled"))

    def kept_bytes(policy: Policy) -> int:
        kept: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            policy.completion_logprobs(uneven_batch()).sum().backward()
        return sum(kept.values())

    assert kept_bytes(trained_natively(policy)) < kept_bytes(policy)


def test_what_it_trains_and_what_it_does_not_is_said() -> None:
    policy = replace(tiny_policy("qwen3", torch.float32), native_reason=None)
    mentions(str(layers_refusal(policy)), "16, 24, 32", "multiples of 16")
    assert training_forward(policy) is policy.forward
    mentions(str(layers_refusal(tiny_policy("qwen3"))), "engine.native is false")
    mentions(
        "\n".join(policy_summary(policy, "tiny")), "scored by the native kernel; its updates use torch: its widths"
    )
    bundled = replace(load_policy(ModelOptions(path="bundled")), native_reason=None)
    mentions("\n".join(policy_summary(bundled, "bundled")), "scored by the native kernel; its updates use it too")
