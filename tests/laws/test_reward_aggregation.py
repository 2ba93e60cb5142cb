"""normalize_then_sum: each reward function is standardised in its group before the functions are added up."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.algorithms.advantages import decoupled_zscore, group_zscore, scores_differ, sums_differ
from posttrain.algorithms.table import build_algorithm
from posttrain.records import Grades
from tests.support.sequences import evidence_of

nan = math.nan
SCORES = st.sampled_from([nan, -1.0, 0.0, 0.1, 0.3, 0.5, 1.0, 7.25])
SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5))
DEVIATIONS = st.sampled_from(["population", "sample"])
NORMALISING = ["grpo", "dapo", "gspo", "cispo"]


@st.composite
def scored(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of some functions, not all of which apply everywhere, and their weights."""
    functions, prompts, group = draw(SHAPES)
    size = functions * prompts * group
    values = torch.tensor(draw(st.lists(SCORES, min_size=size, max_size=size)), dtype=torch.float64)
    weights = draw(st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0, 2.0]), min_size=functions, max_size=functions))
    return values.reshape(functions, prompts, group), torch.tensor(weights, dtype=torch.float64)


def twin(scores: np.ndarray, weights: np.ndarray, degrees: int, epsilon: float) -> np.ndarray:
    """The paper's formulas, one rollout at a time, the mean over the batch taken off as it says."""
    functions, prompts, group = scores.shape
    total = np.full((prompts, group), nan)
    for k, i, j in np.ndindex(functions, prompts, group):
        if weights[k] == 0 or np.isnan(scores[k, i, j]):
            continue
        known = scores[k, i][~np.isnan(scores[k, i])]
        spread = math.sqrt(((known - known.mean()) ** 2).sum() / (len(known) - degrees)) if len(known) > degrees else 0
        z = (scores[k, i, j] - known.mean()) / (spread + epsilon) if spread > 1e-12 else 0.0
        total[i, j] = weights[k] * z + (0.0 if np.isnan(total[i, j]) else total[i, j])
    known = total[~np.isnan(total)]
    if len(known) <= degrees or known.std() < 1e-12:
        return np.zeros_like(total)
    spread = math.sqrt(((known - known.mean()) ** 2).sum() / (len(known) - degrees))
    return np.nan_to_num((total - known.mean()) / (spread + epsilon))


@settings(max_examples=150, deadline=None)
@given(given=scored(), deviation=DEVIATIONS, epsilon=st.sampled_from([0.0, 1e-4, 0.5]))
def test_it_is_the_paper_s_formula_written_out(given, deviation, epsilon) -> None:
    scores, weights = given
    made = decoupled_zscore(scores, weights, deviation=deviation, epsilon=epsilon)  # type: ignore[arg-type]
    expected = twin(scores.numpy(), weights.numpy(), 1 if deviation == "sample" else 0, epsilon)
    np.testing.assert_allclose(made.numpy(), expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(given=scored(), function=st.integers(0, 2), factor=st.sampled_from([1e-9, 0.3, 50.0]), shift=st.just(3.0))
def test_the_scale_and_the_zero_of_a_function_change_nothing(given, function, factor, shift) -> None:
    scores, weights = given
    other = scores.clone()
    other[function % len(scores)] = factor * (scores[function % len(scores)] + shift)
    before, after = decoupled_zscore(scores, weights), decoupled_zscore(other, weights)
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-9)


def test_the_scale_of_a_function_decides_where_scores_are_summed_first() -> None:
    # The law above says something only if the other order breaks it: (10, 0) + (0, 1) prefers the first rollout.
    scores = torch.tensor([[[10.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]]], dtype=torch.float64)
    weights = torch.ones(2, dtype=torch.float64)
    summed = group_zscore((weights[:, None, None] * scores).sum(dim=0))
    apart = decoupled_zscore(scores, weights)
    assert summed[0, 0] > 1 > summed[0, 1]
    assert apart[0, 0].item() == pytest.approx(apart[0, 1].item())


