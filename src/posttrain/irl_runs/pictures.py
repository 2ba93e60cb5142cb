"""Pictures of a recovered reward, as PNG files.  Worlds with a `Layout` are drawn as maps, others by state number."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from posttrain.irl.mdp import TabularMDP
from posttrain.irl.planning import Policy, Reward
from posttrain.irl_runs.expert_episodes import ExpertEpisodes
from posttrain.irl_runs.methods import RecoveredReward, demonstrated_visits, expected_visits
from posttrain.irl_runs.worlds import Layout, World
from posttrain.runs.files import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PerState = Float[ndarray, " state"]

MOST_ARROWS = 25
"""Arrows along each side of a map; on a larger one each shows a block of states."""
BLUE, ORANGE, RED = "#2f6db3", "#e0862b", "#c8473f"


def draw_all(folder: Path, world: World, expert: ExpertEpisodes, recovered: RecoveredReward) -> None:
    """Draw rewards.png, policy.png, visits.png and convergence.png."""
    folder.mkdir(exist_ok=True)
    draw_rewards(folder / "rewards.png", world, {"expert": world.rewards, "learned": recovered.reward})
    stationary = recovered.policy.ndim == 2
    learned = "learned policy" if stationary else "learned policy, first step"
    first_step = recovered.policy if stationary else recovered.policy[0]
    draw_policies(folder / "policy.png", world, {"expert policy": expert.policy, learned: first_step})
    visits = {
        "demonstrated": demonstrated_visits(world, expert),
        "policy": expected_visits(world.mdp, recovered.policy),
    }
    draw_visits(folder / "visits.png", world, visits)
    draw_convergence(folder / "convergence.png", recovered.curve)


@contextmanager
def panels_of(
    picture: Path, world: World, given: Mapping[str, ndarray | None]
) -> "Iterator[tuple[Figure, list[tuple[Axes, str, ndarray]]]]":
    """A panel for each of the arrays that are known, saved in the end."""
    known = {name: array for name, array in given.items() if array is not None}
    figure, panels = panels_in_a_row(len(known), world.layout)
    yield figure, [(axes, name, array) for axes, (name, array) in zip(panels, known.items(), strict=True)]
    save_figure(figure, picture, dpi=110, bbox_inches="tight")


def draw_rewards(picture: Path, world: World, rewards: Mapping[str, Reward | None]) -> None:
    """The reward of each state, or the mean of its actions; each panel has another scale, which behaviour ignores."""
    with panels_of(picture, world, rewards) as (figure, panels):
        for axes, name, reward in panels:
            title = f"{name} reward" if reward.ndim == 1 else f"{name} reward, mean of actions"
            map_or_line(figure, axes, world, reward if reward.ndim == 1 else reward.mean(axis=1), title)


def draw_policies(picture: Path, world: World, policies: Mapping[str, Policy | None]) -> None:
    """Where each policy goes: on a map, arrows of the mean step; else the probability of each action."""
    with panels_of(picture, world, policies) as (figure, panels):
        for axes, name, policy in panels:
            if world.layout is not None:
                arrows(axes, world.mdp, world.layout, policy)
            else:
                page = by_number(world.mdp, policy)
                image = axes.imshow(page, aspect="auto", cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
                axes.set(xlabel="state", ylabel="action", yticks=range(policy.shape[1]))
                figure.colorbar(image, ax=axes, shrink=0.8, label="probability")
            axes.set_title(name, loc="left", fontsize=11)


def draw_visits(picture: Path, world: World, visits: Mapping[str, PerState | None]) -> None:
    """Expected visits of each state in an episode, all on one scale."""
    with panels_of(picture, world, visits) as (figure, panels):
        most = max(float(seen.max()) for _, _, seen in panels)
        for axes, name, seen in panels:
            map_or_line(figure, axes, world, seen, f"visits, {name}", limits=(0.0, most))


def draw_convergence(picture: Path, curve: Sequence[Mapping[str, float]]) -> None:
    """What falls from iteration to iteration, on a logarithmic scale: gradients, gaps, steps."""
    figure, (axes,) = panels_in_a_row(1)
    falling = [name for name in curve[0] if name != "objective"]
    for name, colour in zip(falling, (BLUE, ORANGE), strict=False):
        heights = np.array([numbers[name] for numbers in curve])
        axes.plot(np.where(heights > 0, heights, np.nan), color=colour, marker=".", label=name.replace("_", " "))
    axes.set_yscale("log")
    axes.set(xlabel="iteration", ylabel=", ".join(name.replace("_", " ") for name in falling[:2]))
    axes.set_title("What falls as the reward is fitted", loc="left", fontsize=11)
    _integer_ticks(axes.xaxis)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    save_figure(figure, picture, dpi=110, bbox_inches="tight")


def panels_in_a_row(num_panels: int, layout: Layout | None = None) -> "tuple[Figure, list[Axes]]":
    """A figure with a row of panels, as high as a map needs."""
    from matplotlib.figure import Figure

    height = 4.4 if layout is None else 0.9 + 3.6 * min(2.0, layout.height / layout.width)
    figure = Figure(figsize=(5.2 * num_panels, height), layout="constrained")
    return figure, list(figure.subplots(1, num_panels, squeeze=False)[0])


def map_or_line(
    figure: "Figure",
    axes: "Axes",
    world: World,
    worth: PerState,
    title: str,
    *,
    limits: tuple[float, float] | None = None,
) -> None:
    """A number for each state: as a map if the world has a layout, else over the numbers of its states."""
    axes.set_title(title, loc="left", fontsize=11)
    if world.layout is None:
        axes.plot(world.mdp.states, worth, ".", color=BLUE, markersize=4)
        axes.set(xlabel="state")
        axes.grid(alpha=0.25)
        if limits is not None:
            margin = 0.04 * (limits[1] - limits[0])  # points on the edge are seen whole
            axes.set_ylim(limits[0] - margin, limits[1] + margin)
        return
    low, high = limits or (None, None)
    image = axes.imshow(
        on_page(world.mdp, world.layout, worth), cmap="viridis", vmin=low, vmax=high, interpolation="nearest"
    )
    frame_map(axes, world.mdp, world.layout)
    figure.colorbar(image, ax=axes, shrink=0.8)


def on_page(mdp: TabularMDP, layout: Layout, worth: PerState) -> Float[ndarray, "height width"]:
    """A number for each place of a map; NaN where no state exists."""
    page = np.full(layout.height * layout.width, np.nan)
    page[mdp.states] = worth
    return page.reshape(layout.height, layout.width)


def by_number(mdp: TabularMDP, policy: Policy) -> Float[ndarray, "action number"]:
    """A column for each of the environment's state numbers; NaN where nothing is done or no state exists."""
    page = np.full((int(mdp.states.max()) + 1, mdp.num_actions), np.nan)
    page[mdp.states] = np.where(mdp.terminal[:, None], np.nan, policy)
    return page.T


