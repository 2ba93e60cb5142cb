"""What inverse RL is measured beside: qzed/irl-maxent's method, and `imitation` in an environment of its own."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy import ndarray

IMITATION = "1.0.1"
FOLDER = Path(__file__).parents[1] / ".venv-imitation"
WORKER = """
import sys, time, types
import numpy as np
from imitation.algorithms.mce_irl import mce_occupancy_measures, mce_partition_fh
given = np.load(sys.argv[1])
columns = types.SimpleNamespace(
    horizon=int(given["horizon"]), state_dim=len(given["start"]), action_dim=int(given["num_actions"]),
    transition_matrix=np.zeros((len(given["start"]), int(given["num_actions"]), len(given["start"]))),
    initial_state_dist=given["start"], reward_matrix=given["reward"],
)
columns.transition_matrix.reshape(-1, len(given["start"]))[given["rows"], given["columns"]] = given["chances"]
best = np.inf
for _ in range(int(given["repeats"])):
    begun = time.perf_counter()
    _, _, policy = mce_partition_fh(columns, reward=given["reward"])
    visits, _ = mce_occupancy_measures(columns, reward=given["reward"], pi=policy)
    best = min(best, time.perf_counter() - begun)
np.savez(sys.argv[2], seconds=best, policy=policy, visits=visits)
"""
TRAINER = """
import sys, time, types
import numpy as np, torch
from gymnasium import spaces
from imitation.algorithms.mce_irl import MCEIRL, mce_occupancy_measures
from imitation.rewards import reward_nets
from seals import base_envs
given = np.load(sys.argv[1])
size, actions = len(given["start"]), int(given["num_actions"])
table = np.zeros((size, actions, size))
table.reshape(-1, size)[given["rows"], given["columns"]] = given["chances"]
env = base_envs.TabularModelPOMDP(
    transition_matrix=table, observation_matrix=np.eye(size), reward_matrix=np.zeros(size),
    horizon=int(given["horizon"]), initial_state_dist=given["start"],
)
env.reset(seed=0)
torch.manual_seed(0)
net = reward_nets.BasicRewardNet(
    env.observation_space, env.action_space, hid_sizes=[], use_action=False, use_done=False, use_next_state=False,
)
begun = time.perf_counter()
irl = MCEIRL(
    given["demonstrated"], env, net, rng=np.random.default_rng(0), optimizer_kwargs={"lr": 1e-2},
)
irl.train(max_iter=1000)
seconds = time.perf_counter() - begun
_, visits = mce_occupancy_measures(env, pi=irl._policy.pi)
np.savez(sys.argv[2], seconds=seconds, visits=visits)
"""


def imitation_python() -> Path:
    """The interpreter of the environment, made on first use: imitation pins old versions of much."""
    python = FOLDER / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    made = FOLDER / ".ok"  # written last
    if not made.is_file():
        print(f"Making {FOLDER} with imitation {IMITATION}: a few minutes, most of it downloads", flush=True)
        if FOLDER.exists():
            shutil.rmtree(FOLDER)
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
        (FOLDER / ".gitignore").write_text("*\n", encoding="utf-8")
        install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", f"imitation=={IMITATION}"]
        subprocess.run(install, check=True)
        made.write_text(IMITATION, encoding="utf-8")
    return python


def in_imitation(program: str, given: dict[str, object]) -> dict[str, ndarray]:
    """Run a program there, from arrays to arrays."""
    with tempfile.TemporaryDirectory(prefix="irl-") as folder:
        source, result = Path(folder) / "given.npz", Path(folder) / "result.npz"
        np.savez(source, **given)
        command = [str(imitation_python()), "-W", "ignore", "-c", program, str(source), str(result)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return dict(np.load(result))


def qzed_visits(transitions: ndarray, terminal: list[int], start: ndarray, reward: ndarray) -> ndarray:
    """Expected visits by the method of qzed/irl-maxent (2008 version): linear space, 2·S sweeps, then a fixed point.

    `transitions` has the axes state, next, action, as there.
    """
    num_states, _, num_actions = transitions.shape
    gains, partition = np.exp(reward), np.zeros(num_states)
    tables = [np.array(transitions[:, :, action]) for action in range(num_actions)]
    partition[terminal] = 1.0
    for _ in range(2 * num_states):
        through = np.array([gains * table.dot(partition) for table in tables]).T
        partition = through.sum(axis=1)
    policy = through / partition[:, None]
    ended = np.copy(transitions)
    ended[terminal] = 0
    tables = [np.array(ended[:, :, action]) for action in range(num_actions)]
    visits, change = np.zeros(num_states), np.inf
    while change > 1e-5:
        flows = [tables[action].T.dot(policy[:, action] * visits) for action in range(num_actions)]
        updated = start + np.array(flows).sum(axis=0)
        change, visits = np.max(np.abs(updated - visits)), updated
    return visits


def qzed_fit(
    transitions: ndarray, terminal: list[int], start: ndarray, demonstrated: ndarray
) -> tuple[ndarray, ndarray]:
    """Weights of one feature per state by exponentiated gradient with step .2/(1 + t), as there, and their visits."""
    weights, step, moved = np.ones(len(start)), 0, np.inf
    while moved > 1e-4:
        visits = qzed_visits(transitions, terminal, start, weights)
        updated = weights * np.exp(0.2 / (1 + step) * (demonstrated - visits))
        moved, weights, step = np.max(np.abs(updated - weights)), updated, step + 1
    return weights, visits
