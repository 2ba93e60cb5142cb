"""Rows of rollouts page by page: filters, orders, and how much of the files a page reads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from posttrain.viewer import row_selections
from posttrain.viewer.opened_run import OpenedRun
from posttrain.viewer.rollout_rows import RowPages
from posttrain.viewer.row_selections import RowQuery
from tests.support.viewed_folders import add_step, ask, rollout_row, step_rows, write_rows, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("viewed") / "run")


def stored(run: Path) -> list[dict[str, Any]]:
    return [row for file in sorted((run / "rollouts").iterdir()) for row in parquet.read_table(file).to_pylist()]


def shown_ids(rows: Sequence[dict[str, Any]]) -> list[tuple[int, int, int]]:
    return [(row["step"], row["draw"], row["sample"]) for row in rows]


@pytest.mark.parametrize("limit", [1, 5, 7, 100])
def test_pages_one_after_another_are_all_rows_in_order(run: Path, limit: int) -> None:
    pages, offset = [], 0
    while True:
        page = ask(run, path="run/0/rows", offset=offset, limit=limit)
        assert (page["total"], page["matches"], page["done"], page["faults"]) == (36, 36, True, [])
        if not page["rows"]:
            break
        pages += page["rows"]
        offset += limit
    assert shown_ids(pages) == shown_ids(stored(run))
    for row, held in zip(pages, stored(run), strict=True):
        assert (row["completion"], row["reward"], row["length"]) == (
            held["completion"],
            held["reward"],
            len(held["tokens"]),
        )
        assert row["at"] == f"rollouts/{held['step']}/{held['draw']}/{held['sample']}"


def test_a_page_reads_only_the_row_groups_that_it_shows(tmp_path: Path) -> None:
    for step in range(1, 21):
        write_rows(tmp_path / f"rollouts/step-{step:06d}.parquet", step_rows(step, prompts=8, group=8), in_groups_of=16)
    opened = OpenedRun(tmp_path)
    pages = RowPages(opened)
    pages.page(RowQuery(), 0, 1)  # which also reads the outcomes of the last file
    files = [opened.rollouts.file(step) for step in opened.rollouts.steps()]
    for file in files:
        file.read_groups.clear()
    page = pages.page(RowQuery(), 64 * 5 + 30, 20)  # rows 30 … 49 of the sixth file, which are in three groups of 16
    assert [row["step"] for row in page["rows"]] == [6] * 20
    assert [file.read_groups for file in files] == [{1, 2, 3} if step == 6 else set() for step in range(1, 21)]


FILTERS: dict[str, tuple[dict[str, object], Any]] = {
    "a step": ({"step": 2}, lambda row: row["step"] == 2),
    "an outcome": ({"outcome": "maths:wrong"}, lambda row: row["outcome/maths"] == "wrong"),
    "an outcome of any function": ({"outcome": "correct"}, lambda row: row["outcome/maths"] == "correct"),
    "a reward": ({"term": "reward", "low": 0.5}, lambda row: row["reward"] >= 0.5),
    "a term": ({"term": "maths", "high": 0}, lambda row: row["score/maths"] <= 0),
    "a length": ({"length_low": 5, "length_high": 14}, lambda row: 5 <= len(row["tokens"]) <= 14),
    "a text": ({"text": "LONGER"}, lambda row: "longer" in row["completion"]),
    "a text of the prompt": ({"text": "is 2 + 1"}, lambda row: "is 2 + 1" in row["prompt"]),
    "a text like a pattern": ({"text": ".*"}, lambda row: False),
    "all of them": (
        {"step": 3, "outcome": "maths:correct", "text": "o", "length_high": 5},
        lambda row: row["step"] == 3 and row["reward"] and "o" in row["completion"] and len(row["tokens"]) <= 5,
    ),
}


@pytest.mark.parametrize(("query", "holds"), FILTERS.values(), ids=FILTERS)
def test_a_filter_leaves_the_rows_that_have_what_it_asks_for(run: Path, query: dict[str, object], holds: Any) -> None:
    page = ask(run, path="run/0/rows", **query)
    assert shown_ids(page["rows"]) == shown_ids([row for row in stored(run) if holds(row)])
    assert (page["matches"], page["done"]) == (len(page["rows"]), True)


@pytest.mark.parametrize("order", ["reward", "-reward", "-length", "length", "-step", "advantage"])
def test_an_order_is_over_all_files(run: Path, order: str) -> None:
    page = ask(run, path="run/0/rows", sort=order)
    name = order.removeprefix("-")
    keys = [row[name] for row in page["rows"]]
    assert keys == sorted(keys, reverse=order.startswith("-"))
    assert len(keys) == 36


def test_rows_without_a_number_come_last(tmp_path: Path) -> None:
    rewards = [None, 1.0, None, 0.0]
    add_step(tmp_path, 1, [rollout_row(1, 0, sample, "x", reward) for sample, reward in enumerate(rewards)])
    for order, expected in (("reward", [0.0, 1.0, None, None]), ("-reward", [1.0, 0.0, None, None])):
        assert [row["reward"] for row in ask(tmp_path, path="run/0/rows", sort=order)["rows"]] == expected


def test_a_look_through_many_files_says_how_far_it_is_and_goes_on(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_selections, "LOOK_SECONDS", -1.0)  # one file an answer
    pages = RowPages(OpenedRun(run))
    found = [pages.page(RowQuery(outcome="maths:wrong"), 0, 100) for _ in range(4)]
    assert [(page["looked_at"], page["done"], page["matches"]) for page in found] == [
        (1, False, 8),
        (2, False, 16),
        (3, True, 24),
        (3, True, 24),
    ]


def test_what_a_filter_found_is_kept_but_for_files_that_are_new_or_replaced(tmp_path: Path) -> None:
    def write(step: int, right: int) -> None:
        texts = ["yes"] * right + ["no"] * (3 - right)
        rows = [rollout_row(step, 0, sample, text, float(text == "yes")) for sample, text in enumerate(texts)]
        write_rows(tmp_path / "new", rows)
        (tmp_path / "rollouts").mkdir(exist_ok=True)
        (tmp_path / "new").rename(tmp_path / f"rollouts/step-{step:06d}.parquet")

    for step in (1, 2, 3):
        write(step, 1)
    opened = OpenedRun(tmp_path)
    pages, files = RowPages(opened), opened.rollouts
    queries = [RowQuery(outcome="maths:correct"), RowQuery(sort="-reward"), RowQuery(text="yes")]
    assert [pages.page(query, 0, 100)["matches"] for query in queries] == [3, 9, 3]
    write(2, 3)  # of equal length, as a resumed run writes a step again
    write(4, 2)
    untouched = [files.file(step) for step in (1, 3)]
    for file in untouched:
        file.read_groups.clear()
    found = [pages.page(query, 0, 100) for query in queries]
    assert [page["matches"] for page in found] == [7, 12, 7]
    assert {row["completion"] for page in (found[0], found[2]) for row in page["rows"]} == {"yes"}
    rewards = [row["reward"] for row in found[1]["rows"]]
    assert rewards == sorted(rewards, reverse=True)
    for file in untouched:
        file.read_groups.clear()
    write(5, 0)
    assert pages.page(RowQuery(text="yes"), 50, 1)["matches"] == 7
    assert [file.read_groups for file in untouched] == [set(), set()]


def test_a_sorted_page_reads_only_the_row_groups_with_its_rows(tmp_path: Path) -> None:
    rows = [rollout_row(1, 0, sample, f"text {sample}", float(sample in (3, 90))) for sample in range(100)]
    write_rows(tmp_path / "rollouts/step-000001.parquet", rows, in_groups_of=10)
    opened = OpenedRun(tmp_path)
    pages, file = RowPages(opened), opened.rollouts.file(1)
    pages.page(RowQuery(sort="-reward"), 0, 2)
    file.read_groups.clear()
    page = pages.page(RowQuery(sort="-reward"), 0, 2)
    assert [(row["sample"], row["completion"]) for row in page["rows"]] == [(3, "text 3"), (90, "text 90")]
    assert file.read_groups == {0, 9}


def test_held_out_rows_are_greedy_or_sampled(run: Path) -> None:
    found = {
        sampling: ask(run, path="run/0/rows", source="evaluations", sampling=sampling)
        for sampling in ("", "greedy", "sampled")
    }
    assert {row["greedy"] for row in found["greedy"]["rows"]} == {True}
    assert {row["greedy"] for row in found["sampled"]["rows"]} == {False}
    assert found["greedy"]["matches"] + found["sampled"]["matches"] == found[""]["matches"] == found[""]["total"]
    assert ask(run, path="run/0/rows", sampling="sampled")["matches"] == 36, "training rollouts are sampled"
