"""Which completions of a group make pairs, and what is counted of those that make none."""

import math
from dataclasses import replace

import pytest
import torch

from posttrain.records import Grades, TokenSequence
from posttrain.training.dpo.round_pairs import pair_tensors, pairs_from, ranked_pairs, sampled_round
from tests.support.tiny import written_group

NAN = math.nan


@pytest.mark.parametrize(
    ("rewards", "most", "expected"),
    [
        ([0.2, 1.0, 0.0, 0.5], 1, [(1, 2)]),
        # 1 with 0, then .5 with .2; with an odd group the one in the middle is left over.
        ([0.2, 1.0, 0.0, 0.5], 9, [(1, 2), (3, 0)]),
        ([0.2, 1.0, 0.0, 0.5, 0.3], 9, [(1, 2), (3, 0)]),
        ([1.0, 1.0, 1.0, 0.0], 9, [(0, 3)]),  # the next two are equal
        ([0.0, 1.0, 0.0, 1.0], 1, [(1, 2)]),  # the first of the best with the last of the worst
        ([0.5, 0.5], 9, []),
        ([NAN, 0.5, NAN, 0.25], 9, [(1, 3)]),
        ([NAN, 0.5], 9, []),
        ([NAN, NAN], 9, []),
    ],
)
def test_the_best_goes_with_the_worst(rewards: list[float], most: int, expected: list[tuple[int, int]]) -> None:
    assert ranked_pairs(rewards, most) == expected


GROUPS = [
    written_group([1, 2], [[3, 5], [4, 4, 5], [7, 5]], name="a", draw=0),
    written_group([9], [[3, 5], [4, 5], [8, 5]], name="b", draw=1),
    written_group([2], [[6, 5], [6, 5], [7, 5]], name="c", draw=2),
]
REWARDS = torch.tensor([[0.5, 1.0, 0.25], [1.0, 1.0, 1.0], [1.0, 0.0, NAN]], dtype=torch.float64)
GRADES = Grades(names=("r",), scores=REWARDS[None], weights=torch.ones(1, dtype=torch.float64), rewards=REWARDS)


def test_ties_and_equal_answers_make_no_pair_and_are_counted() -> None:
    """Group b earned the same throughout; the judge told apart two completions of group c that are one text."""
    made = sampled_round(3, GROUPS, GRADES, 2)
    (pair,) = made.pairs
    assert (pair.prompt.tokens, pair.chosen.tokens, pair.rejected.tokens, pair.margin) == (
        (1, 2),
        (4, 4, 5),
        (7, 5),
        0.75,
    )
    assert pair.where == "round 3, prompt a, samples 1 and 2"
    assert made.num_tied == 2
    torch.testing.assert_close(
        made.sides, torch.tensor([[NAN, 1, -1], [NAN] * 3, [NAN] * 3], dtype=torch.float64), equal_nan=True
    )
    metrics = made.metrics()
    told = {name: metrics[name] for name in ("round", "pairs/num", "pairs/frac_tied", "pairs/reward_gap", "reward")}
    # (.5 + 1 + .25 + 1 + 1 + 1 + 1 + 0) / 8
    assert told == {
        "round": 3,
        "pairs/num": 1,
        "pairs/frac_tied": pytest.approx(2 / 3),
        "pairs/reward_gap": 0.75,
        "reward": pytest.approx(5.75 / 8),
    }


def test_a_round_of_ties_has_no_gap() -> None:
    made = sampled_round(1, GROUPS[1:2], GRADES.select([1]), 1)
    assert made.pairs == []
    assert "pairs/reward_gap" not in made.metrics()


def test_sampled_pairs_go_through_a_checkpoint() -> None:
    pairs = sampled_round(1, GROUPS, GRADES, 1).pairs
    (again,) = pairs_from(pair_tensors(pairs), ["somewhere"])
    assert (again.prompt.tokens, again.chosen.tokens, again.rejected.tokens) == ((1, 2), (4, 4, 5), (7, 5))
    assert again.where == "somewhere"
    given = replace(pairs[0], rejected=TokenSequence(tokens=(7, 5), sampled=(False, True)))
    (again,) = pairs_from(pair_tensors([given]), ["somewhere"])
    assert (again.chosen.sampled, again.rejected.sampled) == ((True, True, True), (False, True))
    assert pairs_from(pair_tensors([]), []) == []
