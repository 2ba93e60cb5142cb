"""What a comparison says of its cells, worked out by hand; and what it refuses to compare."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import yaml
from matplotlib.figure import Figure

from posttrain.commands.comparison.cells import (
    Budget,
    Cell,
    accuracy_curve,
    drift_of,
    kept_result,
    make_cells,
    model_of_run,
    read_budget,
    recipe_digest,
    variant_names,
)
from posttrain.commands.comparison.comparison_report import (
    CellResult,
    draw_curves_of_variants,
    draw_ends_of_variants,
    markdown_table,
    mean_curve,
    mean_over_seeds,
    student_quantile,
    style,
    variant_results,
    write_comparison,
)
from posttrain.config import load_recipe
from posttrain.errors import RunError
from posttrain.options.model import AdapterOptions, ModelOptions
from tests.support.refusals import refused
from tests.support.sequences import doubles, spoken

VARIANTS = {"grpo": load_recipe(algorithm={"name": "grpo"}), "rloo": load_recipe(algorithm={"name": "rloo"})}


def result(variant: str, seed: int, after: float, **others: Any) -> CellResult:
    fields: dict[str, Any] = {
        "variant": variant,
        "seed": seed,
        "recipe_digest": "",
        "before": {"accuracy_sampled": 0.2},
        "after": {"accuracy_sampled": after, "accuracy_greedy": 0.3, "pass_at_8": None, "mean_length": 40.0},
        "steps": 10,
        "sampled_tokens": 1000,
        "seconds": 20.0,
        "training_seconds": 12.0,
        "peak_memory_bytes": 10**9,
        "kl": {"per_completion": 1.5, "per_completion_error": 0.1, "per_token": 0.03},
        "curve": [(0, 0.0, 0.2), (1000, 12.0, after)],
        "device": "cpu",
        "versions": {},
    }
    return CellResult(**(fields | others))


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("tokens=200_000", Budget(tokens=200_000)),
        ("minutes=1.5", Budget(minutes=1.5)),
        ("tokens=10,minutes=2", Budget(tokens=10, minutes=2.0)),
        ("", Budget()),
    ],
)
def test_a_budget_is_tokens_or_minutes_or_both(text: str, budget: Budget) -> None:
    assert read_budget(text) == budget
    assert bool(budget) == bool(text)


@pytest.mark.parametrize("text", ["steps=3", "tokens", "tokens=many", "minutes=0", "tokens=-4", "tokens=100,tokens=5"])
def test_what_is_no_budget_is_told_with_the_forms_of_one(text: str) -> None:
    with refused(f"budget {text}"):
        read_budget(text)


def test_all_variants_come_with_one_seed_before_any_comes_with_the_next() -> None:
    cells = make_cells(VARIANTS, seeds=2, budget=Budget(tokens=500), folder=Path("there"))
    assert [(cell.variant, cell.seed) for cell in cells] == [("grpo", 0), ("rloo", 0), ("grpo", 1), ("rloo", 1)]
    assert {cell.config.run.token_limit for cell in cells} == {500}
    assert {cell.config.run.time_limit_minutes for cell in cells} == {None}
    assert cells[1].folder == Path("there/cells/rloo-seed-0")
    unbounded = make_cells(VARIANTS, seeds=1, budget=Budget(), folder=Path("there"))
    assert unbounded[0].config.run.num_steps == VARIANTS["grpo"].run.num_steps


def differs(**sections: Any) -> dict[str, Any]:
    return {"grpo": VARIANTS["grpo"], "other": load_recipe(**sections)}


@pytest.mark.parametrize(
    ("section", "what"),
    [
        ({"task": {"name": "arithmetic"}}, "task"),
        ({"evaluation": {"samples": 3}}, "evaluation"),
        ({"model": {"path": "bundled-instruct"}}, "model"),
        ({"run": {"seed": 4}}, "run.seed"),
        ({"rollout": {"max_completion_tokens": 5}}, "rollout.max_completion_tokens"),
    ],
)
def test_variants_that_are_measured_in_different_ways_are_refused(section: dict[str, Any], what: str) -> None:
    with refused(f"{what} differs between grpo and other", "could not be compared"):
        make_cells(differs(**section), seeds=1, budget=Budget(), folder=Path())


def test_rewards_may_differ_only_where_the_task_has_a_measure_of_its_own() -> None:
    format_reward = [{"name": "format"}]
    assert make_cells(differs(rewards=format_reward), seeds=1, budget=Budget(), folder=Path())
    rows = {"task": {"name": "dataset", "path": "rows.jsonl"}}
    of_rows = {"a": load_recipe(**rows, rewards=format_reward), "b": load_recipe(**rows, rewards=[{"name": "math"}])}
    with refused("rewards differs between a and b"):
        make_cells(of_rows, seeds=1, budget=Budget(), folder=Path())
    tests = {"task": {"name": "programs"}}
    programs = {name: load_recipe(**tests, rewards=[{"name": name}]) for name in ("code", "refusal")}
    assert make_cells(programs, seeds=1, budget=Budget(), folder=Path())  # programs have tests of their own


def test_a_rate_that_falls_with_the_steps_does_not_go_with_a_budget_nor_two_recipes_of_one_name() -> None:
    with refused("two recipes are called grpo"):
        variant_names(["here/grpo.yaml", "there/grpo.yaml"])
    falling = {"grpo": load_recipe(update={"schedule": "linear"})}
    with refused("update.schedule = linear decays to 0 at run.num_steps"):
        make_cells(falling, seeds=1, budget=Budget(minutes=1.0), folder=Path())
    assert make_cells(falling, seeds=1, budget=Budget(), folder=Path())


def test_the_interval_over_seeds_is_students() -> None:
    # s = .1 and t(2, .975) = 4.302653: .6 ± 4.302653 · .1 / √3
    estimate = mean_over_seeds([0.5, 0.6, 0.7])
    assert estimate.mean == pytest.approx(0.6)
    assert estimate.low is not None
    assert estimate.low == pytest.approx(0.6 - 4.302653 * 0.1 / math.sqrt(3), abs=1e-6)
    assert mean_over_seeds([0.5]).low is None


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9, 10, 30, 99])
def test_students_quantile_is_that_of_scipy_which_a_comparison_does_without(degrees: int) -> None:
    assert student_quantile(degrees) == pytest.approx(float(scipy.stats.t.ppf(0.975, degrees)), rel=1e-9)


def test_a_gain_is_over_the_first_variant_with_the_same_seed() -> None:
    rows = variant_results(
        [result("grpo", 0, 0.4), result("rloo", 0, 0.5), result("grpo", 1, 0.6), result("rloo", 1, 0.8)]
    )
    assert [row.variant for row in rows] == ["grpo", "rloo"]
    assert rows[0].gain_over_first is None
    gain = rows[1].gain_over_first
    assert gain is not None
    half = 12.7062 * 0.05  # t of one degree of freedom, times s / √2
    assert (gain.mean, gain.low, gain.high) == pytest.approx((0.15, 0.15 - half, 0.15 + half), abs=1e-4)
    equal = variant_results([result("grpo", seed, 0.5) for seed in (0, 1)])
    assert equal[0].after.low is None, "equal seeds say nothing of another one"
    runs = [result("grpo", seed, 0.5, peak_memory_bytes=size) for seed, size in enumerate((3, 9, 5))]
    assert variant_results(runs)[0].peak_memory_bytes == 9  # the largest of its runs
    alone = variant_results([result("grpo", 0, 0.4), result("rloo", 1, 0.5)])
    assert alone[1].gain_over_first is None  # no seed in common


def test_a_curve_counts_tokens_and_seconds_of_training_and_leaves_evaluations_out() -> None:
    records = [
        {"step": 0, "eval/accuracy_sampled": 0.2},
        {"step": 1, "num_sampled_tokens": 100.0, "step_time": 2.0},
        {
            "step": 2,
            "num_sampled_tokens": 250.0,
            "step_time": 5.0,
            "seconds/evaluate": 3.0,
            "eval/accuracy_sampled": 0.3,
        },
        {"step": 2, "eval/accuracy_sampled": 0.35},
    ]
    assert list(accuracy_curve(records)) == [(0, 0.0, 0.2), (250, 4.0, 0.3), (250, 4.0, 0.35)]


def test_the_mean_curve_ends_in_the_mean_of_the_evaluations_after_training() -> None:
    begin, brief = (0, 0.0, 0.25), (100, 1.0, 0.75)
    results = [
        replace(result("grpo", seed, 0.5), curve=[begin, brief, (200 + seed, 2.0, 0.5 + seed / 4)]) for seed in (0, 2)
    ]
    axes = Figure().subplots()
    draw_curves_of_variants(axes, results, 0)
    *lines, mean, dot = axes.lines
    assert [[*np.ravel(line.get_ydata())] for line in lines] == [[0.25, 0.75, 0.5], [0.25, 0.75, 1.0]]
    assert (np.ravel(mean.get_xdata())[-1], np.ravel(mean.get_ydata())[-1]) == (201.0, 0.75)
    assert (dot.get_xdata(), dot.get_ydata(), dot.get_marker()) == ([201.0], [0.75], "o")


def test_curves_are_averaged_at_equal_shares_of_their_way() -> None:
    assert len({style(number)["color"] for number in range(10)}) == 10
    at, mean = mean_curve([[(0, 0.0, 0.0), (100, 1.0, 1.0)], [(0, 0.0, 0.0), (200, 1.0, 0.5)]], 0)
    assert at[-1] == 150
    half = next(each for each, tokens in zip(mean, at, strict=True) if tokens >= 75)
    assert half == pytest.approx((0.5 + 0.25) / 2, abs=0.01)
    assert mean[-1] == pytest.approx(0.75)


def test_table_and_files_have_a_row_for_each_variant(tmp_path: Path) -> None:
    results = [result("grpo", 0, 0.4), result("rloo", 0, 0.5)]
    table = write_comparison(tmp_path, results, "minutes=1")
    assert table == markdown_table(variant_results(results))
    header, rule, grpo, rloo = table.splitlines()
    assert header.count("|") == rule.count("|") == grpo.count("|") == rloo.count("|")
    assert "| rloo | 0 | 0.200 | 0.500 | 0.100 | 0.300 |  | 40 | 1.50 | 0.0300 | 10 | 1,000 | 12 | 20 | 1.00 |" in rloo
    assert table in (tmp_path / "comparison.md").read_text()
    assert (tmp_path / "comparison.png").stat().st_size > 0


def test_the_picture_has_the_accuracy_after_training_with_its_interval_and_every_seed() -> None:
    results = [result("grpo", 0, 0.4), result("grpo", 1, 0.6), result("rloo", 0, 0.5)]
    axes = Figure().subplots()
    draw_ends_of_variants(axes, results)
    drawn = [(np.ravel(line.get_xdata()).tolist(), set(np.ravel(line.get_ydata()))) for line in axes.lines]
    half = 12.706205 * math.sqrt(0.02) / math.sqrt(2)  # t(1, .975) s / √2
    assert drawn == [
        ([0.4, 0.6], {0}),
        ([pytest.approx(0.5)], {0}),
        ([pytest.approx(0.5 - half, abs=1e-5), pytest.approx(0.5 + half, abs=1e-5)], {0}),
        ([0.5], {1}),
        ([0.5], {1}),  # of one seed no interval
    ]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["grpo", "rloo"]


def test_nothing_but_the_budget_ends_a_run(tmp_path: Path) -> None:
    early = load_recipe(algorithm={"name": "grpo"}, run={"early_stop_evaluations": 3}, update={"schedule": "constant"})
    assert len(make_cells({"grpo": early}, seeds=2, budget=Budget(), folder=tmp_path)) == 2
    with refused("grpo: run.early_stop_evaluations = 3 may end a run before its budget of 9"):
        make_cells({"grpo": early}, seeds=2, budget=Budget(tokens=9), folder=tmp_path)


def test_without_held_out_rows_there_is_nothing_to_compare(tmp_path: Path) -> None:
    rows = {"name": "dataset", "path": "rows.jsonl"}
    made = {share: load_recipe(task={**rows, "held_out_share": share}, rewards=["format"]) for share in (0.0, 0.1)}
    assert make_cells({"grpo": made[0.1]}, seeds=1, budget=Budget(), folder=tmp_path)
    with refused("grpo: task.held_out_share = 0: nothing is held out"):
        make_cells({"grpo": made[0.0]}, seeds=1, budget=Budget(), folder=tmp_path)
    own = load_recipe(task={**rows, "held_out_share": 0.0, "held_out_path": "test.jsonl"}, rewards=["format"])
    assert make_cells({"grpo": own}, seeds=1, budget=Budget(), folder=tmp_path)
    unmeasured = replace(result("grpo", 0, 0.5), after={"accuracy_sampled": None})
    with refused("grpo seed 0: held-out accuracy was not measured", error=RunError):
        variant_results([unmeasured])


@pytest.mark.parametrize("saved", ["model", "adapter"])
def test_a_trained_model_is_loaded_as_the_run_has_saved_it(saved: str, tmp_path: Path) -> None:
    """Merged weights are in no 4 bits, and the revision was that of the model of the hub."""
    began = ModelOptions(
        path="some/model", revision="main", quantization="nf4", adapter=AdapterOptions(), chat_template="mine.jinja"
    )
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / saved).mkdir()
    (tmp_path / saved / ("adapter_config.json" if saved == "adapter" else "config.json")).write_text("{}")
    loaded = model_of_run(began, tmp_path)
    assert loaded.path == str(tmp_path / saved)
    assert (loaded.revision, loaded.adapter, loaded.chat_template) == ("", None, "")
    assert loaded.quantization == ("nf4" if saved == "adapter" else None)


def test_the_kl_to_the_start_is_of_the_policy_to_it_and_per_token_a_ratio_of_sums() -> None:
    # log π - log π₀: -2 + 3 = 1 of two tokens, -1/2 + 1/4 = -1/4 of one.  Mean 3/8, deviation 1.25/√2, over √2: 5/8.
    rollouts = [spoken("", tokens=(4, 1), logprobs=(-1.5, -0.5)), spoken("", sample=1, logprob=-0.5)]
    found = drift_of(rollouts, doubles(-1.0, -2.0, -0.25))
    assert (found["per_completion"], found["per_completion_error"]) == (0.375, pytest.approx(0.625))
    assert found["per_token"] == 0.25, "3/4 nat over three tokens, and not the mean of 1/2 and -1/4"


def test_what_lies_elsewhere_or_is_older_than_an_option_is_of_the_same_recipe(tmp_path: Path) -> None:
    """The kept recipe lacks an option, and its folder was another; a changed one is told by its name."""
    (cell,) = make_cells({"grpo": VARIANTS["grpo"]}, seeds=1, budget=Budget(), folder=tmp_path / "now")
    content = yaml.safe_load(cell.recipe)
    del content["evaluation"]["sampling_probes"]
    content["run"]["folder"] = "elsewhere/cells/grpo-seed-0"
    cell.folder.mkdir(parents=True)
    kept = cell.folder.parent / "grpo-seed-0.yaml"
    (cell.folder / "cell.json").write_text(json.dumps(asdict(result("grpo", 0, 0.5))))
    with refused("grpo-seed-0.yaml is missing"):
        kept_result(cell)
    kept.write_text(yaml.safe_dump(content))
    found = kept_result(cell)
    assert found.after["accuracy_sampled"] == 0.5
    content["update"]["learning_rate"] = 0.25
    kept.write_text(yaml.safe_dump(content))
    with refused("update.learning_rate = ", "(was 0.25)", "Delete"):
        kept_result(cell)
    (cell.folder / "cell.json").unlink()
    assert kept_result(cell) is None
    (cell.folder / "config.yaml").write_text("")
    with refused("was begun by another recipe than grpo seed 0 has now: update.learning_rate"):
        kept_result(cell)


def test_a_kept_result_is_only_taken_for_the_recipe_that_made_it(tmp_path: Path) -> None:
    (cell,) = make_cells({"grpo": VARIANTS["grpo"]}, seeds=1, budget=Budget(), folder=tmp_path)
    assert kept_result(cell) is None
    cell.folder.mkdir(parents=True)
    (cell.folder / "cell.json").write_text("{}")
    with refused("is not the result of a cell", error=RunError):
        kept_result(cell)
    elsewhere = replace(cell, config=replace(cell.config, run=replace(cell.config.run, folder="other/place")))
    assert recipe_digest(cell) == recipe_digest(elsewhere)
    other = Cell(variant="grpo", seed=0, config=replace(cell.config, algorithm=VARIANTS["rloo"].algorithm))
    assert recipe_digest(cell) != recipe_digest(other)
