"""Modules that learn beside each other: each at its own rate, and clipped by its own norm or by the one they share."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from posttrain.errors import UserError
from posttrain.models.policy import Policy
from posttrain.options.training import OptimizerOptions
from posttrain.runs import checkpoint
from posttrain.runs.tensor_state import optimizer_tensors, restore_optimizer
from posttrain.training.learner import Learner
from posttrain.training.optimizer import POLICY, ParameterGroup, apply_gradients, new_optimizer
from tests.support.refusals import refused
from tests.support.stages import Stages, stages_with
from tests.support.tiny import weights


def doubles(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def parameter(*numbers: float) -> nn.Parameter:
    return nn.Parameter(doubles(*numbers))


def two_modules(
    policy: list[nn.Parameter], head: list[nn.Parameter], limits: tuple[float | None, float | None] = (None, None)
) -> list[ParameterGroup]:
    return [
        ParameterGroup(module="policy", parameters=policy, max_grad_norm=limits[0]),
        ParameterGroup(module="value_head", parameters=head, rate_scale=0.5, max_grad_norm=limits[1]),
    ]


def test_each_module_is_clipped_by_its_own_norm_and_stepped_at_its_own_rate() -> None:
    policy, head = parameter(0, 0), parameter(0, 0)
    adam = new_optimizer(two_modules([policy], [head], (1.0, 1.0)), OptimizerOptions())
    optimizer = torch.optim.SGD([{**group, "lr": 123.0} for group in own_fields(adam)], lr=123.0)
    policy.grad, head.grad = doubles(3.0, 4.0), doubles(0.3, 0.4)
    norms = apply_gradients(optimizer, 0.1, 0.01)
    # 5 is scaled to 1, and 0.5 stays: both together would be 5.02, and neither.  Nobody shares the limit of 0.01.
    assert norms == pytest.approx({"policy": 5.0, "value_head": 0.5}, rel=1e-12)
    assert policy.tolist() == pytest.approx([-0.1 * 0.6, -0.1 * 0.8], rel=1e-6)  # torch divides by the norm plus 1e-6
    assert head.tolist() == pytest.approx([-0.05 * 0.3, -0.05 * 0.4], rel=1e-12)
    assert policy.grad is None
    assert head.grad is None


def own_fields(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    """The groups as they were given, for another kind of optimiser."""
    return [
        {name: group[name] for name in ("params", "module", "rate_scale", "max_grad_norm")}
        for group in optimizer.param_groups
    ]


def test_those_without_a_limit_share_one_and_are_clipped_as_one_vector() -> None:
    # Of "policy" and "head" together √(3² + 4² + 12²) = 13, scaled to 2; "critic" is scaled from 10 to 5 by itself.
    policy, head, critic = parameter(0, 0), parameter(0), parameter(0, 0)
    groups = [
        ParameterGroup(module="policy", parameters=[policy]),
        ParameterGroup(module="critic", parameters=[critic], max_grad_norm=5.0),
        ParameterGroup(module="head", parameters=[head]),
    ]
    optimizer = torch.optim.SGD(own_fields(new_optimizer(groups, OptimizerOptions())), lr=1.0)
    policy.grad, head.grad, critic.grad = doubles(3.0, 4.0), doubles(12.0), doubles(6.0, 8.0)
    norms = apply_gradients(optimizer, 1.0, 2.0)
    assert norms == pytest.approx({"policy": 5.0, "critic": 10.0, "head": 12.0}, rel=1e-12)
    assert policy.tolist() == pytest.approx([-3 * 2 / 13, -4 * 2 / 13], rel=1e-6)
    assert head.tolist() == pytest.approx([-12 * 2 / 13], rel=1e-6)
    assert critic.tolist() == pytest.approx([-3, -4], rel=1e-6)


@pytest.mark.parametrize(("limit", "moved"), [(13.5, 1.0), (6.5, 0.5)])
def test_how_a_model_is_cut_into_groups_changes_nothing_where_they_share_the_limit(limit: float, moved: float) -> None:
    whole, parts = [parameter(0, 0), parameter(0)], [parameter(0, 0), parameter(0)]
    cut = [ParameterGroup(module=name, parameters=[part]) for name, part in zip("ab", parts, strict=True)]
    for parameters, optimizer in (
        (whole, new_optimizer(whole, OptimizerOptions())),
        (parts, new_optimizer(cut, OptimizerOptions())),
    ):
        parameters[0].grad, parameters[1].grad = doubles(3.0, 4.0), doubles(12.0)
        norms = apply_gradients(torch.optim.SGD(own_fields(optimizer), lr=1.0), 1.0, limit)
        assert math.hypot(*norms.values()) == pytest.approx(13, rel=1e-12)
        assert [p.tolist() for p in parameters] == [
            pytest.approx([-3 * moved, -4 * moved], rel=1e-6),
            pytest.approx([-12 * moved], rel=1e-6),
        ]
    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))


def test_one_group_is_clipped_to_the_bit_as_torch_clips() -> None:
    random = torch.Generator().manual_seed(0)
    gradients = [torch.randn(3, 5, generator=random), torch.randn(7, generator=random)]
    ours, theirs = ([nn.Parameter(torch.zeros_like(each)) for each in gradients] for _ in range(2))
    for parameters in (ours, theirs):
        for each, gradient in zip(parameters, gradients, strict=True):
            each.grad = gradient.clone()
    norm = nn.utils.clip_grad_norm_(theirs, 0.5).item()
    optimizer = torch.optim.SGD(own_fields(new_optimizer(ours, OptimizerOptions())), lr=1.0)
    assert apply_gradients(optimizer, 1.0, 0.5) == {POLICY: norm}
    assert all(torch.equal(mine, -other.grad) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"rate_scale": -1.0}, "parameter group head: rate_scale = -1.0: use a finite number, 0 or more."),
        ({"rate_scale": math.inf}, "parameter group head: rate_scale = inf: use a finite number, 0 or more."),
        ({"max_grad_norm": 0.0}, "parameter group head: max_grad_norm = 0.0: use a finite number above 0 (1e9 never"),
        ({"max_grad_norm": math.inf}, "parameter group head: max_grad_norm = inf: use a finite number above 0"),
        ({"max_grad_norm": math.nan}, "parameter group head: max_grad_norm = nan: use a finite number above 0"),
    ],
)
def test_a_rate_or_a_limit_that_is_none_is_refused(option: dict[str, float], message: str) -> None:
    with pytest.raises(UserError) as raised:
        ParameterGroup(module="head", parameters=[], **option)
    assert str(raised.value).startswith(message)


def test_two_groups_of_one_name_or_with_one_parameter_are_refused() -> None:
    one, other = parameter(1, 2), parameter(1)
    named = [ParameterGroup(module="head", parameters=[each]) for each in (one, other)]
    with refused("parameter groups: 2 have the name 'head'; give each a name of its own."):
        new_optimizer(named, OptimizerOptions())
    with refused("a parameter of shape [2] is in 'policy' and in 'value_head'; it can be"):
        new_optimizer(two_modules([one], [other, one]), OptimizerOptions())


def cut_in_two(policy: Policy, **of_the_rest: float) -> list[ParameterGroup]:
    named = dict(policy.model.named_parameters())
    embedding = [name for name in named if "embed" in name]
    assert embedding
    return [
        ParameterGroup(module="embedding", parameters=[named[name] for name in embedding]),
        ParameterGroup(module="rest", parameters=[p for n, p in named.items() if n not in embedding], **of_the_rest),
    ]


def with_groups(stages: Stages, groups: list[ParameterGroup]) -> Stages:
    given = stages.learner
    made = Learner(stages.policy, given.algorithm, given.settings, parameter_groups=groups)
    return replace(stages, learner=made)


def test_a_learner_with_groups_that_share_the_limit_learns_as_one_without() -> None:
    plain, cut = stages_with(), stages_with()
    cut = with_groups(cut, cut_in_two(cut.policy))
    metrics, of_cut = plain.learn(plain.credited()), cut.learn(cut.credited())
    assert of_cut["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-12)
    assert math.hypot(of_cut["grad_norm/embedding"], of_cut["grad_norm/rest"]) == pytest.approx(metrics["grad_norm"])
    assert "grad_norm/policy" not in metrics
    torch.testing.assert_close(weights(cut.policy), weights(plain.policy), rtol=0, atol=1e-12)


def test_a_learners_groups_have_rates_of_their_own() -> None:
    stages = stages_with()
    groups = cut_in_two(stages.policy, rate_scale=0.0)
    stages = with_groups(stages, groups)
    before = {name: each.clone() for name, each in stages.policy.model.named_parameters()}
    stages.learn(stages.credited())
    moved = {name for name, each in stages.policy.model.named_parameters() if not torch.equal(each, before[name])}
    assert moved == {name for name in before if "embed" in name}


def test_a_parameter_that_no_group_trains_is_named() -> None:
    stages = stages_with()
    groups = cut_in_two(stages.policy)[:1]
    with refused("parameter groups: `model.layers.0.", "` is in none of them.  Put it in one, or"):
        with_groups(stages, groups)
    rest = [p for n, p in stages.policy.model.named_parameters() if "embed" not in n]
    for each in rest:
        each.requires_grad_(False)
    assert with_groups(stages, groups).learn(stages.credited())["num_updates"] == 1


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
    assert [(group["rate_scale"], group["max_grad_norm"]) for group in optimizer.param_groups] == [(1.0, None)]
    assert [each is trained for group in optimizer.param_groups for each in group["params"]] == [True]
    trained.grad = doubles(-2.0)
    assert apply_gradients(optimizer, 0.1, 1.0) == {POLICY: 2.0}


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
        del group["module"], group["rate_scale"], group["max_grad_norm"]
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
        return policy, head, new_optimizer(two_modules([policy], [head], (None, 0.25)), OptimizerOptions())

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
    assert [group["max_grad_norm"] for group in restored.param_groups] == [None, 0.25]
