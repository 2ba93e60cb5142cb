"""Lists of runs, `posttrain compare` and `posttrain phases`: equal budgets, what goes on, and nothing run twice."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
import yaml
from safetensors.torch import load_file

from posttrain.cli import main
from posttrain.commands import phases as phases_command
from posttrain.commands.comparison import cells
from posttrain.commands.comparison.cells import Cell
from posttrain.config.recipes import find_recipe
from tests.support.accidents import Accident
from tests.support.commands import refusal
from tests.support.refusals import mentions
from tests.support.runs import command, metrics_of, records, require_same, save_tiny_model, tiny_recipe

Stop = Callable[[int], bool]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two variants over one base, of a tiny model."""
    made = tmp_path_factory.mktemp("compare")
    save_tiny_model(made / "model")
    tiny_recipe(made / "base", evaluation={"every_steps": 1, "samples": 1, "brief_problems": 2})
    for name in ("grpo", "rloo"):
        (made / f"{name}.yaml").write_text(yaml.safe_dump({"algorithm": {"name": name}}))
    return made


def in_process(calls: list[Sequence[str]], stop: Stop = lambda number: False) -> Callable[..., None]:
    """Runs the command of a part here; an interruption in place of those that `stop` names, or where one ends in it."""

    def run(command: Sequence[str], *, name: str, log: Path, show: Callable[[str], None]) -> None:
        calls.append(command)
        code = 130 if stop(len(calls)) else main([str(each) for each in command])
        if code == 130:
            raise KeyboardInterrupt
        assert code == 0

    return run


def compare(place: Path, folder: str, *more: str) -> int:
    recipes = [str(place / "grpo.yaml"), str(place / "rloo.yaml")]
    given = ["--base", str(place / "base" / "recipe.yaml"), "--budget", "tokens=100"]
    given += [] if "--seeds" in more else ["--seeds", "2"]
    return main(["compare", *recipes, *given, "--folder", str(place / folder), *more])


def lasting(place: Path, folder: str) -> list[dict[str, Any]]:
    """What the comparison found, without what no two runs share."""
    found = json.loads((place / folder / "comparison.json").read_text())["cells"]
    timed = ("seconds", "training_seconds", "peak_memory_bytes")
    return [
        {name: value for name, value in cell.items() if name not in timed}
        | {"curve": [(tokens, accuracy) for tokens, _, accuracy in cell["curve"]]}
        for cell in found
    ]


def test_every_cell_has_the_same_budget_and_a_stopped_comparison_goes_on_with_the_cells_that_are_left(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Sequence[str]] = []
    monkeypatch.setattr(cells, "run_posttrain", in_process(calls))
    assert compare(place, "whole") == 0
    told = capsys.readouterr().out
    mentions(told, "[4/4] rloo seed 1", "| rloo | 0, 1 |")
    assert len(calls) == 4

    whole = lasting(place, "whole")
    # 16 completions of 1 to 6 tokens a step: whole steps until 100 tokens or more are sampled, and no step beyond.
    assert all(100 <= cell["sampled_tokens"] < 100 + 16 * 6 for cell in whole)
    assert all(cell["curve"][-1][0] == cell["sampled_tokens"] for cell in whole)
    assert [cell["kl"]["per_completion"] for cell in whole] != [0.0] * 4  # the policies have moved
    assert (place / "whole" / "comparison.png").is_file()

    assert compare(place, "whole") == 0  # all is finished
    assert len(calls) == 4

    monkeypatch.setattr(cells, "run_posttrain", in_process(calls, stop=lambda number: number == 6))
    assert compare(place, "stopped", "--seeds", "1") == 130  # in the second cell
    assert compare(place, "stopped", "--seeds", "1") == 0
    assert lasting(place, "stopped") == whole[:2]


