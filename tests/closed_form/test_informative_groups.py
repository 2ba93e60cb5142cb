"""Which groups dynamic sampling keeps: by their rewards, by what steps earned, by each function's scores."""

import math

import torch

from posttrain.algorithms.aggregation import scores_differ, sums_differ, totals_differ
from posttrain.records import Grades, Marks

NAN = math.nan


def graded(scores: list[list[list[float]]], weights: list[float], marks: dict[str, object] | None = None) -> Grades:
    """Scores by function, prompt and sample; a reward is their weighted sum."""
    table, counts = torch.tensor(scores, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)
    return Grades(
        names=("a", "b"),
        scores=table,
        weights=counts,
        rewards=torch.einsum("f,fpg->pg", counts, table),
        marks=marks or {},  # type: ignore[arg-type]
    )


def test_any_function_that_counts_may_tell_two_rollouts_apart() -> None:
    """Three prompts: the sum differs; two functions cancel in the sum; only what does not count differs."""
    scores = [[[1.0, 0.0], [1.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 1.0], [0.0, 1.0]]]
    assert scores_differ(graded(scores, [1.0, 1.0])).tolist() == [True, True, True]
    assert sums_differ(graded(scores, [1.0, 1.0])).tolist() == [True, False, True]
    assert scores_differ(graded(scores, [1.0, 0.0])).tolist() == [True, True, False]
    assert scores_differ(graded(scores, [0.0, 1.0])).tolist() == [False, True, True]
    nothing_counts = graded(scores, [0.0, 0.0])
    assert scores_differ(nothing_counts).tolist() == sums_differ(nothing_counts).tolist() == [False, False, False]


def test_steps_of_a_scored_rollout_and_of_a_function_that_counts_are_information() -> None:
    """Four prompts of equal rewards: no marks; a mark of a; a mark of b; a mark of a in what nothing scored."""
    mark, none = Marks(tokens=(0.5, None)), None
    same = [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, NAN]]
    marks = {
        "a": ((none, none), (none, mark), (none, none), (none, mark)),
        "b": ((none, none), (none, none), (mark, none), (none, none)),
    }
    both = graded([same, same], [1.0, 1.0], marks)
    assert sums_differ(both).tolist() == [False, True, True, False]
    assert sums_differ(graded([same, same], [1.0, 0.0], marks)).tolist()[:3] == [False, True, False]
    assert totals_differ(both).tolist() == [False, True, True, False]
    level = {"a": (((mark, mark)),) * 4}
    assert totals_differ(graded([same, same], [1.0, 1.0], level)).tolist() == [False] * 4
