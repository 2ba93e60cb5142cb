"""What inverse RL cannot use is refused in a message; what it can use is what it plainly means."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_array

from posttrain import irl
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
from posttrain.neural_irl import NeuralIRL
from tests.support.irl_bad_input import BAD, CALLS
from tests.support.refusals import refused

ROOT = Path(__file__).parents[3]

NINE = {"flags of whole numbers", "a start that adds up to 5"}
"""Nine finite numbers, which may be what states are worth."""
SURE = {"flags of whole numbers"}
"""The same may be a start, in one state for certain."""
STATES = {"a set", "an empty list", "an array of one"}
"""Numbers of states, or none."""
POSITIVE = {".5", "20", "1e300"}

# What is no mistake, though it is in the list: for an argument of any function, or of one by name.
RIGHT = {
    "reward": NINE,
    "other": NINE,
    "learned": NINE,
    "values": NINE | {"states of 1e300"},
    "guess": NINE | {"states of 1e300", "None"},
    "moments": NINE,
    "start": SURE,
    "terminal": STATES,
    "discount": {".5"},
    "temperature": POSITIVE,
    "tolerance": POSITIVE,
    "l2": POSITIVE,
    "learning_rate": POSITIVE,
    "weight_decay": POSITIVE,
    "steepness": POSITIVE,
    "level": {".5"},
    "slip": {".5"},
    "size": {"20"},
    "horizon": {"20"},
    "num_states": {"20"},
    "num_episodes": {"20"},
    "max_steps": {"20"},
    "max_iterations": {"20"},
    "num_steps": {"20"},
    "rng": {"20"},
    "watch": {"None", "a function", "a class"},
    "state_of": {"a function", "a class"},
    "terminated": {"True"},
    "truncated": {"True"},
    "terminations": {"an empty list", "an array of one", "flags of whole numbers"},
    "truncations": {"an empty list", "an array of one", "flags of whole numbers"},
    "infos": {"None", "an empty list"},
    "time_limit": {"None", "20"},
    "TabularMDP.rewards": {"pairs of 1e300"},
    "TabularMDP.states": {"flags of whole numbers"},
    "TabularMDP.start": set(),
    "TabularMDP.terminal": set(),
    "TabularMDP.from_sparse.terminal": set(),
    "TabularMDP.from_dense.terminal": set(),
    "IcyGridWorld.terminal": STATES | {"None"},
    "GridWorld.terminal": STATES | {"None"},
    **{f"{name}.reward": set() for name in ("MaxCausalEntIRL.fit", "MaxCausalEntIRL.fit_moments", "MaxEntIRL.fit")},
    **{f"{name}.reward": set() for name in ("fit_jointly", "fit_preferences", "Problem with ends", "path_partition")},
    "epic_distance.reward": SURE,
    "epic_distance.other": SURE,
    "course.expert_policy.values": NINE,
    "greedy_policy.q": {"pairs of 1e300"},
    "Problem with ends.ends": NINE | {"None", "states of 1e300"},
    "Demonstrations.from_transitions.terminated": {"True", "an array of one"},
    "Demonstrations.terminated": set(),
    "Demonstrations.truncated": set(),
    "an imitation trajectory.terminal": {"True"},
    "Demonstrations.save.path": {"a text"},
    "LinearReward.features": {"a sparse matrix"},
    "course.recover_reward.features": {"a sparse matrix"},
    "LinearReward with ends.ends": {"None"},
    "MaxCausalEntIRL.horizon": {"None", "20"},
    "NeuralIRL.horizon": {"None", "20"},
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, str]]]:
    folder = tmp_path_factory.mktemp("given")
    command = [sys.executable, "-m", "tests.support.irl_bad_input"]
    paths = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=folder, env=paths)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, dict[str, str]]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_it_is_refused_in_a_message_or_is_no_mistake(name: str, outcomes) -> None:
    for argument, by_input in outcomes[name].items():
        assert by_input.keys() == BAD.keys()
        accepted = {what for what, came in by_input.items() if came == "accepted"}
        broken = {what: came for what, came in by_input.items() if came not in ("accepted", "refused")}
        assert broken == {}, argument
        assert accepted == RIGHT.get(f"{name}.{argument}", RIGHT.get(argument, set())), argument


def test_every_public_name_is_among_them() -> None:
    functions = {name for name in irl.__all__ if callable(getattr(irl, name))}
    results = {"ConvergenceWarning", "Divergence", "Episode", "Fit", "PathFit", "PreferenceFit"}
    assert functions - results <= {name.split(".")[0].split(" ")[0] for name in CALLS}


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


@pytest.mark.parametrize(
    ("fitter", "name", "value"),
    [
        (MaxCausalEntIRL, "horizon", 0),
        (MaxCausalEntIRL, "l2", -1e-9),
        (MaxCausalEntIRL, "l2", np.inf),
        (MaxCausalEntIRL, "temperature", 0.0),
        (MaxCausalEntIRL, "temperature", np.inf),
        (MaxCausalEntIRL, "tolerance", 0.0),
        (MaxCausalEntIRL, "discount", 1.01),
        (MaxCausalEntIRL, "discount", -0.01),
        (MaxEntIRL, "l2", -1e-9),
        (MaxEntIRL, "l2", np.inf),
        (MaxEntIRL, "tolerance", 0.0),
        (NeuralIRL, "learning_rate", 0.0),
        (NeuralIRL, "weight_decay", -1e-9),
        (NeuralIRL, "num_steps", 0),
    ],
)
def test_a_number_that_means_nothing_is_refused(fitter, name, value) -> None:
    with refused(f"{name} = {value}"):
        fitter(**{name: value})


@pytest.mark.parametrize(
    ("fitter", "least"),
    [
        (MaxCausalEntIRL, {"horizon": 1, "l2": 0.0, "discount": 0.0}),
        (MaxEntIRL, {"l2": 0.0}),
        (NeuralIRL, {"weight_decay": 0.0, "num_steps": 1}),
    ],
)
def test_the_least_that_means_something_is_taken_as_it_is(fitter, least) -> None:
    made = fitter(**least)
    assert {name: getattr(made, name) for name in least} == least


def test_the_package_loads_no_torch_and_no_optimiser() -> None:
    program = "import sys, posttrain.irl; print(*sorted({'torch', 'scipy.optimize', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""
