"""Every public function of inverse RL, given what it cannot use, in a process without a type checker.

`python -m tests.support.irl_bad_input` prints what came of each case, as JSON: "refused", "accepted", or the
exception that it ended with.  It writes files where it is run.
"""

import contextlib
import io
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import torch
from scipy.sparse import csr_array

from posttrain import irl
from posttrain.errors import UserError
from posttrain.irl import course
from posttrain.irl.comparison import occupancy_from, policy_value
from posttrain.irl.counting import in_world, visit_totals
from posttrain.irl.paths import path_partition
from posttrain.irl_runs.environment import LearnedReward, TabularEnvironment
from posttrain.neural_irl import NeuralIRL

BAD: dict[str, object] = {
    "None": None,
    "a text": "12",
    "an empty text": "",
    "bytes": b"12",
    "True": True,
    "NaN": np.nan,
    "infinity": np.inf,
    "minus infinity": -np.inf,
    "-1": -1,
    ".5": 0.5,
    "1e300": 1e300,
    "10**400": 10**400,
    "20": 20,
    "complex": 1 + 2j,
    "an object": object(),
    "a function": len,
    "a class": dict,
    "a dictionary": {"a": 1},
    "a set": {1, 2},
    "an empty list": [],
    "a list of texts": ["a", "b"],
    "a list of None": [None, None],
    "lists of different lengths": [[1.0], [1.0, 2.0]],
    "an array of one": np.array([1.0]),
    "an array of objects": np.array([None, "a"], dtype=object),
    "an array of complex numbers": np.full((9, 4), 1j),
    "an array of dates": np.array(["2020-01-01"], dtype="datetime64[D]"),
    "an array of the wrong shape": np.ones((2, 3, 4, 5)),
    "states of NaN": np.full(9, np.nan),
    "pairs of NaN": np.full((9, 4), np.nan),
    "states of 1e300": np.full(9, 1e300),
    "features of 1e300": np.full((9, 9), 1e300),
    "pairs of 1e300": np.full((9, 4), 1e300),
    "masked states": np.ma.array(np.full(9, 1 / 9), mask=np.arange(9) == 3),
    "masked pairs": np.ma.array(np.full((9, 4), 0.25), mask=np.arange(36).reshape(9, 4) == 3),
    "a list with masked rows": [np.ma.array(np.full(4, 0.25), mask=np.arange(4) == 3)] * 9,
    "flags of whole numbers": np.eye(9, dtype=int)[8],
    "a start that adds up to 5": np.full(9, 5 / 9),
    "a sparse matrix": csr_array(np.full((9, 4), 0.25)),
    "a tensor with a gradient": torch.ones(9, requires_grad=True),
}


@dataclass(frozen=True)
class Call:
    """A function with arguments that it can use."""

    function: Callable[..., object]
    good: Mapping[str, Any]


