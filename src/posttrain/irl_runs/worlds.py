"""The `world` section as a world: its table, its rewards where they are known, and its layout on a page."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.sparse import csr_array

from posttrain.errors import UserError
from posttrain.irl.array_files import read_arrays
from posttrain.irl.grids import MOVES, IcyGridWorld, neighbours, tiles
from posttrain.irl.gymnasium_table import read_gymnasium
from posttrain.irl.mdp import TabularMDP
from posttrain.irl.planning import Reward, reward_array
from posttrain.irl_runs import require_library
from posttrain.options.irl import GymnasiumOptions, IcyGridOptions, TableOptions, WorldOptions

Move = tuple[int, int]

SPARSE_TABLE = ("data", "indices", "indptr")
"""The arrays of a sparse matrix, as scipy's csr_array has them."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Positions of states on a page: state y · width + x."""

    width: int
    height: int
    moves: tuple[Move, ...]
    """What each action adds to (x, y)."""
    upwards: bool
    """Whether y grows upwards, as in a diagram; else downwards, as in a text."""


GYMNASIUM_GRIDS: dict[str, tuple[Callable[[Any], tuple[int, int]], tuple[Move, ...]]] = {
    "FrozenLakeEnv": (lambda lake: lake.desc.shape, ((-1, 0), (0, 1), (1, 0), (0, -1))),
    "CliffWalkingEnv": (lambda cliff: cliff.shape, ((0, -1), (1, 0), (0, 1), (-1, 0))),
}
"""Environments that are grids: their height and width, and what each action adds to (x, y); y grows downwards."""


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """A world with the demonstrator's rewards and its layout, where they are known."""

    mdp: TabularMDP
    rewards: Reward | None
    """Per state, earned in it and on ending in it, or per action."""
    layout: Layout | None = None
    endless: "EndlessGrid | None" = None
    """The same grid for the course's algorithm."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EndlessGrid:
    """A grid in which episodes continue after the ends."""

    mdp: TabularMDP
    intended: Int[ndarray, "state action"]
    """Where each action leads when nothing slips."""
    ends: Int[ndarray, " end"]


def make_world(options: WorldOptions) -> World:
    match options:
        case IcyGridOptions():
            return icy_grid(options)
        case GymnasiumOptions():
            return gymnasium_world(options)
        case TableOptions():
            return table_world(options)


def icy_grid(options: IcyGridOptions) -> World:
    """An icy grid with and without its ends."""
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
    """The reward of each state of an icy grid: ground and terrain, or a reward that the recipe gives the state."""
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
    """The table and rewards of an environment."""
    require_library("gymnasium")
    import gymnasium

    try:
        arguments: dict[str, Any] = dict(options.options)
        env = gymnasium.make(options.env, **arguments)
    except (gymnasium.error.Error, ImportError, TypeError, ValueError, KeyError) as error:
        given = ", ".join(f"{name}={value!r}" for name, value in options.options.items())
        raise UserError(
            f"world.env = {options.env}: gymnasium.make({options.env!r}{', ' if given else ''}{given}) fails: {error}"
        ) from error
    mdp, layout = read_gymnasium(env), layout_of(env.unwrapped)
    env.close()
    return World(mdp=mdp, rewards=mdp.rewards, layout=layout)


def layout_of(bare: object) -> Layout | None:
    if type(bare).__name__ not in GYMNASIUM_GRIDS:
        return None
    shape, moves = GYMNASIUM_GRIDS[type(bare).__name__]
    height, width = shape(bare)
    return Layout(width=width, height=height, moves=moves, upwards=False)


def table_world(options: TableOptions) -> World:
    """A world from a file."""
    known = ("transitions", *SPARSE_TABLE, "rewards")
    arrays = read_arrays(options.path, needed=("start", "terminal"), known=known, where="world.path = ")
    try:
        mdp = mdp_of_arrays(arrays)
        if "rewards" not in arrays:
            return World(mdp=mdp, rewards=None)
        rewards = reward_array(mdp, arrays["rewards"])
    except UserError as error:
        raise UserError(f"world.path = {options.path}: {error}") from error
    return World(mdp=replace(mdp, rewards=rewards) if rewards.ndim == 2 else mdp, rewards=rewards)


def mdp_of_arrays(arrays: Mapping[str, ndarray]) -> TabularMDP:
    """The transitions of a file, dense or sparse."""
    start, terminal = arrays["start"], arrays["terminal"].ravel()
    if "transitions" in arrays:
        return TabularMDP.from_dense(arrays["transitions"], layout="state action next", start=start, terminal=terminal)
    missing = [name for name in SPARSE_TABLE if name not in arrays]
    if missing:
        raise UserError(f"it holds no array {missing[0]!r}; give `transitions`, or `data`, `indices` and `indptr`")
    for name in ("indices", "indptr"):
        if arrays[name].dtype.kind not in "iu":
            raise UserError(f"the array {name!r} holds {arrays[name].dtype}; give whole numbers")
    num_rows, num_states = arrays["indptr"].size - 1, start.size
    try:
        rows = csr_array(tuple(arrays[name] for name in SPARSE_TABLE), shape=(num_rows, num_states))
    except ValueError as error:
        raise UserError(f"the sparse table is malformed: {error}") from error
    num_actions = max(1, num_rows // max(1, num_states))
    return TabularMDP.from_sparse(rows, num_actions=num_actions, start=start, terminal=terminal)
