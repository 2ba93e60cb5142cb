"""The elementwise layers against their formulas, and their hand-written gradients against finite differences."""

import pytest
import torch
from torch.autograd import gradcheck

from posttrain.models.shared_prompt.fused import GELU_TANH, SILU, Activation, gated, rms_norm, rotate


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    numbers = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return numbers.requires_grad_()


def angles(tokens: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin, [token 1 width], of as many different angles."""
    theta = torch.arange(1, tokens * half + 1, dtype=torch.float64).view(tokens, 1, half) / 3
    return theta.cos().repeat(1, 1, 2), torch.cat([-theta.sin(), theta.sin()], dim=-1)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("weight_shape", [(6,), (3, 6)])
def test_rms_norm_is_its_formula(weight_shape: tuple[int, ...], gradients: bool) -> None:
    x, weight = random(4, 3, 6), random(*weight_shape, seed=1)
    with torch.set_grad_enabled(gradients):
        actual = rms_norm(x, weight, 0.1)
    expected = weight * x / (x.square().sum(-1, keepdim=True) / 6 + 0.1).sqrt()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("weight_shape", [(6,), (3, 6)])
def test_the_gradients_of_rms_norm_are_finite_differences(weight_shape: tuple[int, ...]) -> None:
    assert gradcheck(lambda x, weight: rms_norm(x, weight, 0.1), (random(4, 3, 6), random(*weight_shape, seed=1)))


@pytest.mark.parametrize("gradients", [True, False])
def test_rotation_turns_each_pair_as_a_complex_number(gradients: bool) -> None:
    x, (cos, sin) = random(5, 2, 8), angles(5, 4)
    with torch.set_grad_enabled(gradients):
        actual = rotate(x, cos, sin)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.complex(cos[..., :4], sin[..., 4:])
    torch.testing.assert_close(actual, torch.cat([turned.real, turned.imag], dim=-1), rtol=0, atol=1e-14)


def test_the_gradient_of_rotation_is_finite_differences() -> None:
    cos, sin = angles(3, 2)
    assert gradcheck(lambda x: rotate(x, cos, sin), (random(3, 2, 4),))


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + (-x).exp())


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Hendrycks & Gimpel 2016, arXiv:1606.08415, §2."""
    return x / 2 * (1 + ((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh())


FORMULAS = {"silu": (SILU, silu), "gelu_tanh": (GELU_TANH, gelu_tanh)}


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", FORMULAS)
def test_the_gated_activation_is_its_formula(name: str, gradients: bool) -> None:
    gate_up, (activation, formula) = random(5, 6), FORMULAS[name]
    with torch.set_grad_enabled(gradients):
        actual = gated(gate_up, activation)
    torch.testing.assert_close(actual, formula(gate_up[:, :3]) * gate_up[:, 3:], rtol=0, atol=1e-14)


@pytest.mark.parametrize("activation", [SILU, GELU_TANH], ids=["silu", "gelu_tanh"])
def test_the_gradient_of_the_gated_activation_is_finite_differences(activation: Activation) -> None:
    assert gradcheck(lambda gate_up: gated(gate_up, activation), (random(5, 6),))


def test_a_head_may_be_turned_in_its_first_part_alone() -> None:
    x, (cos, sin) = random(5, 2, 8), angles(5, 2)
    out = rotate(x, cos, sin)
    assert torch.equal(out[..., 4:], x[..., 4:])
    assert torch.equal(out[..., :4], rotate(x[..., :4], cos, sin))
    assert gradcheck(lambda x: rotate(x, cos, sin), (x,))


def test_a_norm_of_bfloat16_is_rounded_once_before_its_weight_and_once_after() -> None:
    # As the model's own norm does it; were the mean taken in bfloat16, the first would be .4 % off.
    x, weight = random(64, 96).bfloat16().detach(), random(96, seed=1).bfloat16().detach()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            actual = rms_norm(x, weight, 1e-6)
        assert actual.dtype == torch.bfloat16
        assert torch.equal(actual, exact.bfloat16() * weight)


def test_the_gradient_of_a_norm_of_bfloat16_is_off_by_its_rounding_alone() -> None:
    x, weight = random(64, 96).bfloat16().detach().requires_grad_(), random(96, seed=1).bfloat16().detach()
    grad = random(64, 96, seed=2).bfloat16().detach()
    rms_norm(x, weight, 1e-6).backward(grad)
    exact = x.detach().double().requires_grad_()
    (exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()).backward(grad.double())
    assert x.grad is not None
    assert exact.grad is not None
    assert (x.grad.double() - exact.grad).norm() <= 2**-8 * exact.grad.norm()


def test_no_layer_writes_into_what_it_is_given() -> None:
    x, weight, (cos, sin) = random(5, 2, 8), random(8, seed=1), angles(5, 4)
    gate_up = random(5, 6, seed=2)
    given = [tensor.detach().clone() for tensor in (x, weight, cos, sin, gate_up)]
    out = rms_norm(x, weight, 0.1).sum() + rotate(x, cos, sin).square().sum() + gated(gate_up, SILU).sum()
    out.backward()
    for before, after in zip(given, (x, weight, cos, sin, gate_up), strict=True):
        assert torch.equal(before, after.detach())
