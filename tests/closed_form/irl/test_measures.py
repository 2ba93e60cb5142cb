"""What a recovered reward is worth, on a dry 2 × 2 grid at -1 a step, and pictures of worlds and rewards."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.quiver import Quiver

from posttrain.irl.demonstrations import Demonstrations
from posttrain.irl.grids import MOVES, GridWorld
from posttrain.irl_runs.expert_episodes import ExpertEpisodes
from posttrain.irl_runs.methods import RecoveredReward, best_states, expected_visits, policy_measures, value_lost
from posttrain.irl_runs.pictures import (
    arrows,
    by_number,
    draw_convergence,
    draw_policies,
    draw_rewards,
    draw_visits,
    map_or_line,
    on_page,
)
from posttrain.irl_runs.worlds import World, make_world
from posttrain.options.irl import GymnasiumOptions, IcyGridOptions
from tests.support.irl_worlds import newest

GRID = GridWorld(2)
COSTS = np.array([-1.0, -1.0, -1.0, 0.0])
WORLD = World(mdp=GRID, rewards=COSTS)
UNIFORM = np.full((4, 4), 0.25)
MOSTLY_RIGHT = np.full((4, 4), 0.2) + 0.2 * np.eye(4)[[0, 2, 0, 0]]  # 0 → 1 → 3 and 2 → 3 are the likeliest moves
INTO_THE_WALL = np.eye(4)[[1, 1, 1, 1]]
BEST = np.eye(4)[[0, 2, 0, 0]]


def expert(policy: np.ndarray | None = None, *, reward: np.ndarray | None = COSTS) -> ExpertEpisodes:
    """One episode, 0 → 1 → 3."""
    episodes = Demonstrations.from_transitions([[(0, 0, 1), (1, 2, 3)]])
    return ExpertEpisodes(episodes=episodes, reward=reward, policy=policy, discount=1.0)


def recovered(policy: np.ndarray, *, reward: np.ndarray = COSTS) -> RecoveredReward:
    found = {"weights": np.zeros(4), "expected": np.zeros(4), "moments": np.array([1.0, 1, 0, 1])}
    return RecoveredReward(reward=reward, policy=policy, converged=True, curve=({},), **found)


def test_measures_of_wandering_at_random() -> None:
    """Visits D(0) = 1 + D(0)/2 + D(1)/2 and D(1) = D(0)/4 + D(1)/2: 4, 2, 2 and the end once, where (1, 1, 0, 1) was
    shown; 8 steps, of which the best way takes 2."""
    measures = policy_measures(WORLD, expert(BEST), recovered(UNIFORM))
    assert measures["gap"] == 1, "the expected features are 0 here"
    assert measures["visits_gap"] == pytest.approx(3)
    assert measures["steps_per_episode"] == pytest.approx(8)
    assert measures["value_lost"] == pytest.approx(6)
    assert measures["value_lost_by_expert"] == pytest.approx(0)
    assert measures["best_states"] == [3, 0, 1, 2]


def test_the_greedy_policy_takes_the_likeliest_actions() -> None:
    measures = policy_measures(WORLD, expert(), recovered(MOSTLY_RIGHT))
    assert measures["value_lost_greedy"] == pytest.approx(0)
    assert measures["value_lost"] > 1
    assert measures["value_lost_by_expert"] is None, "nobody is known to have acted"


def test_a_policy_of_two_steps_visits_three_states_and_has_no_value_without_horizon() -> None:
    measures = policy_measures(WORLD, expert(), recovered(np.stack([UNIFORM, UNIFORM])))
    assert measures["steps_per_episode"] == pytest.approx(2), "no end is nearer than that"
    # Once in 0, then there with 1/2, or beside it; then 3/8 in 0 and 1/4 each beside it: 15/8, 1/2, 1/2 and 1/8.
    assert measures["visits_gap"] == pytest.approx(7 / 8)
    assert measures["value_lost"] is None
    assert measures["value_lost_greedy"] is None


def test_what_cannot_be_measured_is_none() -> None:
    assert expected_visits(GRID, INTO_THE_WALL) is None
    measures = policy_measures(WORLD, expert(), recovered(INTO_THE_WALL))
    assert measures["visits_gap"] is measures["steps_per_episode"] is measures["value_lost"] is None
    assert value_lost(WORLD, expert(reward=None), UNIFORM) is None
    assert value_lost(WORLD, expert(), None) is None


def test_best_states_are_five_by_reward_and_then_by_number() -> None:
    worth = np.array([0.0, 3, 1, 1, 3, 2, -5, 2, 9.0])
    assert best_states(GridWorld(3), recovered(np.full((9, 4), 0.25), reward=worth)) == [8, 1, 4, 5, 7]
    assert best_states(GRID, recovered(UNIFORM, reward=np.zeros((4, 4)))) is None


def drawn_arrows(world: World, policy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where arrows stand, and what they point at."""
    axes = Figure().subplots()
    arrows(axes, world.mdp, world.layout, policy)
    (quiver,) = [each for each in axes.collections if isinstance(each, Quiver)]
    return np.column_stack([quiver.X, quiver.Y]), np.column_stack([quiver.U, quiver.V])


def test_an_arrow_is_the_mean_step_of_its_state() -> None:
    world = make_world(IcyGridOptions(size=3))
    policy = np.tile([0.5, 0.0, 0.25, 0.25], (9, 1))  # +x half of the time, else up or down
    places, steps = drawn_arrows(world, policy)
    assert places.tolist() == [[x, y] for y in range(3) for x in range(3)][:8], "none at the goal"
    assert np.allclose(steps, [0.5, 0.0])
    assert MOVES[0] == (1, 0)


