"""An optimiser of the caller's: the rates of its groups, by the options' schedule or by a scheduler of its own."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from posttrain.algorithms.table import build_algorithm
from posttrain.options.training import UpdateOptions
from posttrain.runs.checkpoint import Checkpoint
from posttrain.training.learner import Learner, LearnerSettings
from posttrain.training.optimizer import OwnOptimizer
from posttrain.training.session import trained_by_reward
from tests.support.tiny import tiny_policy


def two_groups(first: float = 0.4, second: float = 0.1) -> torch.optim.SGD:
    one, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    return torch.optim.SGD([{"params": [one], "lr": first}, {"params": [other], "lr": second}])


def scales(own: OwnOptimizer) -> list[float]:
    return [group["rate_scale"] for group in own.optimizer.param_groups]


def test_without_a_scheduler_the_rates_are_shares_of_those_that_it_was_made_with() -> None:
    own = OwnOptimizer(optimizer=two_groups())
    assert own.set_rates(0.5) == pytest.approx(0.2)
    assert scales(own) == pytest.approx([1.0, 0.25])
    for group in own.optimizer.param_groups:
        group["lr"] = 9.0  # as an update leaves it
    assert own.set_rates(1.0) == pytest.approx(0.4)
    own.advance(3)  # there is nothing to advance
    assert own.set_rates(0.25) == pytest.approx(0.1)


def test_with_a_scheduler_they_are_the_scheduler_s() -> None:
    optimizer = two_groups()
    own = OwnOptimizer(optimizer=optimizer, scheduler=LambdaLR(optimizer, [lambda n: 1 / (1 + n), lambda n: 1.0]))
    assert own.set_rates(0.5) == pytest.approx(0.4)
    optimizer.step()
    own.advance()
    assert own.set_rates(0.5) == pytest.approx(0.2)
    assert scales(own) == pytest.approx([1.0, 0.5])
    own.advance(6)
    assert own.set_rates(0.5) == pytest.approx(0.1)  # .4 / 8 = .05 is the first's; the largest is the second's
    assert scales(own) == pytest.approx([0.5, 1.0])


def test_groups_that_all_stand_still_are_scaled_by_one() -> None:
    own = OwnOptimizer(optimizer=two_groups())
    assert own.set_rates(0.0) == 0.0
    assert scales(own) == [1.0, 1.0]


def learner_with(*, scheduled: bool) -> Learner:
    """Three steps of two updates with plain gradient descent at .5, by a scheduler or by the recipe's straight line."""
    policy = tiny_policy()
    optimizer = torch.optim.SGD(policy.model.parameters(), lr=0.5)
    scheduler = LambdaLR(optimizer, lambda n: 0.5**n) if scheduled else None
    update = UpdateOptions(learning_rate=8.0, schedule="linear", epochs_per_step=2)
    settings = LearnerSettings(update=update, max_completion_tokens=8, temperature=1.0, num_steps=3)
    own = OwnOptimizer(optimizer=optimizer, scheduler=scheduler)
    return Learner(policy, build_algorithm({"name": "grpo"}), settings, own_optimizer=own)


@pytest.mark.parametrize(
    ("scheduled", "rates"),
    [
        (True, [0.5**n for n in range(1, 7)]),  # the first update has the first rate
        (False, [0.5 * (6 - n) / 6 for n in range(6)]),  # the recipe's own rate, 8, is none of them
    ],
)
def test_every_update_has_its_rate_and_so_have_those_after_a_checkpoint(scheduled: bool, rates: list[float]) -> None:
    whole = learner_with(scheduled=scheduled)
    assert [whole.next_rate(update) for update in range(6)] == pytest.approx(rates)
    for step in range(3):
        first = learner_with(scheduled=scheduled)
        trained = trained_by_reward(first)
        tensors, state = trained.tensors(), trained.state()
        saved = Checkpoint(step=step, path=Path("at"), tensors=tensors, state=state, made_with={})
        again = learner_with(scheduled=scheduled)
        trained_by_reward(again).restore(saved)
        assert [again.next_rate(update) for update in range(2 * step, 6)] == pytest.approx(rates[2 * step :])
