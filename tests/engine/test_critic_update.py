"""What a critic has for itself in an update: its own clipping, and what a new head begins with."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from posttrain.runs.progress import Clock
from tests.support.stages import Stages, stages_with


def ppo(**critic: object) -> dict[str, object]:
    return {"name": "ppo", "critic": {"fit_steps": 0, "rate_scale": 1.0, **critic}}


def test_the_critic_is_clipped_by_its_own_norm() -> None:
    """With a limit near 0 the critic stands still under plain gradient descent, and the policy moves as without."""

    def moved(**critic: float) -> tuple[float, float]:
        made = stages_with(ppo(**critic), epochs_per_step=1, minibatches_per_epoch=1)
        made.learner.actor_critic_state = replace(made.learner.actor_critic_state, begun=True)  # no first value
        head, policy = weights_of(made), parameters_to_vector(made.policy.model.parameters()).detach().clone()
        made.learner.optimizer = torch.optim.SGD(made.learner.optimizer.param_groups, lr=1e-2)
        made.learn(made.credited())
        now = parameters_to_vector(made.policy.model.parameters()).detach()
        return (weights_of(made) - head).norm().item(), (now - policy).norm().item()

    (free, policy), (held, same) = moved(), moved(max_grad_norm=1e-9)
    assert free > 1e-4
    assert held < 1e-9
    assert same == pytest.approx(policy, rel=1e-6)


def weights_of(made: Stages) -> Tensor:
    assert made.learner.critic is not None
    return parameters_to_vector(made.learner.critic.head.parameters()).detach().clone()


def test_a_new_head_expects_the_mean_of_what_was_scored() -> None:
    made = stages_with(ppo())
    assert made.learner.critic is not None
    step = made.collected()
    rewards = torch.tensor([[2.0, float("nan"), 4.0, float("nan")]], dtype=torch.float64)
    grades = replace(step.grades.select([0]), rewards=rewards, scores=rewards[None])
    found = made.learner.credit(replace(step, groups=step.groups[:1], grades=grades), Clock()).groups.columns.values
    torch.testing.assert_close(found, torch.full_like(found, 3.0), rtol=0, atol=1e-5)
