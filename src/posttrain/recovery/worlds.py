"""The `world` section as a world: its table, what its states are worth where that is known, and how to draw it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.sparse import csr_array

from posttrain.errors import UserError
from posttrain.irl.array_files import read_file
from posttrain.irl.grids import MOVES, IcyGridWorld, neighbours, tiles
from posttrain.irl.mdp import TabularMDP
from posttrain.irl.planning import Reward, check_reward
from posttrain.recovery.needs import require_gymnasium
from posttrain.recovery.world_options import GymnasiumOptions, IcyGridOptions, TableOptions, WorldOptions

Move = tuple[int, int]

GYMNASIUM_MOVES: dict[str, tuple[Move, ...]] = {
    "FrozenLakeEnv": ((-1, 0), (0, 1), (1, 0), (0, -1)),
    "CliffWalkingEnv": ((0, -1), (1, 0), (0, 1), (-1, 0)),
}
"""What each action adds to (x, y), for environments that are grids; y grows downwards."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How states lie on a page: state y · width + x."""

    width: int
    height: int
    moves: tuple[Move, ...]
    """What each action adds to (x, y)."""
    upwards: bool
    """Whether y grows upwards, as in a diagram; else downwards, as in a text."""


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """Where the demonstrator acts."""

    mdp: TabularMDP
    rewards: Reward | None
    """What the demonstrator is known to be after: per state, earned in it and on ending in it, or per action."""
    layout: Layout | None = None
    endless: "EndlessGrid | None" = None
    """The same grid as the course takes it, whose ends can be left again."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EndlessGrid:
    """A grid that goes on after its ends."""

    mdp: TabularMDP
    intended: Int[ndarray, "state action"]
    """Where each action leads when nothing slips."""
    ends: Int[ndarray, " end"]


def make_world(options: WorldOptions) -> World:
    """Build the world of a recipe."""
    match options:
        case IcyGridOptions():
            return icy_grid(options)
        case GymnasiumOptions():
            return gymnasium_world(options)
        case TableOptions():
            return table_world(options)


def icy_grid(options: IcyGridOptions) -> World:
    """A grid and its ground."""
    size, num_states = options.size, options.size**2
    ends = np.unique(np.array(options.ends, dtype=np.int64) % num_states)
    starts = np.array(options.starts, dtype=np.int64) % num_states
    if not len(starts):
        starts = np.setdiff1d(np.arange(num_states), ends)
    if not len(starts):
        raise UserError("world.ends: every state ends an episode; leave one to start in")
    start = np.bincount(starts, minlength=num_states) / len(starts)
    return World(
        mdp=IcyGridWorld(size, options.slip, start=start, terminal=ends.tolist()),
        rewards=ground(options),
        layout=Layout(width=size, height=size, moves=MOVES, upwards=True),
        endless=EndlessGrid(
            mdp=IcyGridWorld(size, options.slip, start=start, terminal=()), intended=neighbours(size), ends=ends
        ),
    )


def ground(options: IcyGridOptions) -> Float[ndarray, " state"]:
    """What being in each state is worth."""
    num_states = options.size**2
    worth = np.full(num_states, options.ground)
    if options.terrain:
        in_tile = tiles(options.size, options.terrain)[:, 1:]
        draws = np.random.default_rng(options.terrain_seed).uniform(options.terrain_low, 0, in_tile.shape[1])
        worth += in_tile @ draws
    for state, reward in options.rewards:
        worth[state % num_states] = reward
    return worth


def gymnasium_world(options: GymnasiumOptions) -> World:
    """The table of an environment, and its own rewards."""
    require_gymnasium()
    import gymnasium

    try:
        arguments: dict[str, Any] = dict(options.options)
        env = gymnasium.make(options.env, **arguments)
    except (gymnasium.error.Error, TypeError, ValueError, KeyError) as error:
        given = ", ".join(f"{name}={value!r}" for name, value in options.options.items())
        raise UserError(
            f"world.env = {options.env}: gymnasium.make({options.env!r}{', ' if given else ''}{given}) fails: {error}"
        ) from error
    mdp = TabularMDP.from_gymnasium(env)
    bare = env.unwrapped
    moves = GYMNASIUM_MOVES.get(type(bare).__name__)
    layout = None
    if moves is not None:
        height, width = getattr(bare, "shape", None) or np.asarray(getattr(bare, "desc")).shape  # noqa: B009
        layout = Layout(width=int(width), height=int(height), moves=moves, upwards=False)
    env.close()
    return World(mdp=mdp, rewards=mdp.rewards, layout=layout)


def table_world(options: TableOptions) -> World:
    """A world from a file."""
    where, arrays = f"world.path = {options.path}", read_arrays(Path(options.path), "world.path")
    for name in ("start", "terminal"):
        if name not in arrays:
            raise UserError(f"{where}: it holds no array {name!r}; see `posttrain irl --help`")
    start, terminal = numbers(arrays, "start", where), whole_numbers(arrays, "terminal", where).ravel().tolist()
    if "transitions" in arrays:
        table = numbers(arrays, "transitions", where)
        mdp = TabularMDP.from_dense(table, layout="state action next", start=start, terminal=terminal)
    else:
        mdp = sparse_world(arrays, start, terminal, where)
    if "rewards" not in arrays:
        return World(mdp=mdp, rewards=None)
    rewards = numbers(arrays, "rewards", where)
    check_reward(mdp, rewards)
    if rewards.ndim == 2:
        mdp = replace(mdp, rewards=rewards)
    return World(mdp=mdp, rewards=rewards)


def sparse_world(arrays: dict[str, ndarray], start: ndarray, terminal: list[int], where: str) -> TabularMDP:
    """A world from the arrays of a sparse table."""
    missing = [name for name in ("data", "indices", "indptr") if name not in arrays]
    if missing:
        raise UserError(
            f"{where}: it holds no array {missing[0]!r}; give `transitions`, or `data`, `indices` and `indptr`"
        )
    data = numbers(arrays, "data", where)
    indices, indptr = (whole_numbers(arrays, name, where) for name in ("indices", "indptr"))
    shape = (indptr.size - 1, start.size)
    try:
        table = csr_array((data, indices, indptr), shape=shape)
    except ValueError as error:
        raise UserError(f"{where}: the sparse table is malformed: {error}") from error
    num_actions = max(1, shape[0] // max(1, shape[1]))
    return TabularMDP.from_sparse(table, num_actions=num_actions, start=start, terminal=terminal)


def numbers(arrays: dict[str, ndarray], name: str, where: str) -> ndarray:
    """An array of a file, as float64."""
    if arrays[name].dtype.kind not in "biuf":
        raise UserError(f"{where}: its array {name!r} holds {arrays[name].dtype}; use numbers")
    return arrays[name].astype(np.float64)


def whole_numbers(arrays: dict[str, ndarray], name: str, where: str) -> ndarray:
    """An array of a file that numbers things."""
    if arrays[name].size and arrays[name].dtype.kind not in "iu":
        raise UserError(f"{where}: its array {name!r} holds {arrays[name].dtype}; use whole numbers")
    return arrays[name].astype(np.int64)


def read_arrays(path: Path, where: str) -> dict[str, ndarray]:
    """The arrays of an .npz file."""
    found = read_numpy(path, where)
    if isinstance(found, ndarray):
        raise UserError(f"{where} = {path}: holds one array without a name; give an .npz file, as np.savez writes it")
    return found


def read_numpy(path: Path, where: str) -> ndarray | dict[str, ndarray]:
    """The content of an .npy or .npz file, which the option `where` names."""
    try:
        found = read_file(path)
    except UserError as error:
        raise UserError(f"{where} = {error}") from error
    if isinstance(found, ndarray) and found.dtype.kind not in "biuf":
        raise UserError(f"{where} = {path}: holds {found.dtype}; use numbers")
    return found
