"""Modules that learn beside each other: each at its own rate, and clipped by its own norm."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from posttrain.options.training import OptimizerOptions
from posttrain.runs import checkpoint
from posttrain.runs.tensor_state import optimizer_tensors, restore_optimizer
from posttrain.training.optimizer import POLICY, ParameterGroup, apply_gradients, new_optimizer


def doubles(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def parameter(*numbers: float) -> nn.Parameter:
    return nn.Parameter(doubles(*numbers))


def two_modules(policy: list[nn.Parameter], head: list[nn.Parameter]) -> list[ParameterGroup]:
    return [
        ParameterGroup(module="policy", parameters=policy),
        ParameterGroup(module="value_head", parameters=head, rate_scale=0.5),
    ]


def test_each_module_is_clipped_by_its_own_norm_and_stepped_at_its_own_rate() -> None:
    policy, head = parameter(0, 0), parameter(0, 0)
    adam = new_optimizer(two_modules([policy], [head]), OptimizerOptions())
    optimizer = torch.optim.SGD([{**group, "lr": 123.0} for group in own_fields(adam)], lr=123.0)
    policy.grad, head.grad = doubles(3.0, 4.0), doubles(0.3, 0.4)
    norms = apply_gradients(optimizer, 0.1, 1.0)
    # 5 is scaled to 1, and 0.5 stays: both together would be 5.02, and neither.
    assert norms == pytest.approx({"policy": 5.0, "value_head": 0.5}, rel=1e-12)
    assert policy.tolist() == pytest.approx([-0.1 * 0.6, -0.1 * 0.8], rel=1e-6)  # torch divides by the norm plus 1e-6
    assert head.tolist() == pytest.approx([-0.05 * 0.3, -0.05 * 0.4], rel=1e-12)
    assert policy.grad is None
    assert head.grad is None


def own_fields(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    """The groups as they were given, for another kind of optimiser."""
    return [{name: group[name] for name in ("params", "module", "rate_scale")} for group in optimizer.param_groups]


def test_the_first_step_of_adam_is_the_rate_of_each_module() -> None:
    # m̂/√v̂ = g/|g| after one step, for ε is far below the gradient.
    policy, head = parameter(1, 1), parameter(1, 1)
    optimizer = new_optimizer(two_modules([policy], [head]), OptimizerOptions(weight_decay=0.0))
    policy.grad, head.grad = doubles(3.0, -4.0), doubles(-0.3, 0.4)
    apply_gradients(optimizer, 0.1, math.inf)
    assert policy.tolist() == pytest.approx([0.9, 1.1], abs=1e-6)
    assert head.tolist() == pytest.approx([1.05, 0.95], abs=1e-6)


def test_a_module_decays_at_its_own_rate_in_its_matrices_alone() -> None:
    # θ ← θ (1 - rate · decay): 1 - .1 · .5 and 1 - .05 · .5.
    matrices = [nn.Parameter(torch.ones(1, 1, dtype=torch.float64)) for _ in range(2)]
    vectors = [parameter(1), parameter(1)]
    modules = two_modules([matrices[0], vectors[0]], [matrices[1], vectors[1]])
    optimizer = new_optimizer(modules, OptimizerOptions(weight_decay=0.5))
    for each in (*matrices, *vectors):
        each.grad = torch.zeros_like(each)
    apply_gradients(optimizer, 0.1, 1.0)
    assert [each.item() for each in matrices] == pytest.approx([0.95, 0.975], rel=1e-12)
    assert [each.item() for each in vectors] == [1, 1]


@pytest.mark.parametrize("broken", [0, 1])
def test_a_module_whose_gradient_is_no_number_keeps_every_module_where_it_is(broken: int) -> None:
    modules = parameter(1, 2), parameter(3, 4)
    optimizer = new_optimizer(two_modules([modules[0]], [modules[1]]), OptimizerOptions())
    for each in modules:
        each.grad = torch.ones_like(each)
    modules[broken].grad[1] = math.inf
    norms = apply_gradients(optimizer, 0.1, 1.0)
    assert [math.isfinite(norm) for norm in norms.values()] == [broken == 1, broken == 0]
    assert [each.tolist() for each in modules] == [[1, 2], [3, 4]]


def test_parameters_alone_are_the_policys_and_frozen_ones_nobodys() -> None:
    trained, frozen = parameter(1), parameter(1)
    frozen.requires_grad_(False)
    optimizer = new_optimizer([trained, frozen], OptimizerOptions())
    assert [group["module"] for group in optimizer.param_groups] == [POLICY]
    assert [group["rate_scale"] for group in optimizer.param_groups] == [1.0]
    assert [each is trained for group in optimizer.param_groups for each in group["params"]] == [True]
    trained.grad = doubles(-2.0)
    assert apply_gradients(optimizer, 0.1, 1.0) == {POLICY: 2.0}


# What was saved.


def stepped(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
    for each, gradient in zip(parameters, gradients, strict=True):
        each.grad = gradient.clone()
    apply_gradients(optimizer, 0.1, 1.0)


GRADIENTS = [[torch.full((2, 2), number).double(), torch.full((2,), -number).double()] for number in (0.3, -0.2, 0.5)]


def fresh() -> tuple[list[nn.Parameter], torch.optim.AdamW]:
    parameters = [nn.Parameter(torch.ones(2, 2, dtype=torch.float64)), parameter(1, 1)]
    return parameters, new_optimizer(parameters, OptimizerOptions(weight_decay=0.1))


def test_a_state_that_was_saved_before_there_were_modules_is_gone_on_from(tmp_path: Path) -> None:
    parameters, optimizer = fresh()
    for gradients in GRADIENTS[:2]:
        stepped(optimizer, parameters, gradients)
    tensors, options = optimizer_tensors(optimizer)
    for group in options["param_groups"]:
        del group["module"], group["rate_scale"]
    checkpoint.save(tmp_path, 2, {"optimizer": tensors}, options)
    saved = checkpoint.load_latest(tmp_path)

    again, restored = fresh()
    restore_optimizer(restored, saved.tensors["optimizer"], saved.state)
    for mine, theirs in zip(again, parameters, strict=True):
        mine.data.copy_(theirs.data)
    stepped(restored, again, GRADIENTS[2])
    stepped(optimizer, parameters, GRADIENTS[2])
    assert [group["module"] for group in restored.param_groups] == [POLICY] * 2
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(again, parameters, strict=True))


def test_modules_are_saved_with_their_rates(tmp_path: Path) -> None:
    def made() -> tuple[nn.Parameter, nn.Parameter, torch.optim.AdamW]:
        policy, head = parameter(1, 1), parameter(1, 1)
        return policy, head, new_optimizer(two_modules([policy], [head]), OptimizerOptions())

    policy, head, optimizer = made()
    gradients = [doubles(0.3, -0.4), doubles(3.0, 4.0)]
    stepped(optimizer, [policy, head], gradients)
    tensors, options = optimizer_tensors(optimizer)
    checkpoint.save(tmp_path, 1, {"optimizer": tensors}, options)
    saved = checkpoint.load_latest(tmp_path)
    again, head_again, restored = made()
    restore_optimizer(restored, saved.tensors["optimizer"], saved.state)
    again.data.copy_(policy.data)
    head_again.data.copy_(head.data)
    for each, parameters in ((optimizer, [policy, head]), (restored, [again, head_again])):
        stepped(each, parameters, gradients)
    assert torch.equal(again, policy)
    assert torch.equal(head_again, head)
    assert [group["rate_scale"] for group in restored.param_groups] == [1.0, 0.5]