def test_a_cell_that_was_stopped_does_not_go_on_under_another_recipe(place: Path, monkeypatch, capsys) -> None:
    calls: list[Sequence[str]] = []
    monkeypatch.setattr(cells, "run_posttrain", in_process(calls))

    def stopped(cell: Cell) -> dict[str, float]:
        raise KeyboardInterrupt

    monkeypatch.setattr(cells, "kl_to_start", stopped)
    one = ("--seeds", "1", "--run.threads", "1")
    assert compare(place, "begun", *one) == 130  # the run is over, and nothing kept of it yet
    assert compare(place, "begun", *one, "--update.learning-rate", "1e-3") == 2
    assert "grpo-seed-0: was begun by another recipe than grpo seed 0 has now" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(cells, "run_posttrain", in_process(calls))
    (place / "begun").rename(place / "moved")
    assert compare(place, "moved", *one) == 0
    assert [command[0] for command in calls] == ["rl", "rl"]  # one for each cell: the first was finished


def test_a_cell_that_fails_is_told_with_its_log(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "failing.py").write_text("def failing(completions, **columns):\n    raise ValueError('no score')\n")
    failing = ("--rewards", f"{place}/failing.py:failing")
    assert compare(place, "failing", *failing) == 1
    said = capsys.readouterr().err
    mentions(said, "grpo seed 0: `posttrain rl ", "ended with", "grpo-seed-0.cell.log")
    assert "no score" in (place / "failing" / "cells" / "grpo-seed-0.cell.log").read_text()


def test_a_dry_run_lists_the_runs_and_makes_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(place, "dry", "--dry-run") == 0
    said = capsys.readouterr().out
    mentions(said, "4 runs, each with a budget of 100 tokens", "rloo seed 1")
    assert not (place / "dry").exists()


def test_base_must_name_a_recipe() -> None:
    assert "--base is empty" in refusal("compare", "a.yaml", "--base", "--seeds", "2")


ROWS = "".join(f'{{"prompt": "{n}+1=", "completion": "{n + 1}"}}\n' for n in range(1, 9))


