"""Rows of rollout files as tables show them, page by page, filtered and sorted.

Without a filter or order, a page reads footers and the row groups that it shows.  Otherwise the needed columns are read
file by file, with a time limit per response; results are cached, and the page asks again.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.viewer.folder_files import Unreadable, json_number, noting
from posttrain.viewer.opened_run import OpenedRun
from posttrain.viewer.response_types import Source
from posttrain.viewer.rollout_responses import RowPage, ShownRollout
from posttrain.viewer.row_selections import RowQuery, Selection, require_terms
from posttrain.viewer.step_files import StepFile, StepFiles

MOST_ROWS = 100
PROMPT_CHARACTERS, COMPLETION_CHARACTERS = 200, 400
KEPT_SELECTIONS = 16
ROW = ("draw", "sample", "prompt_id", "prompt", "completion", "finish", "reward", "advantage")
EVALUATION = ("evaluation", "greedy", "judged")
PREFIXES = ("score/", "outcome/")
NAMES = ("draw", "sample", "evaluation", "greedy")
"""Columns that `row_names` reads."""


class RowPages:
    """Pages of rows of one run; caches the results of filters."""

    def __init__(self, run: OpenedRun) -> None:
        self.run = run
        self._selections: OrderedDict[RowQuery, Selection] = OrderedDict()

    def page(self, query: RowQuery, offset: int, limit: int) -> RowPage:
        """The rows from `offset` on, at most `limit` of them.  Raises WrongQuery."""
        faults: list[str] = []
        files = self.run.files(query.source)
        steps = [step for step in files.steps() if query.step in (None, step)]
        opened: dict[int, StepFile] = {}
        for step in steps:
            with noting(faults):
                opened[step] = files.file(step)
        require_terms(query, opened)
        limit = max(1, min(limit, MOST_ROWS))
        total = sum(file.num_rows for file in opened.values())
        if query.chooses:
            selection = self._selection(query)
            selection.look(files, opened)
            faults += [each for each in selection.faults if each not in faults]
            of_steps, places = selection.ordered()
            looked_at, matches = len(selection.found), len(places)
            part = slice(offset, offset + limit)
            wanted = [*zip(of_steps[part].tolist(), places[part].tolist(), strict=True)]
        else:
            looked_at, matches = len(opened), total
            wanted = rows_between(opened, offset, offset + limit)
        rows: list[ShownRollout] = []
        with noting(faults):
            rows = rows_at(opened, wanted, query.source)
        outcomes, terms = filter_choices(files, opened, faults)
        return RowPage(
            total=total,
            matches=matches,
            offset=offset,
            done=looked_at >= len(opened),
            looked_at=looked_at,
            of_files=len(opened),
            rows=rows,
            outcomes=outcomes,
            terms=terms,
            faults=faults,
        )

    def _selection(self, query: RowQuery) -> Selection:
        """What the query has found so far; of many queries the oldest is forgotten."""
        selection = self._selections.setdefault(query, Selection(query))
        self._selections.move_to_end(query)
        if len(self._selections) > KEPT_SELECTIONS:
            self._selections.popitem(last=False)
        return selection


def rows_between(opened: Mapping[int, StepFile], first: int, last: int) -> list[tuple[int, int]]:
    """(step, row) of the rows of all files in order."""
    found, start = list[tuple[int, int]](), 0
    for step, file in opened.items():
        end = start + file.num_rows
        found += [(step, row - start) for row in range(max(first, start), min(last, end))]
        start = end
    return found


def rows_at(opened: Mapping[int, StepFile], wanted: Sequence[tuple[int, int]], source: Source) -> list[ShownRollout]:
    """The rows at some places, each file read once.  Raises Unreadable."""
    of_step: dict[int, list[int]] = {}
    for step, row in wanted:
        of_step.setdefault(step, []).append(row)
    found: dict[tuple[int, int], ShownRollout] = {}
    for step, rows in of_step.items():
        shown = rows_of(opened[step], rows, source, step)
        found |= {(step, row): each for row, each in zip(rows, shown, strict=True)}
    return [found[place] for place in wanted]


def rows_of(file: StepFile, places: Sequence[int], source: Source, step: int) -> list[ShownRollout]:
    """The rows at some places of a file.  Raises Unreadable."""
    names = [name for name in file.columns if name in (*ROW, *EVALUATION) or name.startswith(PREFIXES)]
    table, lengths = file.read_rows(names, places)
    return [
        shown_row(row, source, step, whole_length(length))
        for row, length in zip(table.to_pylist(), lengths, strict=True)
    ]


def whole_length(length: float) -> int | None:
    return None if np.isnan(length) else int(length)


def shown_row(row: Mapping[str, Any], source: Source, step: int, length: int | None) -> ShownRollout:
    """A row as tables show it."""
    prompt, completion = row["prompt"] or "", row["completion"] or ""
    group, rollout = row_names(row)
    reward, advantage = json_number(row.get("reward")), json_number(row.get("advantage"))
    return ShownRollout(
        at=f"{source}/{step}/{group}/{rollout}",
        source=source,
        step=step,
        draw=row["draw"],
        sample=row["sample"],
        group=group,
        rollout=rollout,
        prompt_id=row["prompt_id"] or "",
        prompt=prompt[-PROMPT_CHARACTERS:],
        completion=completion[:COMPLETION_CHARACTERS],
        cut=len(completion) > COMPLETION_CHARACTERS,
        reward=reward,
        advantage=advantage,
        replaced="advantage" in row and advantage is None and reward is not None,
        finish=row.get("finish") or "",
        length=length,
        outcomes=with_prefix(row, "outcome/", lambda value: value if isinstance(value, str) else ""),
        scores=with_prefix(row, "score/", json_number),
        judged=json_number(row.get("judged")),
        evaluation=row.get("evaluation") or "",
        greedy=bool(row.get("greedy")),
    )


def with_prefix(row: Mapping[str, Any], prefix: str, read: Any) -> dict[str, Any]:
    """The columns behind a prefix that have a value."""
    return {
        name.removeprefix(prefix): read(value)
        for name, value in row.items()
        if name.startswith(prefix) and value is not None
    }


def row_names(row: Mapping[str, Any]) -> tuple[str, str]:
    """The names of a row's group and of its rollout; together they are unique in a file."""
    evaluation = row.get("evaluation")
    group = f"{evaluation}-{row['draw']}" if evaluation else str(row["draw"])
    return group, f"greedy-{row['sample']}" if row.get("greedy") else str(row["sample"])


def filter_choices(files: StepFiles, opened: Mapping[int, StepFile], faults: list[str]) -> tuple[list[str], list[str]]:
    """Outcomes and terms of the last file, as choices for filters."""
    if not opened:
        return [], []
    step, file = list(opened.items())[-1]
    told = [name for name in file.columns if name.startswith("outcome/")]
    outcomes: list[str] = []
    with noting(faults):
        table = files.kept(step, told)
        outcomes = [
            f"{name.removeprefix('outcome/')}:{each}"
            for name in told
            for each in sorted(filter(None, table[name].unique().to_pylist()))
        ]
    terms = ["reward", *(["advantage"] if "advantage" in file.columns else [])]
    terms += ["judged"] if "judged" in file.columns else []
    return outcomes, terms + [name.removeprefix("score/") for name in file.columns if name.startswith("score/")]


def require_step(files: StepFiles, step: int) -> StepFile:
    """The file of a step.  Raises Unreadable if it does not exist."""
    if step not in files.steps():
        raise Unreadable(f"{files.folder.name}/step-{step:06d}.parquet", "does not exist")
    return files.file(step)
