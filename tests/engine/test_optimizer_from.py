"""An optimiser that another run goes on with, module by module: one of the two may have a critic."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from posttrain.options.training import UpdateOptions
from posttrain.runs import checkpoint
from posttrain.training.learner import Learner, LearnerSettings
from posttrain.training.optimizer import OwnOptimizer
from posttrain.training.session import trained_by_reward
from tests.support.refusals import refused
from tests.support.stages import Stages, stages_with
from tests.support.tiny import tiny_policy

GRPO = {"name": "grpo"}
PPO = {"name": "ppo", "critic": {"fit_steps": 0}}


def trained(algorithm: Mapping[str, object], folder: Path) -> Stages:
    """The stages of a run with one step, and its checkpoint in a folder."""
    stages = stages_with(algorithm)
    stages.learn(stages.credited())
    saved(stages.learner, folder)
    return stages


def saved(learner: Learner, folder: Path) -> None:
    folder.mkdir()
    trained = trained_by_reward(learner)
    checkpoint.save(folder / "checkpoints", 1, trained.tensors(), trained.state())


def moments(learner: Learner, module: str) -> list[Tensor]:
    """What the optimiser keeps of a module's parameters, in order."""
    state, groups = learner.optimizer.state, learner.optimizer.param_groups
    parameters = [each for group in groups if group["module"] == module for each in group["params"]]
    return [state[each][entry] for each in parameters if each in state for entry in ("step", "exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize(("before", "after"), [(GRPO, GRPO), (GRPO, PPO), (PPO, GRPO), (PPO, PPO)])
def test_moments_go_on_in_the_modules_that_both_train(
    before: Mapping[str, object], after: Mapping[str, object], tmp_path: Path
) -> None:
    first, second = trained(before, tmp_path / "run").learner, stages_with(after)
    second.learner.load_optimizer_state(str(tmp_path / "run"))
    for module in ("policy", "critic"):
        theirs, ours = moments(first, module), moments(second.learner, module)
        both = module == "policy" or before is after is PPO
        assert len(ours) == (len(theirs) if both else 0)
        assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs if both else [], strict=True))
    assert moments(second.learner, "policy")[0] >= 1
    counts = moments(second.learner, "policy")[0].item()
    metrics = second.learn(second.credited())
    assert moments(second.learner, "policy")[0].item() == counts + metrics["num_updates"]


def test_an_optimiser_of_another_kind_is_refused_and_none_of_ones_own_is_touched(tmp_path: Path) -> None:
    policy = tiny_policy()
    settings = LearnerSettings(update=UpdateOptions(), max_completion_tokens=8)
    stages = stages_with(GRPO)
    momentum = torch.optim.SGD(policy.model.parameters(), lr=0.1, momentum=0.9)
    own = Learner(policy, stages.learner.algorithm, settings, own_optimizer=OwnOptimizer(optimizer=momentum))
    matrices, others = ([p for p in policy.model.parameters() if (p.ndim >= 2) == wide] for wide in (True, False))
    two = torch.optim.SGD([{"params": matrices}, {"params": others}], lr=0.1, momentum=0.9)
    for each in policy.model.parameters():
        each.grad = torch.ones_like(each)
    two.step()
    saved(
        Learner(policy, stages.learner.algorithm, settings, own_optimizer=OwnOptimizer(optimizer=two)), tmp_path / "sgd"
    )
    with refused("update.optimizer_from", "momentum_buffer", "AdamW"):
        stages.learner.load_optimizer_state(str(tmp_path / "sgd"))
    with refused("update.optimizer_from", "AdamW"):
        own.load_optimizer_state(str(tmp_path / "sgd"))


def test_an_optimiser_of_other_parameters_is_refused(tmp_path: Path) -> None:
    trained(GRPO, tmp_path / "run")
    settings = LearnerSettings(update=UpdateOptions(), max_completion_tokens=8)
    narrow = tiny_policy()
    for each in list(narrow.model.parameters())[:2]:
        each.requires_grad_(False)
    learner = Learner(narrow, stages_with(GRPO).learner.algorithm, settings)
    with refused("update.optimizer_from", "`policy`", "parameters"):
        learner.load_optimizer_state(str(tmp_path / "run"))
