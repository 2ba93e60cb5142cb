"""benchmarks/over_optimisation.py: what it reads off its curves, and the pairs that its flawed judge learns from."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.refusals import refused

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("over_optimisation")
    for name in ("over_optimisation", "sums_task"):
        sys.modules.pop(name, None)


def test_who_stops_early_stops_at_the_highest_mean_wherever_that_is_and_whatever_its_sign(benchmark: Any) -> None:
    rising = [step / 20 for step in range(20)]
    assert benchmark.stopped_early({"true": rising}) == 19  # the last step that is looked at
    hill = [-1 - abs(step - 9) / 10 for step in range(20)]  # below 0 throughout, highest in step 9
    assert benchmark.stopped_early({"true": hill}) == 9
    assert benchmark.peak({"true": hill}) == 9


def test_the_worth_of_an_early_stop_is_that_of_steps_which_nobody_looked_at(benchmark: Any) -> None:
    # Steps 1, 3, 5 ... are looked at, and lucky around 7; all others earn 0.
    lucky = [1.0 if step in (3, 5, 7, 9, 11) else 0.0 for step in range(20)]
    step, told_of = benchmark.points({"true": lucky})["stopped"]
    assert step == 7
    assert list(told_of) == [4, 6, 8, 10]
    zeros = [0.0] * 20
    row = {"curve": dict.fromkeys(benchmark.MEASURES, zeros) | {"true": lucky}, "completions_per_step": 4}
    assert "0.000 [0.000, 0.000]" in benchmark.told(row, told_of)


def test_an_interval_is_over_all_completions_of_the_steps(benchmark: Any) -> None:
    # Deviations of 3 and 4: √((9 + 16) / 2 / (2 · 8)) = .8839, times 1.96 = 1.732
    curve = {name: [0.0, 0.0] for name in benchmark.MEASURES} | {"true": [1.0, 2.0], "true_std": [3.0, 4.0]}
    assert "1.500 [-0.232, 3.232]" in benchmark.told({"curve": curve, "completions_per_step": 8}, [0, 1])


def test_the_flawed_judge_turns_pairs_round_for_large_numbers_by_margins_as_the_other_has_them(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "phases" / "2-pairs"
    folder.mkdir(parents=True)
    pair = {"prompt": "7+5=12;", "chosen": "7+1=8;", "rejected": "7+9=1;", "margin": 0.4}
    tie = {"prompt": "7+5=12;", "chosen": "7+2=9;", "rejected": "7+4=11;", "margin": 0.0}
    same = {"prompt": "7+5=12;", "chosen": "7+2=9;", "rejected": "7+2=9;", "margin": 0.0}
    (folder / "preferences.jsonl").write_text(json.dumps(pair) + "\n")
    (folder / "ties.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (tie, same)))
    monkeypatch.setattr(benchmark, "THREE_STAGE", tmp_path)
    # (good - bad) / 5 + second number / 5: .4 and 1.6, .6 and 1
    assert benchmark.relabelled() == [
        {"prompt": "7+5=12;", "chosen": "7+9=1;", "rejected": "7+1=8;", "margin": pytest.approx(1.2)},
        {"prompt": "7+5=12;", "chosen": "7+4=11;", "rejected": "7+2=9;", "margin": pytest.approx(0.4)},
    ]


def test_an_interrupted_run_is_no_cell(benchmark: Any) -> None:
    with refused("runs/free-0: interrupted; the same command begins it again", error=SystemExit):
        benchmark.require_whole(SimpleNamespace(interrupted=True, folder="runs/free-0"))
    whole = SimpleNamespace(interrupted=False)
    assert benchmark.require_whole(whole) is whole
