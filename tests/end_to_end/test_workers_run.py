"""A whole run whose reward function is in workers, and one that finds its scores in a file."""

import json
from pathlib import Path

import pytest

from tests.support.runs import command, metrics_of, save_tiny_model, tiny_recipe, untimed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("workers")
    save_tiny_model(made / "model")
    return made


def run_with(folder: Path, name: str, grading: dict[str, object], **options: object) -> Path:
    recipe = tiny_recipe(folder / name, grading=grading, rewards=[{"path": "../dice.py:dice", **options}])
    (folder / "dice.py").write_text((folder / name / "dice.py").read_text())
    ended = command("rl", recipe, folder=folder / name)
    assert ended.code == 0, ended.err
    return folder / name / "run"


def scores(run: Path) -> list[object]:
    return [json.loads(line) for line in (run / "scores.jsonl").read_text().splitlines()]


def test_workers_change_no_number_of_a_run_and_a_second_run_finds_every_score_in_the_file(folder: Path) -> None:
    plain = run_with(folder, "plain", {})
    kept = {"cache_file": "../scores.db", "seconds": 100.0}
    limits = {"workers": 2, "item_seconds": 20.0, "cache": True}
    first, second = (run_with(folder, name, kept, **limits) for name in ("first", "second"))
    assert scores(plain) == scores(first) == scores(second)
    seen = [[untimed(line) for line in metrics_of(run)] for run in (plain, first, second)]
    cached = [[line.pop("num_cached_scores", None) for line in lines] for lines in seen]
    assert seen[0] == seen[1] == seen[2]
    assert cached[0] == [None, 0, 0, 0, 0]
    assert cached[1][1] < 16  # of four prompts and four completions each; step 0 is an evaluation
    assert cached[2] == [None, 16, 16, 16, 16]


def test_a_limit_that_cannot_be_kept_is_told_before_anything_is_trained(folder: Path) -> None:
    recipe = tiny_recipe(folder / "refused", grading={"seconds": 100.0})
    ended = command("rl", recipe, folder=folder / "refused")
    assert ended.code == 2
    assert "grading.seconds = 100 cannot end reward 'dice', a plain function in the trainer's process" in ended.err
    assert not (folder / "refused" / "run").exists()
