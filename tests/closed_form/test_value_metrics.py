"""What is told of values, of returns and of the KL that rewards lose, worked out by hand."""

import math
from dataclasses import replace

import pytest

from posttrain.algorithms.table import build_algorithm
from posttrain.training.actor_critic_state import (
    at_first,
    credit_metrics,
    explained_variance,
    penalty_metrics,
    value_metrics,
)
from tests.closed_form.test_ppo import NAN, RAW, column, credit_of, evidence
from tests.support.sequences import known


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