def test_on_a_large_map_an_arrow_is_the_mean_of_a_block_without_its_ends() -> None:
    world = make_world(IcyGridOptions(size=50, ends=(0,), starts=(1,)))
    policy = np.tile([1.0, 0, 0, 0], (2500, 1))
    policy[50] = [0, 0, 1.0, 0]  # the state above the end goes up
    places, steps = drawn_arrows(world, policy)
    assert len(places) == 25 * 25
    # The first block holds states 0, 1, 50 and 51; the mean is over the last three: two go right and one up.
    assert places[0] == pytest.approx([(1 + 0 + 1) / 3, (0 + 1 + 1) / 3])
    assert steps[0] == pytest.approx([2 / 3, 1 / 3])
    assert np.allclose(steps[1:], [1, 0])


def test_a_map_puts_each_state_in_its_place_and_leaves_gaps_blank() -> None:
    world = make_world(GymnasiumOptions(env="FrozenLake-v1", options={"map_name": "4x4", "is_slippery": False}))
    page = on_page(world.mdp, world.layout, world.mdp.states.astype(float))
    assert page.shape == (4, 4)
    assert np.array_equal(page[np.isfinite(page)], np.sort(world.mdp.states))
    assert page[3, 3] == 15, "the present, lower right"
    figure = Figure()
    axes = figure.subplots()
    map_or_line(figure, axes, world, np.arange(world.mdp.num_states, dtype=float), "rewards")
    assert axes.get_ylim() == (3.5, -0.5), "its first row is on top"
    grid = make_world(IcyGridOptions(size=3))
    axes = figure.subplots()
    map_or_line(figure, axes, grid, np.arange(9.0), "rewards")
    assert axes.get_ylim() == (-0.5, 2.5), "the course's first row is at the bottom"


def test_worlds_that_are_no_grids_are_drawn_by_number(tmp_path: Path) -> None:
    world = make_world(GymnasiumOptions(env=newest("Taxi")))
    assert world.layout is None
    figure = Figure()
    axes = figure.subplots()
    map_or_line(figure, axes, world, world.mdp.rewards.mean(axis=1), "rewards")
    (line,) = axes.lines
    assert np.array_equal(line.get_xdata(), world.mdp.states)
    draw_rewards(tmp_path / "rewards.png", world, {"expert": None, "learned": world.mdp.rewards})
    curve = [{"objective": 2.0, "largest_gradient": 1.0}, {"objective": 1.0, "largest_gradient": 0.0}]
    draw_convergence(tmp_path / "curve.png", curve)
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("rewards.png", "curve.png"))


def test_a_policy_of_a_world_that_is_no_grid_stands_under_the_environment_s_numbers() -> None:
    mdp = make_world(GymnasiumOptions(env=newest("Taxi"))).mdp
    policy = np.random.default_rng(0).dirichlet(np.ones(6), mdp.num_states)
    page = by_number(mdp, policy)
    assert page.shape == (6, 500)
    acting = np.flatnonzero(~mdp.terminal)
    assert np.array_equal(page[:, mdp.states[acting]].T, policy[acting])
    assert np.isnan(page).all(axis=0).sum() == 500 - len(acting), "blank where none can be, or nothing is done"


def margins(picture: Path) -> np.ndarray:
    """The outermost pixels."""
    pixels = imread(picture)[:, :, :3]
    return np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])


def test_nothing_of_a_picture_is_cut_off_whatever_the_shape_of_the_map(tmp_path: Path) -> None:
    for world in (
        make_world(GymnasiumOptions(env=newest("CliffWalking"))),  # 4 × 12
        make_world(IcyGridOptions(size=60)),
        make_world(GymnasiumOptions(env=newest("Taxi"))),
    ):
        uniform = np.full((world.mdp.num_states, world.mdp.num_actions), 1 / world.mdp.num_actions)
        numbers = np.arange(world.mdp.num_states, dtype=float) * 1e3
        draw_policies(tmp_path / "policy.png", world, {"expert policy": uniform, "learned policy": uniform})
        draw_rewards(tmp_path / "rewards.png", world, {"expert": world.mdp.rewards, "learned": numbers})
        draw_visits(tmp_path / "visits.png", world, {"demonstrated": numbers, "policy": numbers})
        for name in ("policy.png", "rewards.png", "visits.png"):
            assert np.all(margins(tmp_path / name) == 1), f"{name} is white at its edges"


def test_the_largest_and_the_smallest_number_of_a_line_are_seen_whole() -> None:
    world = make_world(GymnasiumOptions(env=newest("Taxi")))
    axes = Figure().subplots()
    map_or_line(axes.figure, axes, world, np.linspace(0, 2, world.mdp.num_states), "visits", limits=(0.0, 2.0))
    low, high = axes.get_ylim()
    assert low < 0
    assert high > 2


def test_an_end_in_a_corner_of_a_large_map_is_marked_in_full_and_explained() -> None:
    world = make_world(IcyGridOptions(size=100))
    axes = Figure().subplots()
    map_or_line(axes.figure, axes, world, np.zeros(10_000), "rewards")
    (mark,) = axes.lines
    assert mark.get_xydata().tolist() == [[99, 99]]
    assert not mark.get_clip_on()
    assert mark.get_markersize() >= 5, "points, whatever the size of the map"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["ends an episode"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("x", "y")
