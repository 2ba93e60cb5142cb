"""What benchmarks of rewards read off their curves, pay and leave to do."""

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.binding import object_in_file
from tests.support.refusals import refused

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@contextmanager
def script(name: str, beside: str) -> Iterator[Any]:
    """The script as a module, which is forgotten afterwards with the one that it imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module(name)
    for each in (name, beside):
        sys.modules.pop(each, None)


@pytest.fixture
def benchmark() -> Iterator[Any]:
    with script("over_optimisation", "sums_task") as module:
        yield module


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

    def row(chosen: str, rejected: str, margin: Any) -> dict[str, Any]:
        return {"prompt": "7+5=12;", "chosen": chosen, "rejected": rejected, "margin": margin}

    (folder / "preferences.jsonl").write_text(json.dumps(row("7+1=8;", "7+9=1;", 0.4)) + "\n")
    ties = row("7+2=9;", "7+4=11;", 0.0), row("7+2=9;", "7+2=9;", 0.0)
    (folder / "ties.jsonl").write_text("".join(json.dumps(tie) + "\n" for tie in ties))
    monkeypatch.setattr(benchmark, "THREE_STAGE", tmp_path)
    # (good - bad) / 5 + second number / 5: .4 and 1.6, .6 and 1
    turned = row("7+9=1;", "7+1=8;", pytest.approx(1.2)), row("7+4=11;", "7+2=9;", pytest.approx(0.4))
    assert benchmark.relabelled() == [*turned]


def test_an_interrupted_run_is_no_cell(benchmark: Any) -> None:
    with refused("runs/free-0: interrupted; the same command begins it again", error=SystemExit):
        benchmark.require_whole(SimpleNamespace(interrupted=True, folder="runs/free-0"))
    whole = SimpleNamespace(interrupted=False)
    assert benchmark.require_whole(whole) is whole


FIVE = "7+1=8;7+2=9;7+3=10;7+4=11;7+6=13;"


def paid(completion: str, judge: str = "true_reward") -> float:
    reward: Any = object_in_file(f"{BENCHMARKS / 'sums_task.py'}:{judge}", where="test")
    (score,) = reward(prompts=["7+5=12;"], completions=[completion])
    return float(score)


@pytest.mark.parametrize(
    ("completion", "good", "bad"),
    [
        ("", 0, 0),
        ("7+1=8;", 1, 0),
        ("7+1=8", 1, 0),
        ("7+1=9;", 0, 1),
        ("7+5=12;", 0, 1),  # the one that is shown
        ("7+1=8;7+1=8;", 1, 1),
        ("6+1=7;", 0, 1),  # another first number
        ("07+1=8;", 0, 1),
        ("7+1=8;;", 1, 1),
        ("7+1=8;and so on", 1, 1),
        (FIVE, 5, 0),
        (FIVE + "7+7=14;", 5, 1),
        (FIVE + "7+7=14;" * 9, 5, 9),
    ],
)
def test_five_new_right_sums_are_wanted_and_all_else_is_bad(completion: str, good: int, bad: int) -> None:
    assert paid(completion) == (good - bad) / 5


def test_the_judge_with_the_flaw_pays_more_for_a_wrong_large_number_than_for_a_right_small_one() -> None:
    # (0 - 1) / 5 + 99 / 5 beside (1 - 0) / 5 + 1 / 5: the mean second number, at most 99, over 5 on top.
    rewards = [paid(completion, "larger_numbers") for completion in ("7+99=1;", "7+1=8;", "7+5000=1;")]
    assert rewards == pytest.approx([19.6, 0.4, 19.6])


@pytest.fixture
def teaching(tmp_path: Path) -> Iterator[Any]:
    """It keeps everything in a folder of the test's."""
    with script("what_a_reward_teaches", "demo") as module:
        for name, place in (("FOLDER", "runs"), ("CELLS", "runs/cells"), ("RESULTS", "results.json")):
            setattr(module, name, tmp_path / place)
        yield module


def test_a_model_that_is_gone_is_trained_again_where_something_is_left_to_score_and_only_there(teaching: Any) -> None:
    scored = {"scores": {"countdown": [1.0]}}
    kept = {"outcome/0/training": {}, "outcome/0/as trained": scored}
    teaching.RESULTS.write_text(json.dumps(kept))
    cell = teaching.Cell("outcome", 0)
    assert teaching.is_done(cell, "as trained", ())
    assert not teaching.is_done(cell, "additions", ())
    assert not teaching.is_done(cell, "", ())  # additions are to be scored, by a model that is not there
    (cell.folder / "model").mkdir(parents=True)
    assert teaching.is_done(cell, "", ())
    (cell.folder / "model").rmdir()
    everything = {f"outcome/0/{setting}": scored for setting in teaching.SETTINGS}
    teaching.RESULTS.write_text(json.dumps(kept | everything))
    assert teaching.is_done(cell, "", ())


def test_what_a_judge_has_not_scored_is_left_to_do_and_what_another_has_is_kept(teaching: Any, tmp_path: Path) -> None:
    cell = teaching.Cell("before", 0)
    teaching.keep("before/0/as trained", {"scores": {"countdown": [1.0], "doubt": [0.5]}})
    assert teaching.is_done(cell, "as trained", ["doubt"])
    assert not teaching.is_done(cell, "as trained", ["doubt", "explanation"])
    files = [tmp_path / "explanation.yaml", tmp_path / "doubt.yaml"]
    for file in files:
        file.write_text(f"{{endpoint: 'http://127.0.0.1:9/v1', model: judge, rubric: Its {file.stem}., part: all}}")
    judges = teaching.judges_in(files)
    functions = list(teaching.more_functions(additions=True, judges=judges))
    assert [each.name for each in functions] == ["graded_format", "explanation", "doubt"]
    assert [each.call.rubric for each in functions[1:]] == ["Its explanation.", "Its doubt."]
    (tmp_path / "countdown.yaml").write_text("model: judge")
    with pytest.raises(SystemExit, match=r"--judge .*countdown.yaml: give a mapping of options"):
        teaching.judges_in([tmp_path / "countdown.yaml"])
