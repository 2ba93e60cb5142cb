"""Which pairs go through the model together, counted by hand."""

import pytest

from posttrain.records import Preference, Prompt, TokenSequence
from posttrain.training.reward_model.pair_scores import pair_microbatches, read_lengths


def pair(prompt: tuple[int, ...], chosen: int, rejected: int) -> Preference:
    asked = Prompt(id="p", text="", tokens=prompt)
    answers = [TokenSequence.one_turn((token,) * count) for token, count in ((7, chosen), (8, rejected))]
    return Preference(prompt=asked, chosen=answers[0], rejected=answers[1], where="rows:1")


LONG, SHORT, OTHER = (1, 2, 3, 4), (5,), (6, 6)
PAIRS = [
    pair(LONG, 2, 1),  # 4 + 3 tokens, 6 wide
    pair(SHORT, 1, 1),  # 1 + 2, 2 wide
    pair(LONG, 1, 5),  # 4 + 6, or 6 beside the first; 9 wide
    pair(OTHER, 3, 3),  # 2 + 6, 5 wide
]
"""By their prompts' widest pair, and then by their own: the second, the fourth, the first, the third."""


@pytest.mark.parametrize(
    ("budget", "padded", "expected"),
    [
        (1000, False, [[1, 3, 0, 2]]),
        (24, False, [[1, 3, 0, 2]]),  # 3 + 8 + 7 + 6: the long prompt counts once
        (23, False, [[1, 3, 0], [2]]),
        (17, False, [[1, 3], [0, 2]]),  # 11, and 7 + 6
        (13, False, [[1, 3], [0, 2]]),
        (12, False, [[1, 3], [0], [2]]),
        (1, False, [[1], [3], [0], [2]]),
        (72, True, [[1, 3, 0, 2]]),  # 4 pairs, 8 rows of 9
        (71, True, [[1, 3, 0], [2]]),  # 6 rows of 6
        (36, True, [[1, 3, 0], [2]]),
        (35, True, [[1, 3], [0], [2]]),  # 4 rows of 5; the two long ones would be 4 rows of 9
        (20, True, [[1, 3], [0], [2]]),
        (19, True, [[1], [3], [0], [2]]),
    ],
)
def test_as_many_pairs_as_fit_go_together(budget: int, padded: bool, expected: list[list[int]]) -> None:
    assert [*pair_microbatches(PAIRS, budget, lengths=read_lengths, padded=padded)] == expected
