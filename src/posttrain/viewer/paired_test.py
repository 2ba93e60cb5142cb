"""Whether two runs differ on the same problems: an exact test, problem by problem."""

from collections.abc import Sequence
from math import lcm

import numpy as np

MOST_CELLS = 200_000_000
"""Maximum number of products for the exact distribution."""
Right = tuple[int, int]
"""Number of correct answers to a problem, and number of answers."""


def sign_flip_p_value(a: Sequence[Right], b: Sequence[Right]) -> float | None:
    """Exact two-sided p-value of the difference of two mean shares of correct answers to the same problems.

        d_i = share_a_i - share_b_i        p = P(|Σ s_i d_i| >= |Σ d_i|),  s_i = ±1, each with probability 1/2

    If the runs do not differ, the two shares of a problem could as well be swapped (Fisher 1935; Pitman 1937).  The
    distribution over all 2^n swaps is computed exactly, as that of a sum of whole numbers.  With one answer to each
    problem this is McNemar's exact test.  1 if no problem differs; None if the numbers are too large.
    """
    assert len(a) == len(b)
    common = lcm(*(count for _, count in (*a, *b)))
    differences = [
        right_a * (common // of_a) - right_b * (common // of_b)
        for (right_a, of_a), (right_b, of_b) in zip(a, b, strict=True)
    ]
    total = sum(map(abs, differences))
    if len(a) * total > MOST_CELLS:
        return None
    chances = np.zeros(2 * total + 1)  # of the sum -total … total
    chances[total] = 1.0
    for each in map(abs, differences):
        chances = (np.roll(chances, each) + np.roll(chances, -each)) / 2
    observed = abs(sum(differences))
    beyond = chances[: total - observed + 1].sum() + chances[total + observed :].sum()
    return float(min(1.0, beyond)) if observed else 1.0
