"""What a recipe for inverse RL makes: worlds, experts, options, and the lines that are printed of a run."""

import io
import warnings
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import posttrain
from posttrain.errors import UserError
from posttrain.irl.causal import MaxCausalEntIRL
from posttrain.irl.counting import in_world
from posttrain.irl.course import recover_reward
from posttrain.irl.demonstrations import Demonstrations, Episode
from posttrain.irl.features import LinearReward, Place
from posttrain.irl.maxent import MaxEntIRL
from posttrain.irl_runs.expert_episodes import make_expert_episodes
from posttrain.irl_runs.irl_report import warnings_as_lines
from posttrain.irl_runs.methods import fit_reward, linear_reward
from posttrain.irl_runs.run import watched_by
from posttrain.irl_runs.worlds import make_world
from posttrain.options.irl import (
    CausalOptions,
    CourseOptions,
    FileFeatures,
    GymnasiumOptions,
    IcyGridOptions,
    MethodOptions,
    PathOptions,
    SampledOptions,
    StateFeatures,
)
from posttrain.runs.progress import Progress
from tests.support.irl_worlds import course_demonstrations, course_expert, endless_grid, newest


@pytest.mark.parametrize(("options", "fitter"), [(CausalOptions, MaxCausalEntIRL), (PathOptions, MaxEntIRL)])
def test_the_options_of_a_method_are_its_fields_with_its_defaults(options: type, fitter: type) -> None:
    named = {each.name: each.default for each in fields(options) if each.name != "name"}
    assert named == {each.name: each.default for each in fields(fitter)}


RULED = [
    *((CausalOptions, MaxCausalEntIRL, name) for name in ("discount", "temperature", "l2", "tolerance")),
    *((PathOptions, MaxEntIRL, name) for name in ("l2", "tolerance")),
]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1.0, 0.0, 0.5, 2.0])
@pytest.mark.parametrize(("options", "fitter", "name"), RULED)
def test_a_recipe_refuses_what_the_method_refuses(options: type, fitter: type, name: str, value: float) -> None:
    def refuses(make: type) -> bool:
        try:
            make(**{name: value})
        except UserError:
            return True
        return False

    assert refuses(options) == refuses(fitter)


BOTH = {"l2": 0.1, "tolerance": 1e-2, "max_iterations": 2}
CAUSAL = {"objective": "likelihood", "discount": 0.8, "temperature": 0.5, "horizon": 20, "solver": "lbfgs"}
CHANGES = [
    *((CausalOptions, MaxCausalEntIRL, name, value) for name, value in {**CAUSAL, **BOTH}.items()),
    *((PathOptions, MaxEntIRL, name, value) for name, value in {"gradient": "algorithm1", **BOTH}.items()),
]


@pytest.mark.filterwarnings("ignore::posttrain.irl.ConvergenceWarning")
@pytest.mark.parametrize(("options", "fitter", "name", "value"), CHANGES)
def test_each_option_of_a_method_reaches_the_fit(options: type, fitter: type, name: str, value: object) -> None:
    world, states = make_world(IcyGridOptions()), LinearReward(features=np.eye(25))
    recovered = fit_reward(options(**{name: value}), world, states, course_demonstrations())
    fit = fitter(**{name: value}).fit(world.mdp, states, course_demonstrations())
    assert np.array_equal(recovered.weights, fit.weights)
    assert len(recovered.curve) == len(fit.history)
    assert not np.array_equal(recovered.weights, fit_reward(options(), world, states, course_demonstrations()).weights)


@pytest.mark.parametrize("options", [CausalOptions(), PathOptions(), PathOptions(gradient="algorithm1")])
def test_a_method_shows_each_evaluation_while_it_goes_on(options: MethodOptions) -> None:
    world, states = make_world(IcyGridOptions()), LinearReward(features=np.eye(25))
    seen: list[dict[str, float]] = []
    recovered = fit_reward(options, world, states, course_demonstrations(), seen.append)
    assert len(recovered.curve) > 3
    objectives = {numbers["objective"] for numbers in seen}
    assert {numbers["objective"] for numbers in recovered.curve} <= objectives, "and of steps that were tried in vain"


@pytest.mark.parametrize(("name", "value"), [("step_size", 0.4), ("tolerance", 1e-2)])
def test_each_option_of_the_course_s_algorithm_reaches_it(name: str, value: float) -> None:
    world, states = make_world(IcyGridOptions()), LinearReward(features=np.eye(25))
    recovered = fit_reward(CourseOptions(**{name: value}), world, states, course_demonstrations())
    taught = recover_reward(endless_grid(), np.eye(25), np.array([24]), course_demonstrations(), **{name: value})
    assert np.array_equal(recovered.weights, taught.weights)
    assert recovered.gap == pytest.approx(taught.gap, abs=1e-12)


@pytest.mark.parametrize("place", ["state", "state_action", "next_state"])
def test_features_from_a_file_are_on_what_the_recipe_says(place: Place, tmp_path: Path) -> None:
    table = np.arange(50.0).reshape(25, 2) if place != "state_action" else np.arange(200.0).reshape(100, 2)
    np.save(tmp_path / "features.npy", table)
    made = linear_reward(FileFeatures(path=str(tmp_path / "features.npy"), on=place), make_world(IcyGridOptions()))
    assert made.on == place
    assert np.array_equal(made.features, table)


