"""Lists, whole numbers, flags and seeds are what they plainly mean; what could mean two things is refused."""

import numpy as np
import pytest
from scipy.sparse import csr_array

from posttrain.irl import (
    GridWorld,
    LinearReward,
    MaxCausalEntIRL,
    MaxEntIRL,
    epic_distance,
    expected_value_difference,
    occupancy,
    policy_divergence,
    sample_demonstrations,
    smallest_gap,
    value_iteration,
)
from posttrain.irl.course import recover_reward
from tests.support.refusals import refused

GRID = GridWorld(3)
COST = np.arange(9) - 9.0
EAST = np.tile([1.0, 0.0, 0.0, 0.0], (9, 1))
EAST[[2, 5]] = [0.0, 0.0, 1.0, 0.0]


def test_a_list_of_numbers_is_an_array() -> None:
    values = value_iteration(GRID, COST, discount=0.9)
    assert np.array_equal(value_iteration(GRID, COST.tolist(), discount=0.9), values)
    assert epic_distance(COST.tolist(), (-COST).tolist(), discount=0.9) == epic_distance(COST, -COST, discount=0.9)
    assert policy_divergence(GRID, COST.tolist(), (COST / 2).tolist(), discount=0.9) > 0


@pytest.mark.parametrize("given", [EAST.tolist(), EAST.astype(int), EAST.astype(bool), EAST.astype(np.float32)])
def test_a_policy_of_certain_actions_is_one_whatever_its_type(given) -> None:
    assert np.array_equal(occupancy(GRID, given, discount=0.9), occupancy(GRID, EAST, discount=0.9))
    lost = [expected_value_difference(GRID, COST, policy, discount=0.9) for policy in (given, EAST)]
    assert lost[0] == lost[1]
    walks = [sample_demonstrations(GRID, policy, num_episodes=3, rng=0) for policy in (given, EAST)]
    assert np.array_equal(walks[0].states, walks[1].states)


def test_a_seed_is_the_generator_of_that_seed() -> None:
    uniform = np.full((9, 4), 0.25)
    by_seed, by_generator = (
        sample_demonstrations(GRID, uniform, num_episodes=5, rng=rng) for rng in (3, np.random.default_rng(3))
    )
    assert np.array_equal(by_seed.states, by_generator.states)


def test_one_end_may_be_named_by_its_number() -> None:
    assert np.flatnonzero(GridWorld(3, terminal=8).terminal).tolist() == [8]
    assert np.flatnonzero(GridWorld(3, terminal=np.int64(4)).terminal).tolist() == [4]


@pytest.mark.parametrize("kind", [int, np.uint8, float])
def test_a_zero_or_a_one_for_each_state_could_be_flags_or_numbers(kind) -> None:
    with refused("may be flags or the numbers of states: for flags give bools"):
        GridWorld(3, terminal=np.eye(9, dtype=kind)[8])
    assert np.flatnonzero(GridWorld(3, terminal=np.eye(9, dtype=bool)[8]).terminal).tolist() == [8]
    assert np.flatnonzero(GridWorld(3, start=8, terminal=[0, 1]).terminal).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("start", "words"), [(np.full(9, 5 / 9), "add up to 5, not to 1"), (np.ones(4) / 4, "the shape (4,)")]
)
def test_a_start_that_is_no_distribution_has_no_least_gap(start, words) -> None:
    features = LinearReward(features=np.eye(9)).bound(GRID)
    with refused(words):
        smallest_gap(MaxCausalEntIRL().setting(features, start), np.ones(9))


@pytest.mark.parametrize("fitter", [MaxCausalEntIRL, MaxEntIRL])
def test_within_an_infinite_tolerance_anything_would_do(fitter) -> None:
    with refused("tolerance = inf"):
        fitter(tolerance=np.inf)


def test_what_was_masked_is_not_brought_back() -> None:
    masked = np.ma.array(EAST, mask=np.arange(36).reshape(9, 4) == 3)
    with refused("the policy has masked entries"):
        occupancy(GRID, masked, discount=0.9)
    with refused("the reward has masked entries"):
        value_iteration(GRID, np.ma.array(COST, mask=COST < -8), discount=0.9)


def test_the_courses_algorithm_takes_lists_and_sparse_features() -> None:
    endless = GridWorld(3, terminal=())
    walks = sample_demonstrations(GRID, EAST, num_episodes=3, rng=0)
    fits = [
        recover_reward(endless, features, terminal, walks, tolerance=1e-2)
        for features, terminal in ((np.eye(9), np.array([8])), (np.eye(9).tolist(), [8]), (csr_array(np.eye(9)), 8))
    ]
    assert np.array_equal(fits[0].weights, fits[1].weights)
    assert np.array_equal(fits[0].weights, fits[2].weights)
    with refused("terminal state 9 does not exist: states are 0 to 8"):
        recover_reward(endless, np.eye(9), np.array([9]), walks)
