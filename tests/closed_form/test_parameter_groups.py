"""Modules that learn beside each other: each at its own rate, and clipped by its own norm or by the one they share."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from posttrain.models.policy import Policy
from posttrain.options.training import OptimizerOptions
from posttrain.runs import checkpoint
from posttrain.runs.tensor_state import optimizer_tensors, restore_optimizer
from posttrain.training.learner import Learner
from posttrain.training.optimizer import POLICY, ParameterGroup, apply_gradients, new_optimizer
from tests.support.refusals import refused
from tests.support.sequences import doubles
from tests.support.stages import Stages, stages_with
from tests.support.tiny import weights

Parameters = list[nn.Parameter]


def parameter(*numbers: float) -> nn.Parameter:
    return nn.Parameter(doubles(*numbers))


def groups_of(**parameters: nn.Parameter) -> list[ParameterGroup]:
    return [ParameterGroup(module=name, parameters=[each]) for name, each in parameters.items()]


def two_modules(policy: Parameters, head: Parameters, limits: tuple = (None, None)) -> list[ParameterGroup]:
    return [
        ParameterGroup(module="policy", parameters=policy, max_grad_norm=limits[0]),
        ParameterGroup(module="value_head", parameters=head, rate_scale=0.5, max_grad_norm=limits[1]),
    ]


def descended(groups: list[ParameterGroup] | Parameters, gradients: list[Tensor], rate: float, limit: float) -> dict:
    """Apply gradients by plain descent, in the groups that an optimiser of ours would have; the norms."""
    adam = new_optimizer(groups, OptimizerOptions())
    fields = ("params", "module", "rate_scale", "max_grad_norm")
    optimizer = torch.optim.SGD([{name: each[name] for name in fields} for each in adam.param_groups], lr=123.0)
    parameters = [each for group in groups for each in (group.parameters if hasattr(group, "parameters") else [group])]
    for each, gradient in zip(parameters, gradients, strict=True):
        each.grad = gradient.clone()
    norms = apply_gradients(optimizer, rate, limit)
    assert {each.grad for each in parameters} == {None}
    return norms


def test_each_module_is_clipped_by_its_own_norm_and_stepped_at_its_own_rate() -> None:
    policy, head = parameter(0, 0), parameter(0, 0)
    modules = two_modules([policy], [head], (1.0, 1.0))
    # 5 is scaled to 1, and 0.5 stays: both together would be 5.02, and neither.  Nobody shares the limit of 0.01.
    norms = descended(modules, [doubles(3.0, 4.0), doubles(0.3, 0.4)], 0.1, 0.01)
    assert norms == pytest.approx({"policy": 5.0, "value_head": 0.5}, rel=1e-12)
    assert policy.tolist() == pytest.approx([-0.1 * 0.6, -0.1 * 0.8], rel=1e-6)  # torch divides by the norm plus 1e-6
    assert head.tolist() == pytest.approx([-0.05 * 0.3, -0.05 * 0.4], rel=1e-12)


def test_those_without_a_limit_share_one_and_are_clipped_as_one_vector() -> None:
    # Of "policy" and "head" together √(3² + 4² + 12²) = 13, scaled to 2; "critic" is scaled from 10 to 5 by itself.
    policy, critic, head = parameter(0, 0), parameter(0, 0), parameter(0)
    groups = groups_of(policy=policy, critic=critic, head=head)
    groups[1] = replace(groups[1], max_grad_norm=5.0)
    norms = descended(groups, [doubles(3.0, 4.0), doubles(6.0, 8.0), doubles(12.0)], 1.0, 2.0)
    assert norms == pytest.approx({"policy": 5.0, "critic": 10.0, "head": 12.0}, rel=1e-12)
    assert [*policy.tolist(), *head.tolist()] == pytest.approx([-6 / 13, -8 / 13, -24 / 13], rel=1e-6)
    assert critic.tolist() == pytest.approx([-3, -4], rel=1e-6)


@pytest.mark.parametrize(("limit", "moved"), [(13.5, 1.0), (6.5, 0.5)])
def test_how_a_model_is_cut_into_groups_changes_nothing_where_they_share_the_limit(limit: float, moved: float) -> None:
    whole, (a, b) = [parameter(0, 0), parameter(0)], (parameter(0, 0), parameter(0))
    for groups in (whole, groups_of(a=a, b=b)):
        norms = descended(groups, [doubles(3.0, 4.0), doubles(12.0)], 1.0, limit)
        assert math.hypot(*norms.values()) == pytest.approx(13, rel=1e-12)
    assert [*a.tolist(), *b.tolist()] == pytest.approx([-3 * moved, -4 * moved, -12 * moved], rel=1e-6)
    assert all(torch.equal(one, other) for one, other in zip(whole, (a, b), strict=True))


def test_one_group_is_clipped_to_the_bit_as_torch_clips() -> None:
    random = torch.Generator().manual_seed(0)
    gradients = [torch.randn(3, 5, generator=random), torch.randn(7, generator=random)]
    ours, theirs = ([nn.Parameter(torch.zeros_like(each)) for each in gradients] for _ in range(2))
    for each, gradient in zip(theirs, gradients, strict=True):
        each.grad = gradient.clone()
    norm = nn.utils.clip_grad_norm_(theirs, 0.5).item()
    assert descended(ours, gradients, 1.0, 0.5) == {POLICY: norm}
    assert all(torch.equal(mine, -other.grad) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("option", "rule"),
    [
        ({"rate_scale": -1.0}, "at least 0."),
        ({"rate_scale": math.inf}, "at least 0."),
        ({"max_grad_norm": 0.0}, "above 0 (1e9 never"),
        ({"max_grad_norm": math.inf}, "above 0"),
        ({"max_grad_norm": math.nan}, "above 0"),
    ],
)
def test_a_rate_or_a_limit_that_is_none_is_refused(option: dict[str, float], rule: str) -> None:
    ((name, value),) = option.items()
    with refused(f"parameter group head: {name} = {value}: must be a finite number", rule):
        ParameterGroup(module="head", parameters=[], **option)


def test_two_groups_of_one_name_or_with_one_parameter_are_refused() -> None:
    one, other = parameter(1, 2), parameter(1)
    with refused("parameter groups: 2 have the name 'head'.  Give each a unique name."):
        new_optimizer([*groups_of(head=one), *groups_of(head=other)], OptimizerOptions())
    with refused("a parameter of shape [2] is in 'policy' and in 'value_head'.  Put it in only one"):
        new_optimizer(two_modules([one], [other, one]), OptimizerOptions())


def cut_in_two(policy: Policy, **of_the_rest: float) -> list[ParameterGroup]:
    named = dict(policy.model.named_parameters())
    parts = [[each for name, each in named.items() if ("embed" in name) == embeds] for embeds in (True, False)]
    assert parts[0]
    return [
        ParameterGroup(module="embedding", parameters=parts[0]),
        ParameterGroup(module="rest", parameters=parts[1], **of_the_rest),
    ]


def with_groups(stages: Stages, groups: list[ParameterGroup]) -> Stages:
    given = stages.learner
    return replace(stages, learner=Learner(stages.policy, given.algorithm, given.settings, parameter_groups=groups))


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
    stages = with_groups(stages, cut_in_two(stages.policy, rate_scale=0.0))
    before = {name: each.clone() for name, each in stages.policy.model.named_parameters()}
    stages.learn(stages.credited())
    moved = {name for name, each in stages.policy.model.named_parameters() if not torch.equal(each, before[name])}
    assert moved == {name for name in before if "embed" in name}


def test_a_parameter_that_no_group_trains_is_named() -> None:
    stages = stages_with()
    embedding, rest = cut_in_two(stages.policy)
    with refused("parameter groups: `model.layers.0.", "` is in none of them.  Put it in one, or"):
        with_groups(stages, [embedding])
    for each in rest.parameters:
        each.requires_grad_(False)
    assert with_groups(stages, [embedding]).learn(stages.credited())["num_updates"] == 1


def stepped(optimizer: torch.optim.Optimizer, parameters: Parameters, *gradients: Tensor, limit: float = 1.0) -> dict:
    for each, gradient in zip(parameters, gradients, strict=True):
        each.grad = gradient.clone()
    return apply_gradients(optimizer, 0.1, limit)


def test_the_first_step_of_adam_is_the_rate_of_each_module() -> None:
    # m̂/√v̂ = g/|g| after one step, for ε is far below the gradient.
    policy, head = parameter(1, 1), parameter(1, 1)
    optimizer = new_optimizer(two_modules([policy], [head]), OptimizerOptions(weight_decay=0.0))
    stepped(optimizer, [policy, head], doubles(3.0, -4.0), doubles(-0.3, 0.4), limit=math.inf)
    assert policy.tolist() == pytest.approx([0.9, 1.1], abs=1e-6)
    assert head.tolist() == pytest.approx([1.05, 0.95], abs=1e-6)


def test_a_module_decays_at_its_own_rate_in_its_matrices_alone() -> None:
    # θ ← θ (1 - rate · decay): 1 - .1 · .5 and 1 - .05 · .5.
    matrices, vectors = [parameter([1]), parameter([1])], [parameter(1), parameter(1)]
    modules = two_modules([matrices[0], vectors[0]], [matrices[1], vectors[1]])
    optimizer = new_optimizer(modules, OptimizerOptions(weight_decay=0.5))
    stepped(optimizer, [*matrices, *vectors], *(torch.zeros_like(each) for each in (*matrices, *vectors)))
    assert [each.item() for each in matrices] == pytest.approx([0.95, 0.975], rel=1e-12)
    assert [each.item() for each in vectors] == [1, 1]


@pytest.mark.parametrize("broken", [0, 1])
def test_a_module_whose_gradient_is_no_number_keeps_every_module_where_it_is(broken: int) -> None:
    modules, gradients = [parameter(1, 2), parameter(3, 4)], [doubles(1, 1), doubles(1, 1)]
    optimizer = new_optimizer(two_modules([modules[0]], [modules[1]]), OptimizerOptions())
    gradients[broken][1] = math.inf
    norms = stepped(optimizer, modules, *gradients)
    assert [math.isfinite(norm) for norm in norms.values()] == [broken == 1, broken == 0]
    assert [each.tolist() for each in modules] == [[1, 2], [3, 4]]


def test_parameters_alone_are_the_policys_and_frozen_ones_nobodys() -> None:
    trained, frozen = parameter(1), parameter(1)
    frozen.requires_grad_(False)
    optimizer = new_optimizer([trained, frozen], OptimizerOptions())
    (group,) = optimizer.param_groups
    assert (group["module"], group["rate_scale"], group["max_grad_norm"]) == (POLICY, 1.0, None)
    assert [each is trained for each in group["params"]] == [True]
    assert stepped(optimizer, [trained], doubles(-2.0)) == {POLICY: 2.0}


def gone_on_with(made, steps: list[list[Tensor]], folder: Path, *, older: bool = False) -> tuple:
    """The optimiser and parameters after the last step, taken at once and from a checkpoint before it."""
    (parameters, optimizer), (again, restored) = made(), made()
    for gradients in steps[:-1]:
        stepped(optimizer, parameters, *gradients)
    tensors, options = optimizer_tensors(optimizer)
    for group in options["param_groups"] if older else ():
        del group["module"], group["rate_scale"], group["max_grad_norm"]
    checkpoint.save(folder, 2, {"optimizer": tensors}, options)
    saved = checkpoint.load_latest(folder)
    restore_optimizer(restored, saved.tensors["optimizer"], saved.state)
    for mine, theirs in zip(again, parameters, strict=True):
        mine.data.copy_(theirs.data)
    stepped(restored, again, *steps[-1])
    stepped(optimizer, parameters, *steps[-1])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(again, parameters, strict=True))
    return restored.param_groups


def test_a_state_that_was_saved_before_there_were_modules_is_gone_on_from(tmp_path: Path) -> None:
    def fresh() -> tuple[Parameters, torch.optim.AdamW]:
        parameters = [parameter([1, 1], [1, 1]), parameter(1, 1)]
        return parameters, new_optimizer(parameters, OptimizerOptions(weight_decay=0.1))

    steps = [[torch.full((2, 2), number).double(), torch.full((2,), -number).double()] for number in (0.3, -0.2, 0.5)]
    groups = gone_on_with(fresh, steps, tmp_path, older=True)
    assert [group["module"] for group in groups] == [POLICY] * 2


def test_modules_are_saved_with_their_rates(tmp_path: Path) -> None:
    def fresh() -> tuple[Parameters, torch.optim.AdamW]:
        policy, head = parameter(1, 1), parameter(1, 1)
        return [policy, head], new_optimizer(two_modules([policy], [head], (None, 0.25)), OptimizerOptions())

    groups = gone_on_with(fresh, [[doubles(0.3, -0.4), doubles(3.0, 4.0)]] * 2, tmp_path)
    assert [(group["rate_scale"], group["max_grad_norm"]) for group in groups] == [(1.0, None), (0.5, 0.25)]