@pytest.fixture(scope="module")
def phased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three phases of a tiny model: rows, reward, and reward with the optimiser of the phase before."""
    made = tmp_path_factory.mktemp("phases")
    save_tiny_model(made / "model")
    (made / "rows.jsonl").write_text(ROWS)
    tiny_recipe(made / "base", run={"num_steps": 2}, evaluation={"every_steps": 0, "samples": 1})
    rows = {"name": "dataset", "path": str(made / "rows.jsonl"), "held_out_share": 0.5}
    sft = {"num_epochs": 2, "rows_per_batch": 1}
    going_on = {"reference": {"path": "phase:rows"}, "algorithm": {"kl": {"coefficient": 0.1}}}
    with_moments = {**going_on, "update": {"optimizer_from": "run:reward", "learning_rate": 1e-3}}
    phases: list[dict[str, Any]] = [
        {"name": "rows", "sections": {"model": {"path": str(made / "model")}, "task": rows, "sft": sft}},
        {"name": "reward", "recipe": "base/recipe.yaml", "sections": {"model": {"path": "phase:rows"}, **going_on}},
        {"name": "more", "recipe": "base/recipe.yaml", "sections": {"model": {"path": "phase:reward"}, **with_moments}},
    ]
    (made / "phases.yaml").write_text(yaml.safe_dump({"phases": phases, "run": {"threads": 1}}))
    return made


def phases(phased: Path, folder: str, *more: str) -> int:
    return main(["phases", str(phased / "phases.yaml"), "--folder", str(phased / folder), *more])


def test_policy_optimiser_and_reference_go_on_as_stated_and_a_stopped_recipe_goes_on(
    phased: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Sequence[str]] = []
    monkeypatch.setattr(phases_command, "run_posttrain", in_process(calls, lambda number: number == 2))
    assert phases(phased, "out") == 130  # before the second phase has begun
    assert phases(phased, "out") == 0
    said = capsys.readouterr().out
    assert "[1/3] rows: finished already" in said
    assert [call[0] for call in calls] == ["sft", "rl", "rl", "rl"]

    runs = phased / "out" / "phases"
    rows, reward, more = (runs / name for name in ("1-rows", "2-reward", "3-more"))
    # The policy goes on: what a phase begins with is what the one before it saved.
    for before, after in ((rows, reward), (reward, more)):
        saved = load_file(before / "model" / "model.safetensors")
        began = load_file(after / "checkpoints" / "step-000000" / "policy.safetensors")
        assert all(torch.equal(began[name], tensor) for name, tensor in saved.items() if name in began)
    # So does the optimiser, where it is said: moments and counters, no rates.
    ended = load_file(reward / "checkpoints" / "step-000002" / "optimizer.safetensors")
    began = load_file(more / "checkpoints" / "step-000000" / "optimizer.safetensors")
    assert ended.keys() == began.keys()
    assert all(torch.equal(began[name], tensor) for name, tensor in ended.items())
    assert not load_file(reward / "checkpoints" / "step-000000" / "optimizer.safetensors")
    lines = records(more / "metrics.jsonl")
    assert {line["learning_rate"] for line in lines if "learning_rate" in line} == {1e-3}
    # The reference stays the model of the first phase: at its own start a KL is 0, and later it is not.
    first = [next(line["kl"] for line in each if "kl" in line) for each in (records(reward / "metrics.jsonl"), lines)]
    assert first[0] == pytest.approx(0.0, abs=1e-6)
    assert first[1] > 1e-4
    report = json.loads((phased / "out" / "phases.json").read_text())
    assert [phase["name"] for phase in report] == ["rows", "reward", "more"]
    assert "| more | rl |" in (phased / "out" / "phases.md").read_text()


def test_a_finished_phase_of_another_recipe_is_refused(phased: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = phased / "changed"
    monkeypatch.setattr(phases_command, "run_posttrain", in_process([], lambda number: number == 2))
    assert phases(phased, "changed") == 130  # in the second phase
    content = yaml.safe_load((phased / "phases.yaml").read_text())
    content["phases"][0]["sections"]["sft"]["num_epochs"] = 3
    (phased / "changed.yaml").write_text(yaml.safe_dump(content))
    said = refusal("phases", phased / "changed.yaml", "--folder", folder)
    assert "was started by a different recipe than phase rows has now" in said
    # What the message says is what helps; a later phase that was made of the first one's earlier model is not kept.
    shutil.rmtree(folder / "phases" / "1-rows")
    (folder / "phases" / "2-reward").mkdir()
    command = ["phases", str(phased / "changed.yaml"), "--folder", str(folder)]
    assert "2-reward: was made from an earlier result of phase rows" in refusal(*command)
    shutil.rmtree(folder / "phases" / "2-reward")
    calls: list[Sequence[str]] = []
    monkeypatch.setattr(phases_command, "run_posttrain", in_process(calls, lambda number: number == 2))
    assert main(command) == 130
    assert [call[0] for call in calls] == ["sft", "rl"]


def test_a_dry_run_says_what_each_phase_takes_over(phased: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert phases(phased, "dry", "--dry-run") == 0
    said = capsys.readouterr().out
    assert "1. rows             posttrain sft          takes over nothing from earlier phases" in said
    assert "3. more             posttrain rl           takes over phase:reward, phase:rows, run:reward" in said
    assert not (phased / "dry").exists()


def test_other_commands_say_who_runs_phases(phased: Path) -> None:
    assert "lists phases; run them with `posttrain phases`" in refusal("rl", phased / "phases.yaml")


def test_an_optimiser_that_was_taken_over_is_not_taken_over_again_by_a_killed_run(tmp_path: Path) -> None:
    """Killed in its first step: the checkpoint of step 0 has the other run's moments, which need not be there then."""
    save_tiny_model(tmp_path / "model")
    ended = command("rl", tiny_recipe(tmp_path / "first", run={"num_steps": 2}), folder=tmp_path / "first")
    assert ended.code == 0, ended.err
    sections = {"update": {"optimizer_from": str(tmp_path / "first" / "run")}, "run": {"num_steps": 2}}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    ended = command("rl", tiny_recipe(whole, **sections), folder=whole)
    assert ended.code == 0, ended.err
    recipe, moment = tiny_recipe(killed, **sections), "os.rename rollouts/.tmp-step-000001.parquet 1"
    assert command("rl", recipe, folder=killed, accident=Accident(moment=moment)).code == -9
    norms = [metrics_of(place / "run")[2]["grad_norm"] for place in (whole, tmp_path / "first")]
    assert norms[0] != norms[1], "moments that were taken over change where the first step leads"
    shutil.rmtree(tmp_path / "first")
    ended = command("rl", "--resume", killed / "run", folder=killed)
    assert ended.code == 0, ended.err
    require_same(killed / "run", whole / "run")


