"""Critics: how a value head begins, what actor-critics remember, and what is told of values and of the KL."""

import json
import math
from dataclasses import replace

import pytest
import torch

from posttrain.algorithms.table import build_algorithm
from posttrain.errors import RunError
from posttrain.models.classifiers.heads import ValueHead
from posttrain.training.credited_step import (
    COMPLETION_KL,
    EXPLAINED,
    NO_STATE,
    TOKEN_KL,
    ActorCriticState,
    after_step,
    at_first,
    credit_metrics,
    explained_variance,
    penalty_metrics,
    restored,
    state_json,
    value_metrics,
)
from tests.closed_form.test_ppo import NAN, RAW, column, credit_of, evidence
from tests.support.refusals import refused
from tests.support.sequences import known

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


HIDDEN = 16


def some_states() -> torch.Tensor:
    return torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def made(kind: str, seed: int = 0) -> ValueHead:
    return ValueHead(HIDDEN, kind, seed=seed, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_a_new_head_expects_the_mean_whatever_it_is_shown(kind: str) -> None:
    head = made(kind)
    assert head(some_states()).tolist() == [0.0] * 5
    head.expect(0.75)
    assert head(some_states()).tolist() == [0.75] * 5


def test_channels_are_drawn_uniformly_around_zero_by_the_seed() -> None:
    """Of 4 d² = 1024 draws within ±1/√d = ±1/4: mean 0 within 4 standard errors, deviation 1/(4√3)."""
    widening = made("mlp").widening
    drawn = widening.weight.detach().flatten()
    spread = 0.25 / math.sqrt(3)
    assert 0.24 < drawn.abs().max() <= 0.25
    assert abs(drawn.mean()) < 4 * spread / 32
    assert drawn.std().item() == pytest.approx(spread, rel=0.05)
    assert widening.bias.tolist() == [0.0] * 4 * HIDDEN
    again, other = (made("mlp", seed=seed).widening for seed in (0, 1))
    assert other is not None
    assert torch.equal(again.weight, widening.weight)
    assert not torch.equal(other.weight, widening.weight)


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_a_loaded_score_is_the_whole_value_whatever_was_expected_before(kind: str) -> None:
    head, states, w = made(kind), some_states(), some_states()[0]
    head.expect(3.0)
    head.load_score(w)
    assert head(states).tolist() == pytest.approx((states @ w).tolist(), rel=1e-12)


def test_explained_variance_by_hand() -> None:
    """Var R of (0, 2) is 1.  R - V: (0, 0); (-1, 1); (1, -1) - twice as wide as R gives 1 - 4."""
    returns = column([0.0, 2.0])
    assert explained_variance(returns, column([0.0, 2.0])) == 1.0
    assert explained_variance(returns, column([7.0, 7.0])) == 0.0
    assert explained_variance(returns, column([2.0, 0.0])) == -3.0
    assert explained_variance(column([1.0, 1.0]), column([0.0, 1.0])) is None


def test_what_is_told_of_values_is_of_scored_completions() -> None:
    """Of four tokens the last is of what nothing scored: V = 1, 2, 3; R = 2, 2, 6."""
    given = evidence([[2.0, 6.0, NAN]], [1.0, 2.0, 3.0, 50.0], [[2, 1, 1]])
    told = value_metrics(given, credit_of({**RAW, "gae": {"lambda_policy": 1.0}}, given))
    # Var R = 32/9; of R - V = 1, 0, 3 it is 14/9.
    expected = {"value/explained_variance": 1 - 14 / 32, "value/mean": 2, "returns/mean": 10 / 3}
    assert told == pytest.approx({**expected, "returns/std": math.sqrt(32) / 3})
    nobody = evidence([[NAN]], [1.0], [[1]])
    assert value_metrics(nobody, credit_of(RAW, nobody)) == {}


def test_the_kl_of_samples_is_told_of_completions_and_of_tokens() -> None:
    """log μ - log ref = 1, 0 and 1, of two completions."""
    behaviour, reference = column([-1.0, -2.0, -3.0]), column([-2.0, -2.0, -4.0])
    columns = known(behaviour_logprobs=behaviour, reference_logprobs=reference)
    told = penalty_metrics(replace(evidence([[0.0, 0.0]], None, [[2, 1]]), known=columns))
    assert told == pytest.approx({"kl_completion": 1.0, "kl_token": 2 / 3})


def test_a_penalty_is_told_of_beside_a_critic_or_a_controller() -> None:
    kl = {"coefficient": 0.5, "estimator": "k1", "place": "reward"}
    given = evidence([[2.0, 1.0]], [1.0, 0.0], [[1, 1]])
    both = known(behaviour_logprobs=column([-1.0, -1.0]), reference_logprobs=column([-2.0, -1.0]))
    given = replace(given, known={**given.known, **both})

    def told(**options: object) -> dict[str, float]:
        algorithm = build_algorithm({**RAW, **options})
        state = at_first(algorithm, begun=False)
        return credit_metrics(given, algorithm.credit(given), algorithm, state)

    assert (told(kl=kl)["kl_coefficient"], told(kl=kl)["kl_completion"]) == (0.5, 0.5)
    assert told(kl=kl, baseline="none", adaptive_kl={"target": 1.0})["kl_coefficient"] == 0.5
    assert "kl_coefficient" not in told(kl=kl, baseline="none")
    assert "kl_coefficient" not in told()


def test_returns_that_differ_by_more_than_rounding_can_be_explained() -> None:
    # A deviation of 1e-5 is above the least, 1e-6.
    assert explained_variance(column([0.0, 2e-5]), column([0.0, 2e-5])) == 1.0
    assert explained_variance(column([0.0, 1e-6]), column([0.0, 1e-6])) is None
