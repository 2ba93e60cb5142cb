"""What a recipe of phases says: names of earlier phases become folders, and mistakes are told at once."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.cli import main
from posttrain.commands.phase_list import phase_folder, read_phases, replaced, require_startable
from posttrain.commands.phases import phase_rows
from tests.support.refusals import refused

FIRST = {"name": "first", "recipe": "countdown-tiny"}
SFT: dict[str, Any] = {"name": "first", "sections": {"model": {"path": "bundled"}, "sft": {"num_epochs": 1}}}
RL: dict[str, Any] = {
    "name": "then",
    "sections": {
        "model": {"path": "phase:first"},
        "reference": {"path": "phase:first"},
        "algorithm": {"name": "grpo", "kl": {"coefficient": 0.1}},
        "update": {"optimizer_from": "run:first"},
    },
}


def recipe(place: Path, *phases: Any, **shared: Any) -> str:
    (place / "phases.yaml").write_text(yaml.safe_dump({"phases": list(phases), **shared}))
    return str(place / "phases.yaml")


def with_rows(place: Path) -> dict[str, Any]:
    (place / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    return {**SFT, "sections": {**SFT["sections"], "task": {"path": str(place / "rows.jsonl")}}}


def test_a_phase_goes_on_from_what_earlier_ones_made_under_the_sections_that_all_share(tmp_path: Path) -> None:
    first, then = read_phases(recipe(tmp_path, with_rows(tmp_path), RL, run={"seed": 3}), tmp_path / "out")
    assert (first.command, then.command) == ("sft", "rl")
    assert then.takes_over() == {"phase:first": "first", "run:first": "first"}
    config = then.config({"first": first})
    run = tmp_path / "out" / "phases" / "1-first"
    assert config.model.path == config.reference.path == str(run / "model")
    assert config.update.optimizer_from == str(run)
    assert config.run.seed == first.config({}).run.seed == 3
    assert config.run.folder == str(tmp_path / "out" / "phases" / "2-then")


def test_what_a_phase_says_goes_before_what_all_share_and_that_before_its_recipes(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("run: {seed: 1, num_steps: 7}\nupdate: {learning_rate: 0.5}")
    phase = {"name": "a", "recipe": "own.yaml", "sections": {"update": {"learning_rate": 0.25}}}
    (only,) = read_phases(recipe(tmp_path, phase, run={"seed": 2}), tmp_path)
    config = only.config({})
    assert (config.run.seed, config.run.num_steps, config.update.learning_rate) == (2, 7, 0.25)


def test_the_adapter_of_a_phase_is_its_model_where_it_has_saved_no_other(tmp_path: Path) -> None:
    first, then = read_phases(recipe(tmp_path, with_rows(tmp_path), RL), tmp_path)
    (first.folder / "adapter").mkdir(parents=True)
    (first.folder / "config.yaml").touch()
    (first.folder / "adapter" / "adapter_config.json").touch()
    assert then.config({"first": first}).model.path == str(first.folder / "adapter")


def test_a_file_of_an_earlier_run_can_be_named() -> None:
    (phase,) = [type("Run", (), {"folder": Path("there")})()]
    rows = replaced(
        {"task": [{"path": "run:a/pairs.jsonl"}]}, lambda found: phase_folder(found, {"a": phase}, "phase b")
    )
    assert rows == {"task": [{"path": "there/pairs.jsonl"}]}


BAD: list[tuple[list[Any], str]] = [
    ([], "phases = []: give a list of phases"),
    ([{"recipe": "countdown-tiny"}], "is not a phase; use {name: NAME"),
    ([{"name": "a", "recipes": "b"}], "is not a phase; use {name: NAME"),
    ([{"name": "a/b"}], "name = 'a/b': use letters"),
    ([{"name": "first"}, {"name": "first"}], "an earlier phase is called first too"),
    ([{"name": "first"}, {"name": "b", "sections": {"model": {"path": "phase:first/x"}}}], "use run:first/x"),
    (
        [{"name": "a", "recipe": "collect-countdown"}, {"name": "b", "sections": {"model": {"path": "phase:a"}}}],
        "phase:a: a phase of `posttrain collect` does not train a model",
    ),
    ([{"name": "a", "sections": {"rolout": {}}}], "rolout: no such section"),
    ([{"name": "a", "recipe": "countdwn-tiny"}], "Did you mean the bundled recipe"),
    ([{"name": "a", "sections": [1]}], "sections = [1]: give a mapping"),
    ([{**RL, "name": "a"}], "phase:first: there is no earlier phase of that name"),
]


@pytest.mark.parametrize(("phases", "message"), BAD)
def test_a_mistake_in_a_list_of_phases_is_told_before_anything_is_run(phases, message, tmp_path) -> None:
    with refused(message):
        read_phases(recipe(tmp_path, *phases), tmp_path)


def rows_of(**task: Any) -> dict[str, Any]:
    return {"task": {"name": "dataset", **task}, "rewards": ["exact_match"]}


UNSTARTABLE: list[tuple[dict[str, Any], str]] = [
    ({"rewards": ["countdwn"]}, "no reward function `countdwn`.  Did you mean `countdown`"),
    ({"rewards": ["mine.py:score"]}, "mine.py"),
    ({"rewards": ["own.py:scores"]}, "own.py has no function `scores`.  Did you mean `score`"),
    ({"model": {"chat_template": "no.jinja"}}, "model.chat_template = no.jinja: no such file"),
    ({"algorithm": {"name": "ppo", "critic": {"trunk": "own", "path": "nowhere"}}}, "algorithm.critic.path ="),
    ({"algorithm": {"name": "ppo", "critic": {"warm_start": "nowhere"}}}, "algorithm.critic.warm_start = nowhere: no"),
    ({"model": {"path": "nowhere"}}, "model.path = nowhere: no such folder"),
    (
        {"reference": {"path": "nowhere"}, "algorithm": {"name": "grpo", "kl": {"coefficient": 0.1}}},
        "reference.path = nowhere: no such folder",
    ),
    ({"algorithm": {"name": "distill", "teacher": {"model": "nowhere"}}}, "algorithm.teacher.model = nowhere: no"),
    ({"rewards": [{"model": "nowhere"}]}, "rewards[0].model = nowhere: no such folder"),
    (rows_of(path="gone/no.jsonl"), "task.path = gone/no.jsonl:"),
    (rows_of(sources=[{"path": "row.jsonl"}]), "sources[0].path = row.jsonl: no such file of rows (did you mean rows"),
    (rows_of(path="some/folder/rows.txt"), "task.path = some/folder/rows.txt: no such file of rows"),
    ({"judge": {"name": "reward"}, "rewards": ["countdwn"], "collect": {"num_prompts": 2}}, "no reward function `coun"),
    (
        rows_of(path="run:first/preferences.jsonl"),
        "1-first/preferences.jsonl: phase first does not make preferences.jsonl",
    ),
    ({"model": {"path": "run:pairs/model"}}, "phase pairs does not make model"),
    ({"update": {"optimizer_from": "run:pairs"}}, "a phase of `posttrain collect` does not have an optimiser"),
    ({"rollout": {"group_size": 1}}, "rollout.group_size = 1:"),
    ({"update": {"optimizer_from": "gone"}}, "update.optimizer_from = gone: does not contain a run"),
    (
        {"update": {"optimizer_from": "phase:first"}},
        "is not the folder of a run.  For an earlier phase, use `run:NAME`",
    ),
]


@pytest.mark.parametrize(("sections", "message"), UNSTARTABLE)
def test_what_would_fail_in_its_turn_is_told_before_anything_is_run(sections, message, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("def score(completions, **columns):\n    return [1.0 for _ in completions]\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "ground_truth": "b"}\n')
    own = {"name": "last", "sections": sections}
    if "collect" not in sections and "path" not in sections.get("task", {}):
        own["recipe"] = "countdown-tiny"
    phases = read_phases(
        recipe(tmp_path, FIRST, {"name": "pairs", "recipe": "collect-countdown"}, own), tmp_path / "out"
    )
    with refused("phase last: ", message):
        require_startable(phases)
    phases[2].folder.mkdir(parents=True)
    (phases[2].folder / "summary.json").write_text("{}")
    require_startable(phases)  # it is finished


def test_what_earlier_phases_make_is_not_looked_for(tmp_path: Path) -> None:
    sections = {
        "model": {"path": "phase:first"},
        "task": {"name": "dataset", "path": "run:first/held_out.jsonl"},
        "update": {"optimizer_from": "run:first"},
        "rewards": ["exact_match", {"model": "phase:first"}],
    }
    own = {"name": "last", "sections": sections}
    require_startable(read_phases(recipe(tmp_path, FIRST, own), tmp_path))


def test_a_phase_that_was_begun_and_has_no_model_yet_is_gone_on_with(tmp_path: Path) -> None:
    own = {"name": "last", "recipe": "countdown-tiny", "sections": {"model": {"path": "phase:first"}}}
    phases = read_phases(recipe(tmp_path, FIRST, own), tmp_path / "out")
    phases[0].folder.mkdir(parents=True)
    require_startable(phases)


def test_a_bundled_recipe_waits_for_the_rows_that_a_program_writes_first(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["phases", "hybrid-tiny", "--dry-run"]) == 2
    says = "phase demonstrations: task.path = runs/hybrid-rows/demonstrations.jsonl: no such file of rows."
    assert says in capsys.readouterr().err
    (tmp_path / "runs" / "hybrid-rows").mkdir(parents=True)
    for name in ("demonstrations", "sums", "puzzles"):
        (tmp_path / "runs" / "hybrid-rows" / f"{name}.jsonl").write_text("{}\n")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "sums_task.py").write_text("def true_reward(completions, **columns): ...\n")
    assert main(["phases", "hybrid-tiny", "--dry-run"]) == 0


def test_the_report_has_a_row_for_each_measure_with_an_interval() -> None:
    summary = {
        "steps": 3,
        "seconds": {"total": 90.0},
        "peak_memory_bytes": 2e9,
        "before": {"accuracy_sampled": 0.25, "accuracy_sampled_interval": [0.2, 0.3], "mean_length": 5.0},
        "after": {"accuracy_sampled": 0.5, "accuracy_sampled_interval": [0.4, 0.6]}
        | dict.fromkeys(("pass_at_8", "pass_at_8_interval")),
    }
    assert list(phase_rows({"name": "a", "command": "rl", "summary": summary})) == [
        ["a", "rl", "accuracy sampled", "0.250 [0.200, 0.300]", "0.500 [0.400, 0.600]", "3", "1.5", "2.00"]
    ]
    assert list(phase_rows({"name": "b", "command": "sft", "summary": {}})) == [["b", "sft", "", "", "", "", "", ""]]


def test_the_report_has_the_measures_of_each_source_of_a_mixture() -> None:
    def results(*numbers: float) -> dict[str, object]:
        named = zip(("accuracy_sampled", "reward"), numbers, strict=False)
        return {name: each for key, n in named for name, each in ((key, n), (f"{key}_interval", [n - 0.1, n + 0.1]))}

    after = {**results(0.5), "sources": {"puzzles": results(0.25, 1.0), "sums": results(0.75)}}
    rows = list(phase_rows({"name": "a", "command": "rl", "summary": {"before": results(0.125), "after": after}}))
    assert [row[2:5] for row in rows] == [
        ["accuracy sampled", "0.125 [0.025, 0.225]", "0.500 [0.400, 0.600]"],
        ["accuracy sampled, puzzles", "", "0.250 [0.150, 0.350]"],
        ["reward, puzzles", "", "1.000 [0.900, 1.100]"],
        ["accuracy sampled, sums", "", "0.750 [0.650, 0.850]"],
    ]
    assert [row[:2] for row in rows] == [["a", "rl"], ["", ""], ["", ""], ["", ""]]


def test_the_report_has_the_measures_of_pairs_whose_intervals_are_two_numbers() -> None:
    measured = {"pairs/accuracy": 0.5, "pairs/accuracy_low": 0.4, "pairs/accuracy_high": 0.6, "logps": 1.0}
    summary = {"before": {}, "after": measured, "steps": 4}
    (row,) = phase_rows({"name": "d", "command": "dpo", "summary": summary})
    assert row[:6] == ["d", "dpo", "pairs/accuracy", "", "0.500 [0.400, 0.600]", "4"]
