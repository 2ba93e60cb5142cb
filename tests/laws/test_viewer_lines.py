"""Files of lines as the viewer reads them: only what is new, no line that is too long, and curves of a bounded size."""

import json
from pathlib import Path

import numpy as np
import pytest

from posttrain.rewards.exact_match import final_text
from posttrain.viewer import line_files
from posttrain.viewer.held_out_pages import measured
from posttrain.viewer.kinds.pair_lines import PairLines
from posttrain.viewer.metric_curves import MOST_POINTS, Drawn, curve_panels, extremes, line_of, seconds_by_stage
from posttrain.viewer.metric_lines import MetricLines
from posttrain.viewer.read_spans import text_spans
from posttrain.viewer.score_lines import ScoreLines
from tests.support.viewed_folders import add_line, ask, write_run


def metrics_file(folder: Path, lines: list[str]) -> MetricLines:
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return MetricLines(folder / "metrics.jsonl")


def test_a_line_that_is_too_long_is_skipped_once_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_files, "MOST_LINE", 64)
    file = metrics_file(tmp_path, ['{"step": 1, "reward": 1}', json.dumps({"step": 2, "x": "y" * 200})])
    with file.path.open("a") as grown:
        grown.write('{"step": 3, "reward": 3}\n' + "0" * 200)  # and a line without an end, as a crash leaves
    assert file.whole().by_step("reward") == {1: 1.0, 3: 3.0}
    assert [fault.partition(":")[0] for fault in file.faults] == ["metrics.jsonl, line 2", "metrics.jsonl, line 4"]
    read_to = file.end
    assert read_to == file.path.stat().st_size  # so that the next look does not read it again
    with file.path.open("a") as grown:
        grown.write('0\n{"step": 5, "reward": 5}\n{"step": 6, "rew')
    assert file.whole().by_step("reward") == {1: 1.0, 3: 3.0, 5: 5.0}
    assert (len(file.faults), file.unfinished) == (2, True)


def test_a_journal_that_is_mostly_a_hole_is_read_in_pieces(tmp_path: Path) -> None:
    import tracemalloc

    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("ab") as file:
        file.truncate(64 << 20)
    tracemalloc.start()
    page = ask(run, path="run/0/overview")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert any("metrics.jsonl, line 4" in fault and "longer" in fault for fault in page["faults"])
    assert page["last_step"] == 3
    assert peak < 16 << 20


def test_numbers_of_metrics_are_those_of_their_last_line(tmp_path: Path) -> None:
    lines = [
        '{"step": 1, "reward": 1, "kl": null}',
        '{"step": 3, "reward": 3}',
        '{"step": 2, "reward": 2, "kl": "x"}',
        '{"step": 3, "reward": 4, "kl": 1e999}',
        '{"step": 1e400, "reward": 9}',
        '{"step": 99999999999999999999, "reward": 9}',
        '{"step": 4, "reward": 1' + "0" * 400 + "}",
    ]
    metrics = metrics_file(tmp_path, lines).whole()
    assert metrics.by_step("reward") == {1: 1.0, 2: 2.0, 3: 4.0, 4: None}
    assert metrics.by_step("kl") == {1: None, 2: None, 3: None}
    assert metrics.of_step(3) == [{"step": 3, "reward": 3.0}, {"step": 3, "reward": 4.0, "kl": None}]
    assert (metrics.last_step, metrics.last("reward"), metrics.last("none"), len(metrics.faults)) == (4, None, None, 2)