ROOT = Path(__file__).parents[2]
STEPS = 3
SMALLER: dict[str, dict[str, Any]] = {
    "demonstrations": {"model": {"path": "model"}, "task": {"held_out_size": 4}, "sft": {"num_epochs": 1}},
    "reasoning": {
        "task": {"held_out_size": 2},
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_completion_tokens": 6},
        "evaluation": {"samples": 1},
        "run": {"num_steps": 2},
    },
    "pairs": {"sampling": {"max_completion_tokens": 6}, "collect": {"num_prompts": 6, "cut_off": "keep"}},
    "judge": {"task": {"held_out_share": 0.0}, "reward_model": {"num_epochs": 1, "pairs_per_batch": 4}},
    "diverse": {
        "task": {"held_out_size": 4},
        "rollout": {"prompts_per_step": 6, "group_size": 2, "max_completion_tokens": 6},
        "evaluation": {"samples": 1},
        "checkpoint": {"every_steps": 1, "keep_last": STEPS + 1},
        "run": {"num_steps": STEPS},
    },
}
"""Sizes alone: what each phase takes from which is the recipe's."""
REWARD = "def true_reward(completions, **columns):\n    return [len(set(text)) / 10 for text in completions]\n"


@pytest.fixture
def hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The recipe with a tiny model, few rows, and a reward of its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import hybrid_rows

    save_tiny_model(tmp_path / "model")
    hybrid_rows.write(Path("runs/hybrid-rows"), num_demonstrations=16, num_puzzles=40)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "sums_task.py").write_text(REWARD)
    content = yaml.safe_load(find_recipe("hybrid-tiny").read_text())
    for phase in content["phases"]:
        for section, options in SMALLER[phase["name"]].items():
            phase["sections"].setdefault(section, {}).update(options)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(content))
    yield tmp_path
    for name in ("hybrid_rows", "sums_task"):
        sys.modules.pop(name, None)


def test_the_bundled_hybrid_recipe_scores_rows_by_their_kind_and_goes_on_from_its_phases(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases_command, "run_posttrain", in_process([]))
    command = ["phases", "small.yaml", "--folder", "out"]
    assert main(command) == 0
    last = hybrid / "out" / "phases" / "5-diverse"
    # Rows of either kind were scored by the reward that is for them, and by no other.
    table = pyarrow.parquet.read_table(last / "rollouts").to_pylist()
    sources = [json.loads(row["columns"])["source"] for row in table]
    assert set(sources) == {"puzzles", "sums"}
    for row, source in zip(table, sources, strict=True):
        assert (row["score/countdown"] is None) == (source == "sums")
        assert (row["score/judge"] is None) == (source == "puzzles")

    # The optimiser is that of `reasoning`, the reference still the first model.
    ended = load_file(max((hybrid / "out/phases/2-reasoning/checkpoints").glob("step-*")) / "optimizer.safetensors")
    began = load_file(last / "checkpoints" / "step-000000" / "optimizer.safetensors")
    assert ended
    assert all(torch.equal(began[name], tensor) for name, tensor in ended.items())
