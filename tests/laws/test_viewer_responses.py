"""Answers of the viewer: what a page shows is what the files hold, and no more of them is read than it needs."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from pyarrow import parquet

from posttrain.behaviours.behaviour_table import TABLE
from posttrain.viewer.behaviour_curves import BehaviourCurves
from posttrain.viewer.opened_run import OpenedRun
from posttrain.viewer.rollout_page import MOST_ROLLOUT_TOKENS
from posttrain.viewer.rollout_rows import RowPages
from posttrain.viewer.row_selections import RowQuery
from posttrain.viewer.run_folders import run_folders
from posttrain.viewer.step_pages import partings
from posttrain.viewer.token_pieces import TokenPieces
from posttrain.viewer.viewer_responses import OpenedRuns, viewer_response
from tests.support.hostile_texts import HOSTILE
from tests.support.viewed import with_texts
from tests.support.viewed_folders import (
    END,
    add_line,
    add_step,
    ask,
    byte_tokenizer,
    rollout_row,
    step_rows,
    write_rows,
    write_run,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("viewed") / "run")


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=6))
@settings(max_examples=150)
def test_rollouts_part_where_they_leave_what_most_of_their_company_say(sequences: list[list[int]]) -> None:
    found = partings(sequences)
    for sequence, at in zip(sequences, found, strict=True):
        company = [other for other in sequences if other[:at] == sequence[:at] and len(other) > at]
        if at == len(sequence):  # it never leaves: at each token it agrees with a majority of those that came along
            for place in range(at):
                others = [o[place] for o in sequences if o[:place] == sequence[:place] and len(o) > place]
                assert others.count(sequence[place]) == max(map(others.count, others))
        else:
            said = [other[at] for other in company]
            assert said.count(sequence[at]) <= max(said.count(each) for each in said if each != sequence[at])


def test_pieces_of_bytes_are_characters_or_escapes_that_say_so(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path / "tokenizer")
    pieces = TokenPieces(tmp_path)
    shown = pieces.pieces([*"a✓".encode(), END, 999], [True, False, False, True, True, True])
    assert [piece["text"] for piece in shown] == ["a", r"\xe2", r"\x9c", r"\x93", "<|end|>", "<token 999>"]
    assert [piece["partial"] for piece in shown] == [False, True, True, True, False, False]
    assert [piece["special"] for piece in shown] == [False, False, False, False, True, True]
    assert [piece["sampled"] for piece in shown] == [True, False, False, True, True, True]


IN_PARQUET = {name: text for name, text in HOSTILE.items() if text.isprintable() or "\ud800" not in text}


@pytest.mark.parametrize("text", [*IN_PARQUET.values(), "x" * 1_000_000], ids=[*IN_PARQUET, "a million characters"])
def test_hostile_texts_reach_the_page_as_they_are_with_each_token_in_its_place(text: str, tmp_path: Path) -> None:
    byte_tokenizer(tmp_path / "tokenizer")
    add_step(tmp_path, 1, [rollout_row(1, 0, 0, text, 1.0)])
    page = ask(tmp_path, path="run/0/rollout/rollouts/1/0/0")
    assert page["completion_text"] == page["graded"] == text
    offsets = page["offsets"]
    assert (offsets[0], offsets[-1], len(offsets)) == (
        0,
        min(len(text), MOST_ROLLOUT_TOKENS),
        len(page["completion"]) + 1,
    )
    assert len(page["faults"]) == (len(text) > MOST_ROLLOUT_TOKENS)
    assert offsets == sorted(offsets)
    for piece, start, end in zip(page["completion"], offsets, offsets[1:], strict=False):
        assert piece["partial"] or piece["special"] or text[start:end] == piece["text"]
    assert ask(tmp_path, path="run/0/rows")["rows"][0]["completion"] == text[:400]


def test_bytes_of_a_completion_that_are_not_text_are_written_out(tmp_path: Path) -> None:
    run = with_texts(write_run(tmp_path / "run", 1), ["half \ud800 of a pair"], tmp_path / "damaged")
    shown = r"half \xed\xa0\x80 of a pair"
    assert ask(run, path="run/0/rows")["rows"][0]["completion"] == shown
    assert ask(run, path="run/0/rows", text=r"\xed")["matches"] == 12
    assert ask(run, path="run/0/rollout/rollouts/1/0/0")["completion_text"] == shown
    for path in ("step/1", "group/rollouts/1/0", "problems", "overview"):
        ask(run, path=f"run/0/{path}")


def test_half_of_a_surrogate_pair_survives(tmp_path: Path) -> None:
    add_step(tmp_path, 1, [{**rollout_row(1, 0, 0, "x", 1.0), "columns": r'{"q": "half \ud800"}'}])
    add_line(tmp_path, "alarms.jsonl", {"step": 1, "alarm": "length", "says": "\ud800", "transcript": "half \ud800"})
    [alarm] = ask(tmp_path, path="run/0/overview")["alarms"]
    assert (alarm["says"], alarm["transcript"]) == ("\ud800", "half \ud800")
    assert ask(tmp_path, path="run/0/rollout/rollouts/1/0/0")["columns"] == r'{"q": "half \ud800"}'


def test_a_run_is_followed_while_it_is_written(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 2, finished=False)
    opened = OpenedRun(run)
    pages, versions = RowPages(opened), [opened.version()]
    assert (pages.page(RowQuery(), 0, 5)["total"], opened.metrics.whole().last_step) == (24, 2)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')  # a line that is being written
    assert (len(opened.metrics.whole().steps), opened.metrics.faults) == (2, [])
    versions.append(opened.version())
    with (run / "metrics.jsonl").open("a") as file:
        file.write('ard": 1.0}\n')
    write_rows(run / "rollouts/step-000003.parquet", step_rows(3))
    versions.append(opened.version())
    assert (pages.page(RowQuery(), 0, 5)["total"], opened.metrics.whole().last_step) == (36, 3)
    # A resumed run cuts what came after its checkpoint, and writes it again.
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[0])
    for step in (2, 3):
        (run / f"rollouts/step-{step:06d}.parquet").unlink()
    versions.append(opened.version())
    assert (pages.page(RowQuery(), 0, 5)["total"], opened.metrics.whole().last_step) == (12, 1)
    assert len({*versions}) == len(versions)


def test_held_out_problems_are_solved_lost_always_right_unsolved_or_never(run: Path) -> None:
    page = ask(run, path="run/0/held-out")
    assert page["counts"] == {
        "solved": 1,
        "lost": 0,
        "always": 1,
        "unsolved": 1,
        "never": 1,
    }  # half of two answers is not most of them
    changes = {problem["prompt_id"]: problem for problem in page["problems"]}
    solved = changes["held-out/0"]
    assert (solved["change"], solved["before"], solved["along"], solved["after"]) == ("solved", 0.0, [1.0], 1.0)
    assert solved["links"]["after"] == "evaluations/3/after-0"
    assert [(each["name"], each["accuracy"]) for each in page["evaluations"]] == [
        ("before", 0.375),
        ("brief", 1.0),
        ("after", 0.5),
    ]
    assert changes["held-out/2"]["change"] == "unsolved"  # one of two answers was right before
    # Differences are 1, 0, -1/2 and 0: of the four sums ±1 ± 1/2 all are at least 1/2 away from 0.
    assert page["p_value"] == 1.0
    group = ask(run, path=f"run/0/group/{solved['links']['after']}")
    assert [(each["rollout"], each["reward"]) for each in group["rollouts"]] == [
        ("0", 1.0),
        ("1", 1.0),
        ("greedy-0", 0.0),
    ]


def test_two_runs_are_compared_problem_by_problem(tmp_path: Path, run: Path) -> None:
    other = write_run(tmp_path / "other")
    write_rows(
        other / "evaluations/step-000003.parquet",
        parquet.read_table(run / "evaluations/step-000000.parquet").to_pylist(),
    )
    page = ask(run, other, path="compare", a=0, b=1)
    assert (page["only_a"], page["only_b"], page["both"], page["neither"]) == (1, 0, 1, 2)
    assert {name: [page[name]["name"]] for name in ("a", "b")} == {"a": ["run"], "b": ["other"]}
    names = {line["name"] for panel in page["curves"] for line in panel["lines"]}
    assert {"training, run", "training, other"} <= names


def test_a_problem_over_training_has_its_completions_at_every_step(run: Path) -> None:
    listed = ask(run, path="run/0/problems", text="held-out")
    assert [problem["prompt_id"] for problem in listed["problems"]][:1] == ["held-out/0"]  # asked three times
    page = ask(run, path="run/0/problem", id="held-out/0")
    assert [(step["step"], step["evaluation"], len(step["rows"])) for step in page["steps"]] == [
        (0, "before", 3),
        (3, "brief", 2),
        (3, "after", 3),
    ]
    assert page["prompt"] == "Problem 0"


def test_a_step_marks_groups_without_a_signal_and_those_set_aside(tmp_path: Path) -> None:
    rows = step_rows(1, prompts=3)
    aside = [{**rollout_row(1, 3, sample, "x", float(sample)), "advantage": None} for sample in range(2)]
    add_step(tmp_path, 1, [*rows, *aside])
    groups = ask(tmp_path, path="run/0/step/1")["groups"]
    assert [(group["uninformative"], group["replaced"]) for group in groups] == [
        (False, False),
        (False, False),
        (True, False),
        (False, True),
    ]
    listed = ask(tmp_path, path="run/0/rows")["rows"]
    assert [row["replaced"] for row in listed] == [False] * 12 + [True] * 2
    assert (groups[0]["rewards"], groups[0]["mean"], groups[0]["spread"]) == ([0.0, 1.0, 0.0, 1.0], 0.5, 0.5)


def test_alarms_lead_to_the_rollouts_that_they_are_about(run: Path) -> None:
    alarms = ask(run, path="run/0/overview")["alarms"]
    assert [[link["at"] for link in alarm["links"]] for alarm in alarms] == [[], ["rollouts/3/1/2"]]
    assert ask(run, path=f"run/0/rollout/{alarms[1]['links'][0]['at']}")["row"]["sample"] == 2


def test_an_alarm_about_held_out_completions_leads_to_those(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "alarms.jsonl").unlink()
    alarm = {"step": 3, "alarm": "held-out maths wrong", "says": "s", "transcript": "t"}
    rollouts = [{"draw": 2, "sample": 1}]
    add_line(run, "alarms.jsonl", {**alarm, "rollouts": rollouts, "evaluation": "after"})
    add_line(run, "alarms.jsonl", {**alarm, "rollouts": rollouts})  # of an earlier version: they are of training
    links = [[link["at"] for link in each["links"]] for each in ask(run, path="run/0/overview")["alarms"]]
    assert links[0] == ["evaluations/3/after-2/1"]
    assert links[1] == [f"evaluations/3/after-{draw}/{sample}" for draw in (2, 3) for sample in (0, 1)]
    for at in (*links[0], *links[1]):
        assert ask(run, path=f"run/0/rollout/{at}")["row"]["outcomes"] == {"maths": "wrong"}


def test_an_alarm_of_an_earlier_version_is_found_by_its_transcript(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    shown = "What is 2 + 1?\nünïcödé ✓"  # the end of the prompt, and the completion
    (run / "alarms.jsonl").unlink()
    add_line(run, "alarms.jsonl", {"step": 2, "alarm": "length", "says": "s", "transcript": shown})
    [alarm] = ask(run, path="run/0/overview")["alarms"]
    [link] = alarm["links"]
    assert ask(run, path=f"run/0/rollout/{link['at']}")["completion_text"] == "ünïcödé ✓"


def test_behaviours_are_those_of_the_table_with_examples_that_show_them(tmp_path: Path) -> None:
    texts = ("let me check", "no", "wait, no: let me check", "x")
    for step in (1, 2):
        add_step(tmp_path, step, step_rows(step, texts=texts))
    page = BehaviourCurves(OpenedRun(tmp_path)).page()
    verification = next(each for each in page["behaviours"] if each["name"] == "verification")
    assert verification["says"] == TABLE["verification"].says
    assert [point["share"] for point in verification["points"]] == [0.5, 0.5]
    for point in verification["points"]:
        for link in point["examples"]:
            assert "check" in ask(tmp_path, path=f"run/0/rollout/{link['at']}")["completion_text"]
    assert page["done"]


def test_nothing_of_torch_is_loaded(run: Path) -> None:
    import subprocess
    import sys

    program = (
        "import sys, pathlib; from posttrain.viewer.viewer_responses import OpenedRuns, viewer_response;"
        " from posttrain.server.viewer_routes import RunViewer;"
        f" runs = OpenedRuns.of([pathlib.Path({str(run)!r})]);"
        " [viewer_response(runs, path, {}) for path in ('runs', 'run/0/overview', 'run/0/rows', 'run/0/behaviours',"
        " 'run/0/held-out', 'run/0/problems', 'run/0/step/1', 'run/0/rollout/rollouts/1/0/0')];"
        " print(sorted({'torch', 'transformers', 'tokenizers', 'matplotlib'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


def test_runs_are_found_below_a_folder_the_newest_first(tmp_path: Path) -> None:
    write_run(tmp_path / "old")
    write_run(tmp_path / "set/inner")
    (tmp_path / "set/comparison.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/config.yaml").write_text("{}")
    found = [folder.relative_to(tmp_path).as_posix() for folder in run_folders(tmp_path)]
    assert sorted(found) == ["old", "set", "set/inner"]
    assert ask(tmp_path / "set", path="runs")["runs"][0]["kind"] == "compare"


def test_the_list_says_what_was_not_searched_and_leaves_out_what_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "1/2/3/4/5/deep"):
        write_run(tmp_path / name, 1)
    runs = OpenedRuns.of(run_folders(tmp_path), below=tmp_path)
    listed = viewer_response(runs, "runs", {})
    assert {each["name"] for each in listed["runs"]} == {"a", "b"}
    [fault] = listed["faults"]
    assert "not searched, such as" in fault
    assert str(tmp_path / "1/2/3/4/5") in fault
    numbers = {each["name"]: each["run"] for each in listed["runs"]}
    shutil.rmtree(tmp_path / "a")
    assert [(each["name"], each["run"]) for each in viewer_response(runs, "runs", {})["runs"]] == [("b", numbers["b"])]
    monkeypatch.setattr("posttrain.viewer.run_folders.MOST_RUNS", 1)
    write_run(tmp_path / "c", 1)
    assert any("only the first 1 runs" in each for each in viewer_response(runs, "runs", {})["faults"])


def test_a_list_of_runs_reads_only_the_end_of_their_metrics_and_finds_runs_that_begin(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    padding = {f"behaviour/{each}": 0.123456789 for each in range(1000)}
    for step in range(4, 20):
        add_line(run, "metrics.jsonl", {"step": step, "reward": step / 100, **padding})
    runs = OpenedRuns.of(run_folders(tmp_path), below=tmp_path)
    [entry] = viewer_response(runs, "runs", {})["runs"]
    assert (entry["last_step"], entry["reward"], entry["faults"]) == (19, 0.19, [])
    write_run(tmp_path / "another")
    assert [each["name"] for each in viewer_response(runs, "runs", {})["runs"]] == ["run", "another"]
    assert len(viewer_response(runs, "run/0/overview", {})["curves"][0]["lines"][0]["steps"]) == 19


def test_json_has_no_number_that_json_lacks(tmp_path: Path) -> None:
    rows = [rollout_row(1, 0, 0, "x", float("nan")), rollout_row(1, 0, 1, "x", float("inf"))]
    add_step(tmp_path, 1, [{**row, "extra/f/n": float("nan"), "extra/f/list": [float("inf"), 1.0]} for row in rows])
    for path in ("run/0/rows", "run/0/step/1", "run/0/group/rollouts/1/0", "run/0/rollout/rollouts/1/0/1"):
        assert json.dumps(ask(tmp_path, path=path))
    assert [row["reward"] for row in ask(tmp_path, path="run/0/rows")["rows"]] == [None, None]
    extras = ask(tmp_path, path="run/0/rollout/rollouts/1/0/1")["extras"]
    assert extras == {"f/n": None, "f/list": [None, 1.0]}