@pytest.mark.parametrize("count", [5, MOST_POINTS, MOST_POINTS + 1, 12_345])
def test_a_curve_of_many_steps_keeps_its_ends_and_its_extremes(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    values[count // 2], values[count // 3] = 9.0, np.nan
    places = extremes(values)
    assert len(places) <= MOST_POINTS + 2
    assert (places[0], places[-1]) == (0, count - 1)
    assert (np.nanmax(values[places]), np.nanmin(values[places])) == (9.0, np.nanmin(values))
    assert (np.diff(places) > 0).all()
    if count <= MOST_POINTS:
        assert len(places) == count


def test_a_long_run_answers_with_a_bounded_number_of_points(tmp_path: Path) -> None:
    lines = []
    for step in range(1, 5001):
        record = {"step": step, "reward": step % 7, "seconds/update": 1.0, "step_time": 1.0}
        measured = {"eval/accuracy_sampled": 0.5, "eval/accuracy_sampled_low": step / 1e4}
        lines.append(json.dumps({**record, **(measured if step % 10 == 0 else {})}))
    metrics = metrics_file(tmp_path, lines).whole()
    for panel in curve_panels(metrics):
        for line in panel["lines"]:
            assert 500 <= len(line["steps"]) <= MOST_POINTS + 2
    accuracy = line_of(metrics, Drawn("eval/accuracy_sampled", "sampled"))
    assert accuracy is not None
    assert accuracy["low"] == [step / 1e4 for step in accuracy["steps"]]
    assert accuracy["steps"] == [*range(10, 5001, 10)]
    stacked = seconds_by_stage(metrics)
    assert (len(stacked["steps"]), stacked["steps"][-1], {*stacked["values"][0]}) == (1000, 5000, {1.0})


def test_pairs_are_found_by_their_place_and_only_what_is_shown_is_read(tmp_path: Path) -> None:
    file = tmp_path / "held_out.jsonl"
    rows = [{"where": str(at), "chosen": at % 3, "rejected": 1, "chosen_text": "é" * at} for at in range(9)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = PairLines(file, ("chosen", "rejected"), "chosen_text")
    pairs.read_on()
    assert [*pairs.margins] == [at % 3 - 1 for at in range(9)]
    assert pairs.rows([7, 2]) == [rows[7], rows[2]]
    add_line(tmp_path, "held_out.jsonl", {"where": "9", "chosen": None, "rejected": 1})
    pairs.read_on()
    assert np.isnan(pairs.margins[-1])
    assert [each["where"] for each in pairs.rows([9, 0])] == ["9", "0"]


def test_a_long_line_of_scores_has_its_place_and_the_limit_holds_when_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_files, "MOST_LINE", 64)
    for draw in range(2):
        add_line(tmp_path, "scores.jsonl", {"step": 1, "draw": draw, "details": "x" * 200 * (1 - draw)})
    scores = ScoreLines(tmp_path / "scores.jsonl")
    assert [len(str(scores.of_group(1, draw)["details"])) for draw in range(2)] == [200, 0]
    assert scores.faults == []


@pytest.mark.parametrize(("high", "drawn"), [(0.0, {}), (0.25, {"Clipped": ["low", "high"]})])
def test_curves_that_are_0_by_construction_are_left_out(
    tmp_path: Path, high: float, drawn: dict[str, list[str]]
) -> None:
    """With one update per step π is μ: nothing is clipped, and the KL to μ is rounding."""
    numbers = {"kl": 0.1, "kl_behaviour": 1e-12, "clip_ratio/low_mean": 0.0, "clip_ratio/high_mean": high}
    metrics = metrics_file(tmp_path, [json.dumps({"step": step, **numbers}) for step in (1, 2)]).whole()
    found = {panel["panel"]: [line["name"] for line in panel["lines"]] for panel in curve_panels(metrics)}
    assert found == {"KL": ["to the reference"], **drawn}


def test_accuracy_counts_as_many_completions_of_each_problem() -> None:
    def row(problem: str, sample: int, judged: float | None, **other: object) -> dict[str, object]:
        return {
            "prompt_id": problem,
            "sample": sample,
            "judged": judged,
            "draw": 0,
            "evaluation": "after",
            "greedy": False,
            **other,
        }

    rows = [row("a", 0, 1.0), row("a", 1, 0.0), row("b", 0, 0.0), row("b", 1, None), row("a", 0, 1.0, greedy=True)]
    more = [row("a", 2, 1.0), row("a", 3, 1.0)]  # for pass@8
    found = measured([*rows, *more, row("b", 0, 1.0, evaluation="before")], 3, "after")
    assert {name: each.right for name, each in found.items()} == {"a": (1, 2), "b": (0, 1)}


@pytest.mark.parametrize("function", ["countdown", "strict_format", "graded_format"])
def test_a_grader_that_reads_tags_marks_the_answer_between_them(function: str) -> None:
    text = "<think>1+2=3</think> <answer>1 + 2</answer>"
    (span,), notes = text_spans(text, {f"score/{function}": 1.0, f"outcome/{function}": "correct"}, {})
    assert (text[span["start"] : span["end"]], span["function"], span["value"], notes) == ("1 + 2", function, 1.0, [])
    assert text_spans("no tags", {f"score/{function}": 0.0}, {}) == ([], [])


@pytest.mark.parametrize("function", ["exact_match", "generated"])
@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("<think>\\boxed{5}</think> so \\boxed{ 7 } <answer> 6 </answer>, not 6", "6"),
        ("<think><answer>5</answer></think> it is \\boxed{\\frac{1}{2}}, not 5", "\\frac{1}{2}"),
        ("<think>5</think>\n 5 apples\n", "5 apples"),
        ("<think>5 and so on", None),
    ],
    ids=["tags", "box", "everything", "only thinking"],
)
def test_the_mark_is_what_the_grader_reads(function: str, text: str, read: str | None) -> None:
    row = {f"score/{function}": 1.0, f"outcome/{function}": "correct"}
    spans, _ = text_spans(text, row, {})
    assert final_text(text, cut_off=False) == read
    assert [text[span["start"] : span["end"]] for span in spans] == ([] if read is None else [read])
    assert text_spans("everything", {**row, f"outcome/{function}": "truncated"}, {})[0] == []