def frame_map(axes: "Axes", mdp: TabularMDP, layout: Layout) -> None:
    """Turn the page the right way up and mark where episodes end."""
    y, x = np.divmod(mdp.states[mdp.terminal], layout.width)
    if len(x):
        size = 8 if layout.width <= MOST_ARROWS else 5
        axes.plot(x, y, "x", color=RED, markersize=size, markeredgewidth=1.5, clip_on=False, label="ends an episode")
        axes.legend(loc="upper right", bbox_to_anchor=(1.02, -0.08), frameon=False, fontsize=9, handletextpad=0)
    axes.set(xlabel="x", ylabel="y")
    _integer_ticks(axes.xaxis, axes.yaxis)
    axes.set_xlim(-0.5, layout.width - 0.5)
    bottom, top = -0.5, layout.height - 0.5
    axes.set_ylim((bottom, top) if layout.upwards else (top, bottom))
    axes.set_aspect("equal")


def _integer_ticks(*axes: "Axis") -> None:
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.set_major_locator(MaxNLocator(integer=True))


def arrows(axes: "Axes", mdp: TabularMDP, layout: Layout, policy: Policy) -> None:
    """The mean intended step of each state, or of each block of states."""
    moves = np.where(mdp.terminal[:, None], np.nan, policy @ np.array(layout.moves, dtype=np.float64))
    y, x = np.divmod(mdp.states, layout.width)
    width = -(-max(layout.width, layout.height) // MOST_ARROWS)
    per_row = -(-layout.width // width)
    block = (y // width) * per_row + x // width
    where = np.unique(block[~mdp.terminal])
    acting = ~mdp.terminal
    num = np.bincount(block[acting], minlength=where.max() + 1)[where]
    mean = [
        np.bincount(block[acting], column[acting], minlength=where.max() + 1)[where] / num
        for column in (x, y, moves[:, 0], moves[:, 1])
    ]
    axes.quiver(*mean, angles="xy", scale_units="xy", scale=1.2 / width, pivot="mid", color=BLUE, width=0.006)
    frame_map(axes, mdp, layout)
