"""Importance weights by hand: truncation, masks and levels, and what is said of options that make no sense."""

import math

import pytest
import torch

from posttrain.algorithms.correction import Correction, corrected, correction_weights
from posttrain.algorithms.table import build_algorithm
from posttrain.algorithms.terms import LossTerm, TokenView
from posttrain.batch import TokenColumns
from posttrain.needs import Need
from tests.support.sequences import known
from tests.support.tiny import token_loss

RATIOS = [4.0, 0.25, 1.21, 1.44, 3.0]
"""π_prox/μ of five tokens, the first two of one completion, the next two of another, the last one alone."""
ROLLOUT = torch.tensor([0, 0, 1, 1, 2])


def values(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def found(**options: object) -> tuple[list[float], list[bool], list[bool]]:
    """Weights, what is truncated and what is masked of tokens at `RATIOS`."""
    behaviour = values(-1, -2, -3, -0.5, -4)
    made = correction_weights(behaviour + values(*RATIOS).log(), behaviour, ROLLOUT, correction=Correction(**options))
    return made.weights.tolist(), made.truncated.tolist(), made.masked.tolist()


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, [2, 0.25, 1.21, 1.44, 2]),  # min(ρ, 2)
        ({"truncate": None}, RATIOS),
        ({"truncate": 1.0}, [1, 0.25, 1, 1, 1]),
        # √(4 · .25) = 1, √(1.21 · 1.44) = 1.32
        ({"level": "sequence_mean"}, [1, 1, 1.32, 1.32, 2]),
        # 1.21 · 1.44 = 1.7424
        ({"level": "sequence_product"}, [1, 1, 1.7424, 1.7424, 2]),
        ({"level": "sequence_product", "truncate": 1.5}, [1, 1, 1.5, 1.5, 1.5]),
        # Tokens outside [.5, 3.5] weigh nothing, and the others their whole ratio.
        ({"truncate": None, "mask_level": "token", "mask_low": 0.5, "mask_high": 3.5}, [0, 0, 1.21, 1.44, 3]),
        # Completions by their mean, 1, 1.32 and 3.
        ({"mask_high": 1.4}, [2, 0.25, 1.21, 1.44, 0]),
        ({"mask_low": 0.9, "mask_high": 1.1}, [2, 0.25, 0, 0, 0]),
        ({"mask_low": 0.9, "mask_high": 1.1, "level": None}, [1, 1, 0, 0, 0]),
        # By their product, 1, 1.7424 and 3.
        ({"mask_high": 1.75, "mask_level": "sequence_product", "level": None}, [1, 1, 1, 1, 0]),
        ({"mask_high": 1.7, "mask_level": "sequence_product", "level": None}, [1, 1, 0, 0, 0]),
    ],
    ids=str,
)
def test_the_weights_of_a_correction(options: dict[str, object], weights: list[float]) -> None:
    assert found(**options)[0] == pytest.approx(weights, rel=1e-12)


def test_a_ratio_at_a_bound_is_within_it() -> None:
    options = Correction(truncate=None, mask_level="token", mask_low=0.25, mask_high=4.0)
    proximal = values(math.log(0.25), math.log(4.0))
    made = correction_weights(proximal, values(0, 0), torch.tensor([0, 0]), correction=options)
    assert (made.weights.tolist(), made.masked.tolist()) == (pytest.approx([0.25, 4.0]), [False, False])


def test_what_is_truncated_and_what_is_masked_are_told_apart() -> None:
    assert found()[1:] == ([True, False, False, False, True], [False] * 5)
    assert found(mask_high=1.4)[1:] == ([True, False, False, False, False], [False] * 4 + [True])
    assert found(level=None, mask_low=0.9)[1:] == ([False] * 5, [False] * 5)
    low = found(level="sequence_mean", mask_low=0.3, mask_level="token")
    assert low[2] == [False, True, False, False, False]


def test_the_ratio_of_a_corrected_surrogate_is_to_where_the_step_began() -> None:
    # π/μ = 3 with A = 1 would be clipped; π/π_prox = 1.1 is not, and is weighed by min(π_prox/μ, 2) = 2: -2 · 1.1.
    logprobs = values(3).log().requires_grad_()
    given = (logprobs, values(0), values(1), torch.zeros(1, dtype=torch.int64))
    algorithm = build_algorithm({"name": "grpo", "correction": {}})
    token_loss(algorithm, *given, proximal=values(3 / 1.1).log()).sum().backward()
    assert logprobs.grad.item() == pytest.approx(-2.2, rel=1e-12)
    (policy,) = algorithm.terms
    columns = TokenColumns(
        advantages=values(1, 1),
        weights=values(1, 1),
        behaviour_logprobs=values(0, 0),
        known=known(proximal_logprobs=values(math.log(2.7), math.log(2.0))),
    )
    view = TokenView(logprobs=values(3, 3).log(), rollout=torch.tensor([0, 1]), columns=columns)
    assert policy.clipped(view).tolist() == [False, True]  # 1.11 and 1.5 of a range up to 1.2
    assert policy.measures(view)["correction/truncated"].tolist() == [1, 0]


def test_a_weight_carries_no_gradient_of_its_own() -> None:
    proximal = values(0.3).requires_grad_()
    made = correction_weights(proximal, values(0), torch.zeros(1, dtype=torch.int64), correction=Correction())
    assert not made.weights.requires_grad


@pytest.mark.parametrize("name", ["reinforce", "rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "maxrl"])
def test_every_row_with_a_ratio_takes_a_correction_and_needs_no_pass_without(name: str) -> None:
    assert Need.PROXIMAL_LOGPROBS not in build_algorithm({"name": name}).needs
    made = build_algorithm({"name": name, "correction": {"truncate": 3.0, "mask_high": 5.0}})
    assert made.needs == {Need.PROXIMAL_LOGPROBS}
    assert not made.keeps_zero_advantages


def test_of_ppo_it_is_the_policys_term_that_is_corrected_and_not_that_of_the_values() -> None:
    assert Need.PROXIMAL_LOGPROBS not in build_algorithm({"name": "ppo"}).needs
    policy, value = build_algorithm({"name": "ppo", "correction": {"truncate": 3.0}}).terms
    assert policy.needs == {Need.PROXIMAL_LOGPROBS}
    assert value.needs == {Need.VALUES}


def test_a_corrected_term_reports_what_it_reported_without() -> None:
    def half(view: TokenView) -> dict[str, torch.Tensor]:
        return {"own/half": view.logprobs / 2}

    term = LossTerm(name="mine", per_token=lambda view: view.logprobs, measures=half)
    columns = TokenColumns(
        advantages=values(1, 1),
        weights=values(1, 1),
        behaviour_logprobs=values(-1, -1),
        known=known(proximal_logprobs=values(-1, -2)),
    )
    view = TokenView(logprobs=values(-1, -4), rollout=torch.tensor([0, 0]), columns=columns)
    corrected_term = corrected(term, Correction(level="token"))
    found = {name: column.tolist() for name, column in corrected_term.measures(view).items()}
    assert found["own/half"] == [-0.5, -2]
    assert found["correction/weight"] == pytest.approx([1, math.exp(-1)])
