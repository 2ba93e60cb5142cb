"""The steps of a run, a step group by group, and a group's rollouts side by side."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from posttrain.viewer.folder_files import json_number, noting
from posttrain.viewer.opened_run import OpenedRun
from posttrain.viewer.response_types import Number, Source
from posttrain.viewer.rollout_responses import (
    GroupPage,
    GroupRollout,
    GroupRow,
    Neighbours,
    Piece,
    StepList,
    StepPage,
    StepRow,
)
from posttrain.viewer.rollout_rows import (
    NAMES,
    PROMPT_CHARACTERS,
    filter_choices,
    require_step,
    row_names,
    whole_length,
    with_prefix,
)
from posttrain.viewer.step_files import StepFile

Row = Mapping[str, Any]
MOST_GROUP_TOKENS, MOST_CHARACTERS = 4_000, 40_000
"""Maximum tokens per completion in a group; a rollout's own page has more."""
SHORT = ("draw", "sample", "prompt_id", "prompt", "reward", "advantage", "evaluation", "greedy", "judged", "finish")
OF_STEP = (
    *("num_groups", "frac_uninformative_groups", "num_replaced_groups"),
    *("reward", "completions/mean_length", "eval/accuracy_sampled"),
)
"""Metrics in the list of steps."""


def step_list(run: OpenedRun, source: Source) -> StepList:
    """All steps with a file, with numbers from metrics.jsonl."""
    faults: list[str] = []
    files, metrics = run.files(source), run.metrics.whole()
    groups, uninformative, replaced, reward, length, accuracy = (metrics.by_step(name) for name in OF_STEP)
    steps = []
    for step in files.steps():
        rows: int | None = None
        with noting(faults):
            rows = files.file(step).num_rows
        steps.append(
            StepRow(
                step=step,
                rows=rows,
                groups=groups.get(step),
                uninformative=uninformative.get(step),
                replaced=replaced.get(step),
                reward=reward.get(step),
                mean_length=length.get(step),
                accuracy=accuracy.get(step),
            )
        )
    return StepList(source=source, steps=steps, faults=faults)


def step_page(run: OpenedRun, source: Source, step: int) -> StepPage:
    """The groups of a step.  Raises Unreadable if its file is missing or damaged."""
    files, faults = run.files(source), list[str]()
    file = require_step(files, step)
    names = [name for name in file.columns if name in SHORT or name.startswith(("score/", "outcome/"))]
    rows = short_rows(file, names)
    steps = files.steps()
    outcomes, terms = filter_choices(files, {step: file}, faults)
    return StepPage(
        source=source,
        step=step,
        previous=max((each for each in steps if each < step), default=None),
        next=min((each for each in steps if each > step), default=None),
        metrics={name: value for line in run.metrics.whole().of_step(step) for name, value in line.items()},
        groups=[group_row(group, of_group) for group, of_group in rows_by_group(rows).items()],
        outcomes=outcomes,
        terms=terms,
        faults=faults,
    )


