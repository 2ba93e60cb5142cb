"""The world of an inverse RL run: rewards, policies and visits, in the layout of the states."""

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy import ndarray

from posttrain.viewer.folder_files import content_or, json_number
from posttrain.viewer.kinds.kind_responses import GridArrows, GridMap, GridPage
from posttrain.viewer.kinds.run_pictures import pictures_of
from posttrain.viewer.metric_curves import Drawn, line_of
from posttrain.viewer.opened_run import OpenedRun
from posttrain.viewer.response_types import Curves, Number

MOST_BYTES = 64 << 20
"""Of an array, unpacked."""
MOST_CELLS = 250_000
ICY_MOVES = ((1, 0), (-1, 0), (0, 1), (0, -1))
"""Of an icy grid, for runs that did not keep them."""
REWARDS = {"expert_reward": "reward of the expert", "reward": "learned reward"}
VISITS = {"demonstrated_visits": "visits, demonstrated", "visits": "visits, learned policy"}
POLICIES = {"expert_policy": "policy of the expert", "policy": "learned policy"}
FACTS = ("iterations", "gap", "visits_gap", "value_lost", "value_lost_greedy", "steps_per_episode", "least_gap")
DIGITS = 6
NOTHING: Mapping[str, object] = MappingProxyType({})
Arrays = Mapping[str, ndarray]
NO_ARRAYS: Arrays = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The layout of states: state y · width + x."""

    width: int
    height: int
    upwards: bool
    moves: ndarray | None
    """What each action adds to (x, y); None if the world is not a grid."""


def grid_page(run: OpenedRun) -> GridPage:
    """Everything that the page of a world shows; unreadable parts are left out and named."""
    faults: list[str] = []
    summary = content_or(NOTHING, run.summary.content, faults)
    arrays = content_or(NO_ARRAYS, run.whole_file("reward.npz", grid_arrays, NO_ARRAYS).content, faults)
    lacks = [] if arrays or faults else ["reward.npz: the run is not finished"]
    shape, maps, arrows, terminal = Shape(width=1, height=1, upwards=False, moves=None), [], [], []
    if arrays:
        try:
            shape = grid_shape(run, arrays)
            maps, arrows, terminal = maps_of(arrays, shape), arrows_of(arrays, shape), terminal_cells(arrays)
        except (ValueError, IndexError, TypeError, KeyError) as error:
            faults.append(f"reward.npz: damaged ({str(error)[:120]})")
    if arrays and "expert_reward" not in arrays:
        lacks.append("reward of the expert: not known in this world")
    return GridPage(
        width=shape.width,
        height=shape.height,
        upwards=shape.upwards,
        is_grid=shape.moves is not None,
        terminal=terminal,
        maps=maps,
        arrows=arrows,
        facts={name: json_number(summary.get(name)) for name in FACTS if json_number(summary.get(name)) is not None},
        curves=fit_curves(run, faults),
        pictures=pictures_of(run, "rewards", "policy", "visits", "convergence"),
        lacks=lacks,
        faults=faults,
    )


def grid_arrays(content: bytes) -> Arrays:
    """The arrays of a file; nothing in it is run.  Raises ValueError."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as packed:
            too_large = [each.filename for each in packed.infolist() if each.file_size > MOST_BYTES]
        if too_large:
            raise ValueError(f"{too_large[0]} is larger than the viewer reads")
        with np.load(io.BytesIO(content), allow_pickle=False) as found:
            return {name: found[name] for name in found.files}
    except (zipfile.BadZipFile, EOFError, MemoryError, OverflowError, SyntaxError) as error:
        raise ValueError(str(error) or type(error).__name__) from error


def grid_shape(run: OpenedRun, arrays: Arrays) -> Shape:
    """The layout saved by the run, or an icy grid's; else all states in one row."""
    count = int(arrays["states"].max()) + 1
    world = run.section("world")
    if "shape" in arrays:
        width, height = (int(each) for each in arrays["shape"])
        shape = Shape(width=width, height=height, upwards=bool(arrays["upwards"]), moves=arrays["moves"])
    elif world.get("name") == "icy_grid":
        size = round(count**0.5)
        shape = Shape(width=size, height=size, upwards=True, moves=np.array(ICY_MOVES))
    else:
        shape = Shape(width=count, height=1, upwards=False, moves=None)
    if not 0 < shape.width * shape.height <= MOST_CELLS or count > shape.width * shape.height:
        raise ValueError(f"{count} states in {shape.width} × {shape.height} cells")
    return shape


def maps_of(arrays: Arrays, shape: Shape) -> list[GridMap]:
    """Rewards, each on its own scale, and visits, on one."""
    found = [
        grid_map(title, grid_cells(arrays, per_state(arrays[name]), shape))
        for name, title in known_arrays(arrays, REWARDS)
    ]
    visits = {title: grid_cells(arrays, arrays[name], shape) for name, title in known_arrays(arrays, VISITS)}
    most = max((float(np.nanmax(each)) for each in visits.values()), default=None)
    return [*found, *(grid_map(title, values, low=0.0, high=most) for title, values in visits.items())]


def known_arrays(arrays: Arrays, names: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(name, title) for name, title in names.items() if name in arrays]


def per_state(reward: ndarray) -> ndarray:
    """The mean over actions, if a reward depends on them."""
    found: ndarray = reward if reward.ndim == 1 else reward.mean(axis=1)
    return found


def grid_cells(arrays: Arrays, values: ndarray, shape: Shape) -> ndarray:
    page = np.full(shape.width * shape.height, np.nan)
    page[arrays["states"]] = values
    return page


def grid_map(name: str, values: ndarray, low: Number = None, high: Number = None) -> GridMap:
    ends = [float(np.nanmin(values)), float(np.nanmax(values))]
    return GridMap(
        name=name,
        values=plain_numbers(values),
        low=json_number(ends[0]) if low is None else low,
        high=json_number(ends[1]) if high is None else high,
    )


def arrows_of(arrays: Arrays, shape: Shape) -> list[GridArrows]:
    """The mean step of each policy, at the first time step if it depends on time."""
    if shape.moves is None:
        return []
    found = []
    for name, title in known_arrays(arrays, POLICIES):
        policy = arrays[name] if arrays[name].ndim == 2 else arrays[name][0]
        steps: list[list[Number] | None] = [None] * (shape.width * shape.height)
        ended = {int(each) for each in terminal_cells(arrays)}
        for state, step in zip(arrays["states"].tolist(), policy @ shape.moves, strict=True):
            steps[state] = None if state in ended else plain_numbers(step)
        found.append(GridArrows(name=title, steps=steps))
    return found


def terminal_cells(arrays: Arrays) -> list[int]:
    if "terminal" not in arrays:
        return []
    return [int(each) for each in arrays["states"][arrays["terminal"].astype(bool)]]


def plain_numbers(values: ndarray) -> list[Number]:
    return [json_number(float(f"{value:.{DIGITS}g}")) for value in values.tolist()]


def fit_curves(run: OpenedRun, faults: list[str]) -> list[Curves]:
    """What the fit reported in each iteration, a panel for each quantity."""
    metrics = run.metrics.whole()
    faults.extend(metrics.faults)
    lines = {name: line_of(metrics, Drawn(name, name)) for name in metrics.names if name != "iteration"}
    return [
        Curves(panel=name, unit="by iteration", scale="linear", lines=[line])
        for name, line in lines.items()
        if line is not None
    ]
