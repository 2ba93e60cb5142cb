"""The path model of 2008: its dead ends are errors."""

import numpy as np
import pytest

from posttrain.irl.grids import IcyGridWorld
from posttrain.irl.paths import path_partition
from posttrain.irl.planning import Divergence


def test_rewards_beyond_all_reason_are_an_error_and_do_not_end_the_process() -> None:
    """Tilted to certainty, a loop that pays is a singular system with empty columns, in which SuperLU can crash."""
    world, rng = IcyGridWorld(5, slip=0.2), np.random.default_rng(0)
    for _ in range(500):
        with pytest.raises(Divergence, match="partition function over paths is infinite"):
            path_partition(world, rng.normal(size=25) * 10.0 ** rng.uniform(3, 16))
