"""The elementwise layers against their formulas, and their hand-written gradients against finite differences."""

import pytest
import torch
from torch.autograd import gradcheck

from posttrain.models.shared_prompt.fused import rms_norm, rotate, swiglu


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


@pytest.mark.parametrize("gradients", [True, False])
def test_the_gated_activation_is_its_formula(gradients: bool) -> None:
    gate_up = random(5, 6)
    with torch.set_grad_enabled(gradients):
        actual = swiglu(gate_up)
    gate, up = gate_up[:, :3], gate_up[:, 3:]
    torch.testing.assert_close(actual, gate / (1 + (-gate).exp()) * up, rtol=0, atol=1e-14)


def test_the_gradient_of_the_gated_activation_is_finite_differences() -> None:
    assert gradcheck(swiglu, (random(5, 6),))


def test_no_layer_writes_into_what_it_is_given() -> None:
    x, weight, (cos, sin) = random(5, 2, 8), random(8, seed=1), angles(5, 4)
    gate_up = random(5, 6, seed=2)
    given = [tensor.detach().clone() for tensor in (x, weight, cos, sin, gate_up)]
    out = rms_norm(x, weight, 0.1).sum() + rotate(x, cos, sin).square().sum() + swiglu(gate_up).sum()
    out.backward()
    for before, after in zip(given, (x, weight, cos, sin, gate_up), strict=True):
        assert torch.equal(before, after.detach())
