"""benchmarks/what_a_reward_teaches.py: what is left to do, on a machine that has the results and not the models."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The script as a module that keeps everything in a folder of the test's."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("what_a_reward_teaches")
    for name, place in (("FOLDER", "runs"), ("CELLS", "runs/cells"), ("RESULTS", "results.json")):
        monkeypatch.setattr(module, name, tmp_path / place)
    yield module
    for name in ("what_a_reward_teaches", "demo"):
        sys.modules.pop(name, None)


def test_a_model_that_is_gone_is_trained_again_where_something_is_left_to_score_and_only_there(benchmark: Any) -> None:
    scored = {"scores": {"countdown": [1.0]}}
    kept = {"outcome/0/training": {}, "outcome/0/as trained": scored}
    benchmark.RESULTS.write_text(json.dumps(kept))
    cell = benchmark.Cell("outcome", 0)
    assert benchmark.is_done(cell, "as trained", ())
    assert not benchmark.is_done(cell, "additions", ())
    assert not benchmark.is_done(cell, "", ())  # additions are to be scored, by a model that is not there
    (cell.folder / "model").mkdir(parents=True)
    assert benchmark.is_done(cell, "", ())
    (cell.folder / "model").rmdir()
    everything = {f"outcome/0/{setting}": scored for setting in benchmark.SETTINGS}
    benchmark.RESULTS.write_text(json.dumps(kept | everything))
    assert benchmark.is_done(cell, "", ())


def test_what_a_judge_has_not_scored_is_left_to_do_and_what_another_has_is_kept(benchmark: Any, tmp_path: Path) -> None:
    cell = benchmark.Cell("before", 0)
    benchmark.keep("before/0/as trained", {"scores": {"countdown": [1.0], "doubt": [0.5]}})
    assert benchmark.is_done(cell, "as trained", ["doubt"])
    assert not benchmark.is_done(cell, "as trained", ["doubt", "explanation"])
    files = [tmp_path / "explanation.yaml", tmp_path / "doubt.yaml"]
    for file in files:
        file.write_text(f"{{endpoint: 'http://127.0.0.1:9/v1', model: judge, rubric: Its {file.stem}., part: all}}")
    judges = benchmark.judges_in(files)
    functions = list(benchmark.more_functions(additions=True, judges=judges))
    assert [each.name for each in functions] == ["graded_format", "explanation", "doubt"]
    assert [each.call.rubric for each in functions[1:]] == ["Its explanation.", "Its doubt."]
    (tmp_path / "countdown.yaml").write_text("model: judge")
    with pytest.raises(SystemExit, match=r"--judge .*countdown.yaml: give a mapping of options"):
        benchmark.judges_in([tmp_path / "countdown.yaml"])