def test_many_states_have_sparse_features() -> None:
    made = linear_reward(StateFeatures(), make_world(IcyGridOptions(size=40)))
    assert made.features.shape == (1600, 1600)
    assert made.features.nnz == 1600
    assert np.array_equal(made.features @ np.arange(1600.0), np.arange(1600.0))


def test_the_course_recipe_makes_the_course_s_demonstrations() -> None:
    config = posttrain.load_recipe("irl-course")
    made = make_expert_episodes(config.demonstrations, make_world(config.world))
    assert np.array_equal(made.episodes.states, course_demonstrations().states)
    assert np.array_equal(made.policy, course_expert())
    # The goal pays 1 in each step that one would be there: 1 / (1 - .9) at once, in a world that ends.
    assert made.reward[[24, 8, 0]] == pytest.approx([10, 0.65, 0])


def test_ground_terrain_and_rewards_of_a_grid_are_laid_over_each_other() -> None:
    ground = {"ground": -0.5, "terrain": 2, "terrain_low": -2, "terrain_seed": 7}
    world = make_world(IcyGridOptions(size=4, rewards=((-1, 3.0),), starts=(), ends=(5, -1), **ground))
    low = np.random.default_rng(7).uniform(-2, 0, 4)
    tile = np.array([0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3])
    assert world.rewards == pytest.approx([*(-0.5 + low[tile[:15]]), 3.0])
    assert np.flatnonzero(world.mdp.terminal).tolist() == [5, 15]
    assert world.mdp.start == pytest.approx(np.where(world.mdp.terminal, 0, 1 / 14))


@pytest.mark.parametrize(("env", "options"), [("FrozenLake", {"is_slippery": False}), ("CliffWalking", {})])
def test_the_arrows_of_an_environment_point_where_its_actions_lead(env: str, options: dict[str, bool]) -> None:
    world = make_world(GymnasiumOptions(env=newest(env), options=options))
    layout, mdp = world.layout, world.mdp
    checked = 0
    for state in np.flatnonzero(~mdp.terminal):
        for action, (dx, dy) in enumerate(layout.moves):
            (following,) = mdp.transitions[[state * mdp.num_actions + action]].indices
            before, after = int(mdp.states[state]), int(mdp.states[following])
            stepped = (after % layout.width - before % layout.width, after // layout.width - before // layout.width)
            if abs(stepped[0]) + abs(stepped[1]) == 1:  # neither stopped by the edge nor thrown back by the cliff
                assert stepped == (dx, dy)
                checked += 1
    assert checked > 30


def test_an_expert_of_no_temperature_is_the_limit_of_cold_ones() -> None:
    world = make_world(IcyGridOptions(rewards=((12, -3.0),), ground=-1.0))
    greedy, cold = (
        make_expert_episodes(SampledOptions(num_episodes=1, **expert), world).policy
        for expert in ({"expert": "greedy"}, {"expert": "soft", "temperature": 1e-4})
    )
    clear = cold.max(axis=1) > 0.999  # elsewhere two ways are equally short
    assert clear.sum() > 10
    assert np.array_equal(greedy[clear].argmax(axis=1), cold[clear].argmax(axis=1))


def test_without_a_terminal_a_long_fit_says_how_far_it_is_now_and_then() -> None:
    said, now = io.StringIO(), iter([0.0, 0.0, 1.0, 6.0, 7.0, 8.0])
    progress = Progress(console=Console(file=said), clock=lambda: next(now))
    with progress.stage("fit") as stage:
        watch = watched_by([], stage)
        watch({"objective": 3.0})  # at 1 s: too soon
        watch({"objective": 2.5, "largest_gradient": 0.125})  # at 6 s
        watch({"objective": 2.0})  # at 7 s
    assert said.getvalue() == ("fit: evaluation 2  objective 2.5  largest gradient 0.125\nfit: done in 8.0 s\n")


def test_a_warning_is_a_line_without_the_code_that_gave_it() -> None:
    said, before = io.StringIO(), warnings.showwarning
    with warnings_as_lines(Progress(console=Console(file=said)).note):
        warnings.warn("episodes are cut", stacklevel=1)
    assert said.getvalue() == "Warning: episodes are cut\n"
    assert warnings.showwarning is before


def test_a_run_says_once_that_it_has_not_converged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = {"folder": str(tmp_path / "run"), "plots": False}
    for method in ({"name": "causal", "max_iterations": 1}, {"name": "maxent", "max_iterations": 1}):
        config = posttrain.load_recipe(world={"size": 3, "ground": -2.0}, method=method, run={**run, "overwrite": True})
        assert not posttrain.recover(config).recovered.converged
        said = capsys.readouterr().out
        assert said.count("onverged") == 1
        assert "Raise method.max_iterations" in said


def test_python_code_can_run_a_recipe_and_read_what_was_found(tmp_path: Path) -> None:
    world = {"size": 3, "ground": -2.0}
    run = {"folder": str(tmp_path / "run"), "plots": False}
    config = posttrain.load_recipe(world=world, demonstrations={"num_episodes": 10}, run=run)
    done = posttrain.recover(config)
    assert done.summary["gap"] == done.recovered.gap
    assert done.world.mdp.num_states == 9
    again = Demonstrations.load(tmp_path / "run" / "demonstrations.npz")
    assert np.array_equal(again.states, done.expert.episodes.states)


def test_episodes_that_start_where_they_end_are_episodes() -> None:
    shown = Demonstrations.from_episodes([Episode([24], [], terminated=True)])
    assert in_world(shown, make_world(IcyGridOptions()).mdp).states.tolist() == [24]