def outcome(call: Call, argument: str, bad: object) -> str:
    """What comes of a call with one argument replaced."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            call.function(**{**call.good, argument: bad})
    except UserError as error:
        return "refused" if str(error).strip() else "refused without a word"
    except Exception as error:  # noqa: BLE001  whichever it is, it is what is looked for
        return f"{type(error).__name__}: {error}"[:150]
    return "accepted"


GRID = irl.GridWorld(3)
DENSE = GRID.transitions.toarray().reshape(9, 4, 9)
ENDLESS = irl.GridWorld(3, terminal=())
STATES = irl.LinearReward(features=np.eye(9))
UNIFORM, COST = np.full((9, 4), 0.25), np.full(9, -2.0)
WALKS = irl.sample_demonstrations(GRID, UNIFORM, num_episodes=20, rng=np.random.default_rng(0))
OTHERS = irl.sample_demonstrations(GRID, UNIFORM, num_episodes=20, rng=np.random.default_rng(1))
FITTER = irl.MaxCausalEntIRL(discount=0.9)
FIT = FITTER.fit(GRID, STATES, WALKS)
PROBLEM = irl.Problem(mdp=GRID, reward=COST, discount=0.9)
STEPS = [[(4, 0, 5), (5, 2, 8)]]
ARRAYS = {name: getattr(WALKS, name) for name in ("states", "actions", "lengths", "terminated", "truncated")}
EPISODE = {"states": [4, 5, 8], "actions": [0, 2], "terminated": True, "truncated": False}
MINARI = {"observations": [4, 5, 8], "actions": [0, 2], "terminations": [False, True], "truncations": [False, False]}
TRAJECTORY = {"obs": [4, 5, 8], "acts": [0, 2], "terminal": True, "infos": None}

WORLD = {"mdp": GRID, "reward": COST, "discount": 0.9}
FITTED = {"mdp": GRID, "reward": STATES}


def stepped(action: object, *, learned: bool) -> None:
    """One action in an environment that has been begun."""
    table = TabularEnvironment(GRID)
    env = LearnedReward(table, GRID, COST, discount=0.9) if learned else table
    env.reset(seed=0)
    env.step(action)


def trained(**given: Any) -> None:
    """A step or two of a neural fit."""
    settings = {name: given.pop(name) for name in list(given) if name in NEURAL}
    NeuralIRL(**{**NEURAL, **settings}).fit(**given)


def of_records(maker: Callable[..., object], good: Mapping[str, object]) -> Callable[..., object]:
    """Demonstrations from one record with these attributes."""
    return lambda **given: maker([SimpleNamespace(**{**good, **given})])


NEURAL: dict[str, Any] = {"discount": 0.9, "num_steps": 2, "learning_rate": 0.01, "weight_decay": 0.0}
NEURAL |= {"temperature": 1.0, "horizon": None, "tolerance": 1e-4}


CALLS: dict[str, Call] = {
    "TabularMDP": Call(irl.TabularMDP, {name: getattr(GRID, name) for name in irl.TabularMDP.__dataclass_fields__}),
    "TabularMDP.from_sparse": Call(
        irl.TabularMDP.from_sparse, {"transitions": GRID.transitions, "num_actions": 4, "start": 0, "terminal": [8]}
    ),
    "TabularMDP.from_dense": Call(
        irl.TabularMDP.from_dense, {"probabilities": DENSE, "layout": "state action next", "start": 0, "terminal": [8]}
    ),
    "IcyGridWorld": Call(irl.IcyGridWorld, {"size": 3, "slip": 0.1, "start": 0, "terminal": [8]}),
    "GridWorld": Call(irl.GridWorld, {"size": 3, "start": 0, "terminal": [8]}),
    "tiles": Call(irl.tiles, {"size": 3, "width": 1}),
    "read_gymnasium": Call(irl.read_gymnasium, {"env": gymnasium.make("FrozenLake-v1")}),
    "read_gymnasium of a table": Call(
        lambda **given: irl.read_gymnasium(SimpleNamespace(**given)),
        {"P": {0: {0: [(1.0, 1, 0.0, True)]}}, "initial_state_distrib": [1.0, 0.0]},
    ),
    "value_iteration": Call(irl.value_iteration, {**WORLD, "tolerance": 1e-6}),
    "action_values": Call(irl.action_values, {**WORLD, "values": COST}),
    "greedy_policy": Call(irl.greedy_policy, {"mdp": GRID, "q": UNIFORM}),
    "Problem": Call(irl.Problem, {**WORLD, "temperature": 1.0}),
    "Problem with ends": Call(irl.Problem, {**WORLD, "reward": UNIFORM, "ends": COST}),
    "soft_value_iteration": Call(irl.soft_value_iteration, {"problem": PROBLEM, "tolerance": 1e-6}),
    "soft_policy_iteration": Call(irl.soft_policy_iteration, {"problem": PROBLEM, "guess": COST}),
    "soft_finite_horizon": Call(irl.soft_finite_horizon, {"problem": PROBLEM, "horizon": 3}),
    "occupancy": Call(irl.occupancy, {"mdp": GRID, "policy": UNIFORM, "discount": 0.9}),
    "occupancy_from": Call(occupancy_from, {"mdp": GRID, "policy": UNIFORM, "start": 0, "discount": 0.9}),
    "finite_occupancy": Call(irl.finite_occupancy, {"mdp": GRID, "policy": UNIFORM, "discount": 0.9, "horizon": 3}),
    "Demonstrations": Call(irl.Demonstrations, ARRAYS),
    "Demonstrations.from_arrays": Call(irl.Demonstrations.from_arrays, {"arrays": ARRAYS}),
    "Demonstrations.from_episodes": Call(irl.Demonstrations.from_episodes, {"episodes": [*WALKS]}),
    "an episode": Call(of_records(irl.Demonstrations.from_episodes, EPISODE), EPISODE),
    "Demonstrations.from_transitions": Call(
        irl.Demonstrations.from_transitions, {"episodes": STEPS, "terminated": True}
    ),
    "Demonstrations.from_minari": Call(irl.Demonstrations.from_minari, {"episodes": [SimpleNamespace(**MINARI)]}),
    "a minari episode": Call(of_records(irl.Demonstrations.from_minari, MINARI), MINARI),
    "Demonstrations.from_imitation": Call(
        irl.Demonstrations.from_imitation, {"trajectories": [SimpleNamespace(**TRAJECTORY)], "time_limit": None}
    ),
    "an imitation trajectory": Call(of_records(irl.Demonstrations.from_imitation, TRAJECTORY), TRAJECTORY),
    "Demonstrations.load": Call(irl.Demonstrations.load, {"path": Path("walks.npz")}),
    "Demonstrations.save": Call(lambda path: WALKS.save(path), {"path": Path("saved.npz")}),
    "in_world": Call(in_world, {"demonstrations": WALKS, "mdp": GRID}),
    "visit_totals": Call(visit_totals, {"demonstrations": WALKS, "num_states": 9}),
    "sample_demonstrations": Call(
        irl.sample_demonstrations, {"mdp": GRID, "policy": UNIFORM, "num_episodes": 2, "rng": 0, "max_steps": 50}
    ),
    "LinearReward": Call(
        lambda mdp, **given: irl.LinearReward(**given).bound(mdp), {"mdp": GRID, "features": np.eye(9), "on": "state"}
    ),
    "LinearReward with ends": Call(
        lambda mdp, **given: irl.LinearReward(**given, on="state_action").bound(mdp),
        {"mdp": GRID, "features": np.ones((36, 2)), "ends": np.ones((9, 2))},
    ),
    "MaxCausalEntIRL": Call(
        irl.MaxCausalEntIRL, {name: getattr(FITTER, name) for name in irl.MaxCausalEntIRL.__dataclass_fields__}
    ),
    "MaxCausalEntIRL.fit": Call(FITTER.fit, {**FITTED, "demonstrations": WALKS, "watch": None}),
    "MaxCausalEntIRL.fit_moments": Call(FITTER.fit_moments, {**FITTED, "moments": FIT.expected, "watch": None}),
    "MaxCausalEntIRL.setting": Call(FITTER.setting, {"features": STATES.bound(GRID), "start": GRID.start}),
    "MaxEntIRL": Call(irl.MaxEntIRL, {"gradient": "tilted", "l2": 1e-3, "tolerance": 1e-8, "max_iterations": 9}),
    "MaxEntIRL.fit": Call(irl.MaxEntIRL().fit, {**FITTED, "demonstrations": WALKS, "watch": None}),
    "fit_jointly": Call(
        irl.fit_jointly,
        {"irl": FITTER, **FITTED, "demonstrations": WALKS, "comparisons": (WALKS, OTHERS), "watch": None},
    ),
    "fit_preferences": Call(
        irl.fit_preferences, {"irl": FITTER, **FITTED, "comparisons": (WALKS, OTHERS), "watch": None}
    ),
    "smallest_gap": Call(irl.smallest_gap, {"setting": FIT.setting, "moments": FIT.expected}),
    "identifiability": Call(irl.identifiability, {"fit": FIT}),
    "confidence_intervals": Call(irl.confidence_intervals, {"fit": FIT, "demonstrations": WALKS, "level": 0.9}),
    "policy_divergence": Call(irl.policy_divergence, {**WORLD, "other": -COST, "temperature": 1.0}),
    "policy_value": Call(policy_value, {**WORLD, "policy": UNIFORM}),
    "expected_value_difference": Call(irl.expected_value_difference, {**WORLD, "policy": UNIFORM}),
    "transfer_loss": Call(irl.transfer_loss, {**WORLD, "learned": -COST}),
    "epic_distance": Call(irl.epic_distance, {"reward": np.eye(9)[8], "other": np.arange(9.0), "discount": 0.9}),
    "course.feature_expectations": Call(course.feature_expectations, {"features": np.eye(9), "demonstrations": WALKS}),
    "course.start_histogram": Call(course.start_histogram, {"num_states": 9, "demonstrations": WALKS}),
    "course.local_action_probabilities": Call(
        course.local_action_probabilities, {"mdp": ENDLESS, "terminal": np.array([8]), "reward": COST}
    ),
    "course.expected_visitations": Call(
        course.expected_visitations,
        {"mdp": ENDLESS, "terminal": np.array([8]), "start": ENDLESS.start, "policy": UNIFORM},
    ),
    "course.recover_reward": Call(
        course.recover_reward,
        {
            "mdp": ENDLESS,
            "features": np.eye(9),
            "terminal": np.array([8]),
            "demonstrations": WALKS,
            "step_size": 0.1,
            "tolerance": 1e-2,
        },
    ),
    "course.expert_policy": Call(course.expert_policy, {"intended": GRID.intended, "values": COST, "steepness": 50.0}),
    "path_partition": Call(path_partition, {"mdp": GRID, "reward": COST, "guess": COST}),
    "LearnedReward": Call(
        lambda env, mdp, reward, discount, state_of: LearnedReward(
            env, mdp, reward, discount=discount, state_of=state_of
        ),
        {"env": TabularEnvironment(GRID), **WORLD, "state_of": int},
    ),
    "LearnedReward.step": Call(lambda action: stepped(action, learned=True), {"action": 0}),
    "TabularEnvironment": Call(TabularEnvironment, {"mdp": GRID}),
    "TabularEnvironment.step": Call(lambda action: stepped(action, learned=False), {"action": 0}),
    "NeuralIRL": Call(NeuralIRL, NEURAL),
    "NeuralIRL.fit": Call(
        trained,
        {"mdp": GRID, "network": torch.nn.Linear(9, 1), "inputs": torch.eye(9), "demonstrations": WALKS, "watch": None},
    ),
}


def main() -> None:
    WALKS.save("walks.npz")
    found = {
        name: {argument: {what: outcome(call, argument, bad) for what, bad in BAD.items()} for argument in call.good}
        for name, call in CALLS.items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
