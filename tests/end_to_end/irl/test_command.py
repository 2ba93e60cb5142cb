"""`posttrain irl` from end to end: bundled recipes, worlds and demonstrations of one's own, the folder, mistakes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import yaml

import posttrain
from posttrain.cli import main
from posttrain.irl.comparison import expected_value_difference
from posttrain.irl.grids import IcyGridWorld
from posttrain.irl.gymnasium_table import read_gymnasium
from tests.support.commands import printed, refusal
from tests.support.irl_worlds import course_rewards
from tests.support.own_objects import Notes
from tests.support.pictures import width_and_height
from tests.support.refusals import mentions
from tests.support.runs import records

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

DRAWS = True
PLOTS = ["convergence.png", "policy.png", "rewards.png", "visits.png"]
SMALL = {
    "world": {"name": "icy_grid", "size": 3, "rewards": [[8, 1.0]], "ground": -2.0},
    "demonstrations": {"name": "sampled", "num_episodes": 20},
    "run": {"plots": False, "folder": "run"},
}


def run(*argv: object) -> dict[str, Any]:
    """The summary of a run that writes to `run`."""
    assert main(["irl", *map(str, argv), "--run.folder", "run"]) == 0
    summary: dict[str, Any] = json.loads(Path("run/summary.json").read_text())
    return summary


def small(**sections: Any) -> str:
    content: dict[str, Any] = {
        name: {**SMALL.get(name, {}), **sections.get(name, {})} for name in {**SMALL, **sections}
    }
    Path("recipe.yaml").write_text(yaml.safe_dump(content))
    return "recipe.yaml"


def arrays(folder: str = "run") -> dict[str, np.ndarray]:
    with np.load(f"{folder}/reward.npz") as found:
        return {name: found[name] for name in found.files}


def message_of(*argv: str) -> str:
    printed = refusal("irl", *argv)
    assert printed.startswith("posttrain: ")
    assert "Traceback" not in printed
    return printed


def test_the_course_recipe_finds_both_prizes_and_fits_its_data_badly() -> None:
    summary = run("irl-course")
    assert summary["best_states"][:2] == [24, 8]
    assert summary["demonstrations"] == {"episodes": 200, "steps": 1938, "steps_per_episode": 9.69, "terminated": 200}
    assert summary["gap"] < 0.85
    assert summary["gap"] > 30 * summary["least_gap"], "the linear program knows of policies far nearer"
    assert summary["steps_per_episode"] > 1.9 * 9.69
    lines = records("run/metrics.jsonl")
    assert len(lines) == summary["iterations"]
    assert [line["iteration"] for line in lines] == list(range(len(lines)))
    assert lines[-1]["largest_step"] <= 1e-4 < lines[-2]["largest_step"]
    # It ends because the step has shrunk: in the second half of its iterations the gap falls by less than a fiftieth.
    assert 0 < lines[len(lines) // 2]["gap"] - summary["gap"] < summary["gap"] / 50


def test_the_exact_recipe_comes_as_near_as_any_policy_can() -> None:
    summary = run("irl-course-exact")
    assert summary["converged"]
    assert summary["least_gap"] <= summary["gap"] <= 0.0245
    assert summary["least_gap"] == pytest.approx(0.0226, abs=5e-5)
    assert summary["visits_gap"] == pytest.approx(summary["gap"], abs=1e-9), "features are states"
    assert summary["best_states"][:2] == [8, 12]
    assert (summary["identified_weights"], summary["identified_combinations"]) == (24, 24), "all but the goal's"
    assert 0 <= summary["value_lost_by_expert"] < summary["value_lost"] < 0.06
    assert 0 <= summary["value_lost_greedy"] < summary["value_lost"] / 10, "what it loses, it loses by entropy"
    found = arrays()
    assert np.abs(found["visits"] - found["demonstrated_visits"]).max() == pytest.approx(summary["gap"])
    goes_on = course_rewards()
    goes_on[24] = 10  # 1 in each step at discount .9
    world = IcyGridWorld(5, slip=0.2)
    lost = expected_value_difference(world, goes_on, found["policy"], discount=0.9)
    assert summary["value_lost"] == pytest.approx(lost, abs=1e-12)


def test_the_frozen_lake_recipe_learns_to_cross_and_draws_it(capsys: pytest.CaptureFixture[str]) -> None:
    summary = run("irl-frozen-lake")
    lake = read_gymnasium(gymnasium.make("FrozenLake-v1", map_name="8x8"))
    aimless = expected_value_difference(lake, lake.rewards, np.full((64, 4), 0.25), discount=0.99)
    assert summary["value_lost"] < 0.05 * aimless
    assert 63 in summary["best_states"], "the present"
    found = arrays()
    assert (found["shape"].tolist(), bool(found["upwards"]), found["moves"].shape) == ([8, 8], False, (4, 2))
    assert found["expert_policy"].shape == (64, 4)
    assert sorted(path.name for path in Path("run/plots").iterdir()) == PLOTS
    assert all(min(width_and_height(path)) > 300 for path in Path("run/plots").iterdir())
    printed = capsys.readouterr().out
    mentions(printed, "gymnasium, 64 states, 4 actions", f"value lost          {summary['value_lost']:.5g}")


def test_the_large_recipe_made_small_recovers_the_terrain() -> None:
    flags = ["--world.size", 20, "--world.terrain", 5, "--features.width", 5, "--demonstrations.num-episodes", 200]
    summary = run("irl-grid-100", *flags)
    assert (summary["features"], summary["identified_combinations"]) == (17, 16), "the tiles add up to the constant"
    found = arrays()
    acting = np.arange(399)  # what the goal is worth no one can tell: all go there
    assert np.corrcoef(found["reward"][acting], found["expert_reward"][acting])[0, 1] > 0.95
    assert summary["least_gap"] is None


def test_a_run_again_from_its_own_config_is_the_same_run() -> None:
    main(["irl", small(method={"objective": "likelihood", "discount": 0.9})])
    assert main(["irl", "run/config.yaml", "--run.folder", "again"]) == 0
    for name, found in arrays().items():
        assert np.array_equal(found, arrays("again")[name]), name
    assert Path("run/metrics.jsonl").read_bytes() == Path("again/metrics.jsonl").read_bytes()
    assert Path("run/demonstrations.npz").is_file()


def test_a_world_features_and_demonstrations_of_ones_own_give_what_the_built_in_ones_give() -> None:
    main(["irl", small()])
    expected = arrays()
    world = IcyGridWorld(3, slip=0.2)
    table = world.transitions.toarray().reshape(9, 4, 9)
    np.savez("dense.npz", transitions=table, start=world.start, terminal=[8])
    parts = {name: getattr(world.transitions, name) for name in ("data", "indices", "indptr")}
    np.savez("sparse.npz", **parts, start=world.start, terminal=[8])
    np.save("features.npy", np.eye(9))
    for file in ("dense.npz", "sparse.npz"):
        flags = ["--world.path", file, "--demonstrations.path", "run/demonstrations.npz", "--features.path"]
        names = ["--world.name", "table", "--demonstrations.name", "recorded", "--features.name", "file"]
        assert main(["irl", *names, *flags, "features.npy", "--run.folder", f"own-{file}", "--run.no-plots"]) == 0
        found = arrays(f"own-{file}")
        assert np.allclose(found["weights"], expected["weights"], atol=1e-9)
        assert "expert_reward" not in found, "the file does not tell"
        summary = json.loads(Path(f"own-{file}/summary.json").read_text())
        assert summary["value_lost"] is None


def test_a_horizon_gives_a_policy_for_each_step_and_its_plots() -> None:
    summary = run(small(demonstrations={"max_steps": 12}, method={"horizon": 12}), "--run.plots")
    found = arrays()
    assert found["policy"].shape == (12, 9, 4)
    # Visits of the 13 times of an episode add up to its states; ended episodes visit nothing.
    assert found["visits"].sum() == pytest.approx(summary["steps_per_episode"] + 1)
    assert found["visits"].sum() <= 13
    assert summary["least_gap"] is None
    assert sorted(path.name for path in Path("run/plots").iterdir()) == PLOTS


def test_the_path_model_matches_its_own_paths_and_not_those_it_makes() -> None:
    summary = run("irl-course-exact", "--method.name", "maxent", "--run.no-plots")
    assert summary["gap"] < 0.01
    assert summary["executed_gap"] == pytest.approx(summary["visits_gap"])
    assert summary["executed_gap"] > 0.4
    assert not Path("run/plots").exists()


def test_a_run_is_replaced_only_when_told_and_never_by_a_mistake() -> None:
    recipe = small()
    assert main(["irl", recipe]) == 0
    before = Path("run/summary.json").read_bytes()
    assert "already contains a run" in message_of(recipe)
    nowhere = ["--demonstrations.name", "recorded", "--demonstrations.path", "nowhere.npz"]
    assert "the file does not exist" in message_of(recipe, "--run.overwrite", *nowhere)
    elsewhere = [*nowhere[:3], "run/demonstrations.npz", "--world.size", "2", "--world.rewards"]
    assert "there is no state" in message_of(recipe, "--run.overwrite", *elsewhere)
    message_of(recipe, "--run.overwrite", "--demonstrations.max-steps", "1")  # none of which is whole
    message_of(recipe, "--run.overwrite", "--method.horizon", "1")
    features = ["--world.slip", "0", "--features.name", "file", "--features.path", "zero.npy"]
    np.save("zero.npy", np.zeros((9, 1)))
    assert main(["irl", recipe, "--run.overwrite", *features]) == 1, "no weights make finite values"
    assert Path("run/summary.json").read_bytes() == before
    assert main(["irl", recipe, "--run.overwrite", "--method.l2", "0.5"]) == 0
    assert Path("run/summary.json").read_bytes() != before
    assert "overwrite: false" in Path("run/config.yaml").read_text(), "running it must not delete this run"
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years of work")
    assert "not empty and not a run folder" in message_of(recipe, "--run.folder", "mine", "--run.overwrite")
    Path("run/checkpoints").mkdir()
    assert "contains a run of another command" in message_of(recipe, "--run.overwrite")


MISTAKES = {
    "--method.name courze": "no such method.  Did you mean `course`?",
    "--method.name course --method.l2 1": "--method.l2: no such flag.",
    "--world.ends 99": "world.ends = [99] has a state outside the grid",
    "--world.starts -1": "world.starts = [-1] has one of ends",
    "--world.ground nan": "world.ground = nan must be a finite number",
    "--world.rewards 3 inf": "world.rewards = [[3, inf]] must be finite",
    "--world.terrain 1 --world.terrain-low -.inf": "world.terrain_low = -inf must be a finite number, at most 0",
    "--method.l2 inf": "method.l2 = inf: must be a finite number",
    "--world.rewards 8": "world.rewards",
    "--world.name gymnasium --method.name course": "method.name = course needs world.name = icy_grid",
    "--world.name gymnasium --features.name tiles": "features.name = tiles needs world.name = icy_grid",
    "--world.name gymnasium --demonstrations.expert course": "demonstrations.expert = course needs to know",
    "--features.name tiles --features.width 9": "features.width = 9 is wider than",
    "--method.name maxent --features.name file --features.path x --features.on state_action": "method.name = causal",
    "--world.name gymnasium --world.env Nope-v1": "world.env = Nope-v1",
    '--world.name gymnasium --world.options {"map_name":"9x9"}': "make('FrozenLake-v1', map_name='9x9') fails",
    "--world.name gymnasium --world.env Blackjack-v1": "BlackjackEnv has no transition table",
    "--world.name table": "world.path = '': must be non-empty",
    "--world.name table --world.path no.npz": "path = no.npz: the file does not exist",
    "--world.name table --world.path text.npz": "world.path = text.npz: not a file of numpy arrays",
    "--world.name table --world.path one.npy": "it holds no array 'start'",
    "--world.name table --world.path empty.npz": "it holds no array 'start'",
    "--world.name table --world.path half.npz": "it holds no array 'data'",
    "--features.name file --features.path half.npz": "holds several arrays",
    "--demonstrations.name recorded --demonstrations.path half.npz": "half.npz: it holds no array 'states'",
    "--world.name table --world.path whole.npz": "this world has no rewards",
    "--demonstrations.expert course --demonstrations.discount 1": "demonstrations.discount = 1",
    "--demonstrations.max-steps 2": "demonstration 0 was truncated in state",
    "--method.name course --demonstrations.max-steps 2": "Use objective = likelihood, or leave it out",
    "--world.name gymnasium --world.env nosuchpackage:Maze-v0": "gymnasium.make('nosuchpackage:Maze-v0') fails",
    "--rollout.group-size 4": "--rollout.group-size: no such flag",
    "countdown-tiny": "algorithm: no such section in `posttrain irl`",
}


@pytest.mark.parametrize(("argv", "expected"), MISTAKES.items())
def test_a_mistake_is_told_with_its_place_and_its_remedy(argv: str, expected: str) -> None:
    Path("text.npz").write_text("world: {}")
    np.save("one.npy", np.ones(3))
    np.savez("empty.npz")
    np.savez("half.npz", start=[1.0, 0.0], terminal=[1])
    np.savez("whole.npz", transitions=[[[0.0, 1.0]], [[0.0, 1.0]]], start=[1.0, 0.0], terminal=[1])
    assert expected in message_of(*argv.split())


def test_a_problem_without_finite_values_ends_the_run_with_code_1() -> None:
    # On dry ground an expert who is paid for every step, undiscounted, never ends an episode.
    flags = ["--world.slip", "0", "--world.ground", "1", "--demonstrations.discount", "1"]
    assert "diverges at discount 1.0 and temperature 1.0" in refusal("irl", *flags, code=1)


@pytest.mark.parametrize(
    ("library", "flags", "remedy"),
    [
        ("scipy", [], "`pip install posttrain[irl]`"),
        ("gymnasium", ["--world.name", "gymnasium"], "`pip install posttrain[irl]`"),
        ("matplotlib", [], "`pip install matplotlib`, or set run.plots = false (--run.no-plots)"),
    ],
)
def test_a_library_that_is_missing_is_told_before_anything_begins_with_how_to_get_it(
    library: str, flags: list[str], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)  # whoever imports it now is told that there is none
    assert f"needs {library}, which is not installed; {remedy}" in message_of(*flags)
    assert not Path("runs/irl/metrics.jsonl").exists()


def test_a_run_without_pictures_needs_no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["irl", small()]) == 0


def test_the_whole_run_goes_without_torch() -> None:
    program = (
        "import sys; from posttrain.cli import main; code = main(sys.argv[1:]); "
        "assert not {'torch', 'transformers'} & set(sys.modules); sys.exit(code)"
    )
    environment = {**os.environ, "COLUMNS": "120"}
    for argv in (["irl", "--help"], ["irl", "irl-course-exact"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *argv], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert "run folder          runs/irl-course-exact" in done.stdout


def test_help_shows_the_options_of_what_was_chosen() -> None:
    said = printed("irl", "--world.name", "gymnasium", "--method.name", "maxent", "--help")
    mentions(said, "--world.env", "--method.gradient")
    assert "--world.slip" not in said
    assert "--method.horizon" not in said
    for names in ("{icy_grid,gymnasium,table}", "{sampled,recorded}", "{states,tiles,file}", "{course,maxent,causal}"):
        assert names in said, "and what else there is to choose"


def test_a_watcher_sees_each_evaluation_of_the_fit_and_the_end(tmp_path: Path) -> None:
    config = posttrain.load_recipe("irl-course-exact", run={"folder": str(tmp_path / "run"), "plots": False})
    notes = Notes()
    run = posttrain.recover(config, watchers=[notes])
    assert [report.step for report in notes.steps] == [*range(1, len(notes.steps) + 1)]
    assert len(notes.steps) >= run.summary["iterations"]
    gradients = [report.metrics["largest_gradient"] for report in notes.steps]
    assert gradients[-1] < gradients[0]
    (end,) = notes.ends
    assert (end.folder, end.interrupted) == (run.folder, False)
    assert end.summary == run.summary