def short_rows(file: StepFile, names: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a file without their texts and tokens, with their lengths."""
    rows = file.read(names).to_pylist()
    return [{**row, "length": whole_length(length)} for row, length in zip(rows, file.lengths(), strict=True)]


def rows_by_group(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by the name of their group, in file order; greedy ones come last in a group."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row_names(row)[0], []).append(row)
    return groups


def group_row(group: str, rows: Sequence[Row]) -> GroupRow:
    """A group in the table of a step."""
    rewards = [scored(row) for row in rows]
    known = [reward for reward in rewards if reward is not None]
    lengths = [row["length"] for row in rows if row["length"] is not None]
    functions = {name.removeprefix("score/") for row in rows for name in row if name.startswith("score/")}
    trained = "advantage" in rows[0]
    return GroupRow(
        group=group,
        draw=rows[0]["draw"],
        prompt_id=rows[0]["prompt_id"] or "",
        prompt=(rows[0]["prompt"] or "")[-PROMPT_CHARACTERS:],
        rewards=rewards,
        rollouts=[row_names(row)[1] for row in rows],
        mean=fmean(known) if known else None,
        spread=pstdev(known) if known else None,
        uninformative=len(known) < 2 or len(set(known)) == 1,
        replaced=trained and bool(known) and all(row["advantage"] is None for row in rows),
        outcomes=[outcome_of(row) for row in rows],
        scores={name: [json_number(row[f"score/{name}"]) for row in rows] for name in sorted(functions)},
        mean_length=fmean(lengths) if lengths else None,
    )


def scored(row: Row) -> Number:
    """The reward of a row, or the judge's score of a held-out completion."""
    reward = json_number(row.get("reward"))
    return json_number(row.get("judged")) if reward is None else reward


def outcome_of(row: Row) -> str:
    """The first outcome that a reward function returned."""
    return next(iter(with_prefix(row, "outcome/", str).values()), "")


def group_page(run: OpenedRun, source: Source, step: int, group: str) -> GroupPage | None:
    """All rollouts of a group; None if the step does not have this group.  Raises Unreadable."""
    import pyarrow as pa

    file = require_step(run.files(source), step)
    order = run.files(source).kept(step, NAMES).to_pylist()
    groups = list(dict.fromkeys(row_names(row)[0] for row in order))
    if group not in groups:
        return None
    places = [place for place, row in enumerate(order) if row_names(row)[0] == group]
    table = file.read(file.columns, places[0], places[-1] + 1 - places[0])
    rows = table.take(pa.array([place - places[0] for place in places], "int64")).to_pylist()
    faults: list[str] = []
    at = groups.index(group)
    sequences = [row.get("tokens") or [] for row in rows]
    parts = partings(sequences)
    prompt: list[Piece] = []
    with noting(faults):
        prompt = run.pieces.given(rows[0].get("prompt_tokens") or [])
    return GroupPage(
        source=source,
        step=step,
        group=group,
        prompt_id=rows[0]["prompt_id"] or "",
        prompt=prompt,
        prompt_text=rows[0]["prompt"] or "",
        columns=rows[0].get("columns") or "",
        rollouts=[
            group_rollout(run, f"{source}/{step}/{group}", row, parting, faults)
            for row, parting in zip(rows, parts, strict=True)
        ],
        neighbours=Neighbours(
            previous=f"{source}/{step}/{groups[at - 1]}" if at else None,
            next=f"{source}/{step}/{groups[at + 1]}" if at + 1 < len(groups) else None,
        ),
        faults=faults,
    )


def group_rollout(run: OpenedRun, at: str, row: Row, parting: int, faults: list[str]) -> GroupRollout:
    """A rollout next to its siblings; it differs from them from the token `parting` on."""
    pieces: list[Piece] = []
    with noting(faults):
        pieces = run.pieces.pieces((row.get("tokens") or [])[:MOST_GROUP_TOKENS], row.get("sampled"))
    _, rollout = row_names(row)
    return GroupRollout(
        at=f"{at}/{rollout}",
        sample=row["sample"],
        rollout=rollout,
        reward=scored(row),
        advantage=json_number(row.get("advantage")),
        finish=row.get("finish") or "",
        outcome=outcome_of(row),
        scores=with_prefix(row, "score/", json_number),
        greedy=bool(row.get("greedy")),
        pieces=pieces,
        text=(row["completion"] or "")[:MOST_CHARACTERS],
        parts_at=parting,
    )


def partings(sequences: Sequence[Sequence[int]]) -> list[int]:
    """The token where each sequence first differs from the majority; its length if it never does.

    Only sequences that are identical so far vote on the next token; with a tie, the first sequence's token wins.
    """
    found = [len(sequence) for sequence in sequences]
    along = list(range(len(sequences)))
    for place in range(max(map(len, sequences), default=0)):
        along = [at for at in along if len(sequences[at]) > place]
        if len(along) < 2:
            break
        [(most, _)] = Counter(sequences[at][place] for at in along).most_common(1)
        for at in along:
            if sequences[at][place] != most:
                found[at] = place
        along = [at for at in along if sequences[at][place] == most]
    return found
