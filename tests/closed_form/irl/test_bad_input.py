"""What a function of inverse RL cannot use is refused in a message, whichever argument it is given as."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain import irl
from tests.support.irl_bad_input import BAD, CALLS

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