@settings(max_examples=60, deadline=None)
@given(given=scored(), deviation=DEVIATIONS)
def test_of_one_function_it_is_the_z_score_up_to_one_factor_of_the_step(given, deviation) -> None:
    scores = given[0][:1]
    alone = decoupled_zscore(scores, torch.full((1,), 0.25, dtype=torch.float64), deviation=deviation)  # type: ignore[arg-type]
    z = group_zscore(scores[0], deviation=deviation)  # type: ignore[arg-type]
    factor = alone[z != 0] / z[z != 0]
    assert torch.all((alone != 0) == (z != 0))
    assert factor.numel() == 0 or (factor.min() > 0 and (factor.max() / factor.min()).item() == pytest.approx(1))


def test_of_one_function_that_every_group_learns_from_it_is_the_z_score() -> None:
    # Population deviation: each group's z have mean square 1, and so have all of them together.
    scores = torch.tensor([[[0.0, 1.0, 1.0], [0.5, 0.25, 2.0]]], dtype=torch.float64)
    torch.testing.assert_close(
        decoupled_zscore(scores, torch.ones(1, dtype=torch.float64)), group_zscore(scores[0]), rtol=1e-12, atol=1e-12
    )


def test_functions_that_cancel_leave_no_rounding_to_learn_from() -> None:
    # .1, .2, .4 and three times that have the same z but for rounding, which weights of 1 and -1 would leave over.
    base = torch.tensor([[0.1, 0.2, 0.4]], dtype=torch.float64)
    made = decoupled_zscore(torch.stack([base, 3 * base]), torch.tensor([1.0, -1.0], dtype=torch.float64))
    assert made.tolist() == [[0, 0, 0]]


def test_equal_scores_and_rollouts_that_nothing_scored_are_exactly_zero() -> None:
    scores = torch.tensor([[[0.9, 0.9, 0.9], [0.0, 1.0, nan]], [[nan, nan, nan], [nan, nan, nan]]], dtype=torch.float64)
    made = decoupled_zscore(scores, torch.ones(2, dtype=torch.float64))
    assert made[0].tolist() == [0, 0, 0]
    assert made[1, 2] == 0
    assert made[1, 1] == -made[1, 0] > 0


def grades(scores: list[list[list[float]]], weights: list[float], **more: object) -> Grades:
    table = torch.tensor(scores, dtype=torch.float64)
    by_weight = torch.tensor(weights, dtype=torch.float64)
    summed = (by_weight[:, None, None] * table).sum(dim=0)
    names = tuple("abc"[: len(weights)])
    return Grades(names=names, scores=table, weights=by_weight, rewards=summed, **more)  # type: ignore[arg-type]


def test_dynamic_sampling_keeps_a_group_whose_functions_differ_though_its_sums_do_not() -> None:
    apart = grades([[[1.0, 0.0]], [[0.0, 1.0]]], [1.0, 1.0])
    assert not sums_differ(apart).any()
    assert scores_differ(apart).all()
    assert not scores_differ(grades([[[1.0, 0.0]], [[1.0, 1.0]]], [0.0, 1.0])).any()  # what is only reported
    assert not scores_differ(grades([[[3.0, 2.0]]], [1.0], clips={"a": (0.0, 1.0)})).any()  # both are clipped to 1


@pytest.mark.parametrize("name", NORMALISING)
def test_every_algorithm_that_normalises_by_group_can_normalise_first(name: str) -> None:
    scores = torch.tensor([[[1.0, 0.0, 0.0]], [[0.0, 0.01, 0.0]]], dtype=torch.float64)
    weights = torch.tensor([1.0, 2.0], dtype=torch.float64)
    rewards = (weights[:, None, None] * scores).sum(dim=0)
    evidence = evidence_of(rewards, [[2, 1, 1]], scores=scores, weights=weights)
    plain: dict[str, object] = {"name": name} | ({"overlong": None} if name == "dapo" else {})
    first, *_ = build_algorithm(plain).credit(evidence).advantages.tolist()
    assert first == pytest.approx(2**0.5, rel=0.01)  # (1, .02, 0) in units of its deviation
    credited = build_algorithm(plain | {"reward_aggregation": "normalize_then_sum"}).credit(evidence).advantages
    # z is (2, -1, -1) / sqrt 2 and (-1, 2, -1) / sqrt 2: once and twice that is (0, 3, -3) / sqrt 2; deviation sqrt 3.
    assert credited.tolist() == pytest.approx([0, 0, 1.5**0.5, -(1.5**0.5)], abs=1e-12)
