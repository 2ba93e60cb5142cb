"""Optimisers: a caller's own rates, weights that a step leaves where they are, and what is said of frozen ones."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from posttrain.algorithms.table import build_algorithm
from posttrain.errors import RunError
from posttrain.options.training import UpdateOptions
from posttrain.runs.checkpoint import Checkpoint
from posttrain.runs.tensor_state import frozen_digest, frozen_state, require_same_frozen
from posttrain.training.learner import Learner, LearnerSettings
from posttrain.training.optimizer import OwnOptimizer, next_rate, standing_still
from posttrain.training.session import trained_by_reward
from tests.support.refusals import refused
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


def rates_of(learner: Learner, updates: Iterable[int]) -> list[float]:
    return [next_rate(learner.settings.update, learner.own_optimizer, update, 6) for update in updates]


@pytest.mark.parametrize(
    ("scheduled", "rates"),
    [
        (True, [0.5**n for n in range(1, 7)]),  # the first update has the first rate
        (False, [0.5 * (6 - n) / 6 for n in range(6)]),  # the recipe's own rate, 8, is none of them
    ],
)
def test_every_update_has_its_rate_and_so_have_those_after_a_checkpoint(scheduled: bool, rates: list[float]) -> None:
    whole = learner_with(scheduled=scheduled)
    assert rates_of(whole, range(6)) == pytest.approx(rates)
    for step in range(3):
        trained = trained_by_reward(learner_with(scheduled=scheduled))
        saved = Checkpoint(step=step, path=Path("at"), tensors=trained.tensors(), state=trained.state(), made_with={})
        again = learner_with(scheduled=scheduled)
        trained_by_reward(again).restore(saved)
        assert rates_of(again, range(2 * step, 6)) == pytest.approx(rates[2 * step :])


@pytest.mark.parametrize(
    ("weights", "dtype", "rate", "share"),
    [
        # Below 1 numbers of 8 bits lie 2^-8 apart, so that 1 - rate is rounded to 1 for a rate below 2^-9.  The rule
        # asks for a whole spacing, eps · 2^(e-2) with e = 1 and eps = 2^-7: 2^-8, and a step of just that moves.
        ([1.0], torch.bfloat16, 2.0**-8, 0),
        ([1.0], torch.bfloat16, 2.0**-8 * 0.999, 1),
        # Of 1, 2, 4 and 0 it moves 1; from 2 on the spacing is twice as wide, and 0 always moves.
        ([1.0, 2.0, 4.0, 0.0], torch.bfloat16, 2.0**-8, 2 / 4),
        ([1.0, 1.0], torch.float32, 1e-30, 0),  # as wide as that, all count as moved
        ([1.0, 1.0], torch.float64, 1e-30, 0),
        ([], torch.bfloat16, 1e-3, 0),
    ],
)
def test_the_share_that_stands_still_is_of_trained_weights_that_a_step_rounds_back(
    weights: list[float], dtype: torch.dtype, rate: float, share: float
) -> None:
    trained = [nn.Parameter(torch.tensor(weights, dtype=dtype))] if weights else []
    frozen = [nn.Parameter(torch.full((12,), 4.0, dtype=dtype), requires_grad=False)] if weights else []
    assert standing_still([*trained, *frozen], rate) == share


def half_frozen() -> nn.Module:
    """Eight layers, of which the last alone learns."""
    module = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(8)))
    for number, layer in enumerate(module):
        layer.weight.data.fill_(number / 4)
        layer.weight.requires_grad_(number == 7)
    return module


def test_the_digest_is_of_every_frozen_tensor_in_the_order_of_names() -> None:
    expected = hashlib.sha256()
    for number in range(7):
        expected.update(f"{number}.weight torch.float32 [2, 2]\n".encode())
        expected.update(np.full((2, 2), number / 4, dtype=np.float32).tobytes())
    assert frozen_digest(half_frozen()) == expected.hexdigest()


def test_two_bases_are_told_by_name_and_digest_and_one_without_frozen_parts_by_that() -> None:
    first, second = half_frozen(), half_frozen()
    second[0].weight.data.add_(1)
    states = {name: frozen_state(module, name) for name, module in (("first", first), ("second", second))}
    short = {name: frozen_digest(module)[:16] for name, module in (("first", first), ("second", second))}
    require_same_frozen(states["first"], states["first"])
    said = f"with first .SHA-256 {short['first']}., but this is second .SHA-256 {short['second']}.\\."
    with pytest.raises(RunError, match=said):
        require_same_frozen(states["second"], states["first"])
    with refused("but this is a model without frozen parts.", error=RunError):
        require_same_frozen(frozen_state(nn.Linear(1, 1), "whole"), states["first"])
