"""What actor-critics remember from step to step: the KL's coefficient, and when the critic has learned alone enough."""

import json

import pytest

from posttrain.algorithms.table import build_algorithm
from posttrain.errors import RunError
from posttrain.training.actor_critic_state import (
    COMPLETION_KL,
    EXPLAINED,
    NO_STATE,
    TOKEN_KL,
    ActorCriticState,
    after_step,
    at_first,
    restored,
    state_json,
)
from tests.support.refusals import refused

KL = {"coefficient": 0.5, "estimator": "k1", "place": "reward"}


def ppo(**options: object):
    return build_algorithm({"name": "ppo", **options})


def test_nothing_is_remembered_of_a_row_that_has_nothing_to() -> None:
    assert at_first(build_algorithm({"name": "grpo"}), begun=False) == NO_STATE
    assert state_json(NO_STATE, build_algorithm({"name": "grpo"})) == {}


def test_a_critic_that_may_learn_alone_begins_so() -> None:
    assert not at_first(ppo(critic={"fit_steps": 1}), begun=False).fitted
    assert at_first(ppo(critic={"fit_steps": 0}), begun=False).fitted
    assert at_first(ppo(baseline="none"), begun=False).fitted
    assert at_first(ppo(kl=KL), begun=True) == ActorCriticState(kl_coefficient=0.5, begun=True, fitted=False)


@pytest.mark.parametrize(("per", "expected"), [("sequence", 0.5 * 1.02), ("token", 0.5 * 0.98)])
def test_the_coefficient_follows_the_kl_that_the_target_is_of(per: str, expected: float) -> None:
    """20 of 200 completions; the completion's KL is far above the target of 1 and the token's far below it."""
    algorithm = ppo(baseline="none", kl=KL, adaptive_kl={"target": 1.0, "per": per, "horizon": 200.0})
    after = after_step(at_first(algorithm, begun=False), {COMPLETION_KL: 9.0, TOKEN_KL: 0.1}, 20, algorithm)
    assert after.kl_coefficient == pytest.approx(expected)


def test_the_critic_learns_alone_until_it_explains_something_or_its_steps_are_over() -> None:
    algorithm = ppo(critic={"fit_steps": 2})
    begun = at_first(algorithm, begun=False)
    assert after_step(begun, {EXPLAINED: 0.1}, 20, algorithm).fitted
    once = after_step(begun, {EXPLAINED: -0.1}, 20, algorithm)
    assert (once.fitted, once.fit_steps) == (False, 1)
    twice = after_step(once, {}, 20, algorithm)  # rewards that are all alike say nothing
    assert (twice.fitted, twice.fit_steps) == (False, 2)
    assert after_step(twice, {EXPLAINED: -0.1}, 20, algorithm).fitted
    done = ActorCriticState(fitted=True)
    assert after_step(done, {EXPLAINED: -9.0}, 20, algorithm) == done


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"critic": {"fit_steps": 0}},
        {"baseline": "none", "kl": KL, "adaptive_kl": {"target": 1.0}},
        {"baseline": "none", "reward_scaling": {}},
    ],
    ids=["critic", "critic without warm-up", "adaptive KL", "scaling"],
)
def test_a_checkpoint_that_does_not_say_what_was_remembered_is_refused(options: dict[str, object]) -> None:
    algorithm = ppo(**options)
    first = at_first(algorithm, begun=False)
    with refused("the checkpoint does not say what ppo remembered", error=RunError):
        restored({}, first, algorithm)
    for state in (first, NO_STATE, ActorCriticState(kl_coefficient=0.25, begun=True, fit_steps=1)):
        saved = json.loads(json.dumps(state_json(state, algorithm)))
        assert restored(saved, first, algorithm) == state


def test_of_a_row_that_could_remember_nothing_a_checkpoint_need_not_speak() -> None:
    algorithm = ppo(baseline="none", kl=KL)
    first = at_first(algorithm, begun=False)
    assert restored({}, first, algorithm) == first
