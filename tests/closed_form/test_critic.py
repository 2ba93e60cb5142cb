"""Critics: how a value head begins, and what actor-critics remember from step to step."""

import json
import math

import pytest
import torch

from posttrain.algorithms.table import build_algorithm
from posttrain.errors import RunError
from posttrain.models.classifiers.heads import ValueHead
from posttrain.training.credited_step import COMPLETION_KL, EXPLAINED, TOKEN_KL, ActorCriticState, after_step
from tests.support.refusals import refused

KL = {"coefficient": 0.5, "estimator": "k1", "place": "reward"}
HIDDEN = 16


def ppo(**options: object):
    return build_algorithm({"name": "ppo", **options})


def test_a_critic_that_may_learn_alone_begins_so_and_other_rows_remember_nothing() -> None:
    grpo = build_algorithm({"name": "grpo"})
    assert ActorCriticState.at_first(grpo, begun=False) == ActorCriticState()
    assert ActorCriticState().as_json(grpo) == {}
    for options, fitted in (({"critic": {"fit_steps": 1}}, False), ({"critic": {"fit_steps": 0}}, True)):
        assert ActorCriticState.at_first(ppo(**options), begun=False).fitted == fitted
    assert ActorCriticState.at_first(ppo(baseline="none"), begun=False).fitted
    assert ActorCriticState.at_first(ppo(kl=KL), begun=True) == ActorCriticState(
        kl_coefficient=0.5, begun=True, fitted=False
    )


@pytest.mark.parametrize(("per", "expected"), [("sequence", 0.5 * 1.02), ("token", 0.5 * 0.98)])
def test_the_coefficient_follows_the_kl_that_the_target_is_of(per: str, expected: float) -> None:
    """20 of 200 completions; the completion's KL is far above the target of 1 and the token's far below it."""
    algorithm = ppo(baseline="none", kl=KL, adaptive_kl={"target": 1.0, "per": per, "horizon": 200.0})
    after = after_step(
        ActorCriticState.at_first(algorithm, begun=False), {COMPLETION_KL: 9.0, TOKEN_KL: 0.1}, 20, algorithm
    )
    assert after.kl_coefficient == pytest.approx(expected)


def test_the_critic_learns_alone_until_it_explains_something_or_its_steps_are_over() -> None:
    algorithm = ppo(critic={"fit_steps": 2})
    begun = ActorCriticState.at_first(algorithm, begun=False)
    assert after_step(begun, {EXPLAINED: 0.1}, 20, algorithm).fitted
    once = after_step(begun, {EXPLAINED: -0.1}, 20, algorithm)
    twice = after_step(once, {}, 20, algorithm)  # rewards that are all alike say nothing
    assert [(each.fitted, each.fit_steps) for each in (once, twice)] == [(False, 1), (False, 2)]
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
    first = ActorCriticState.at_first(algorithm, begun=False)
    with refused("the checkpoint does not contain the state of ppo", error=RunError):
        first.restored({}, algorithm)
    for state in (first, ActorCriticState(), ActorCriticState(kl_coefficient=0.25, begun=True, fit_steps=1)):
        assert first.restored(json.loads(json.dumps(state.as_json(algorithm))), algorithm) == state


def test_of_a_row_that_could_remember_nothing_a_checkpoint_need_not_speak() -> None:
    algorithm = ppo(baseline="none", kl=KL)
    first = ActorCriticState.at_first(algorithm, begun=False)
    assert first.restored({}, algorithm) == first


def made(kind: str, seed: int = 0) -> ValueHead:
    return ValueHead(HIDDEN, kind, seed=seed, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_a_new_head_expects_the_mean_and_a_loaded_score_is_the_whole_value(kind: str) -> None:
    head = made(kind)
    states = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert head(states).tolist() == [0.0] * 5
    head.expect(0.75)
    assert head(states).tolist() == [0.75] * 5
    head.load_score(states[0])
    assert head(states).tolist() == pytest.approx((states @ states[0]).tolist(), rel=1e-12)


def test_channels_are_drawn_uniformly_around_zero_by_the_seed() -> None:
    """Of 4 d² = 1024 draws within ±1/√d = ±1/4: mean 0 within 4 standard errors, deviation 1/(4√3)."""
    widening, again, other = (made("mlp", seed=seed).widening for seed in (0, 0, 1))
    drawn, spread = widening.weight.detach().flatten(), 0.25 / math.sqrt(3)
    assert 0.24 < drawn.abs().max() <= 0.25
    assert abs(drawn.mean()) < 4 * spread / 32
    assert drawn.std().item() == pytest.approx(spread, rel=0.05)
    assert widening.bias.tolist() == [0.0] * 4 * HIDDEN
    assert torch.equal(again.weight, widening.weight)
    assert not torch.equal(other.weight, widening.weight)
