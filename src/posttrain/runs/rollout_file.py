"""Parquet files of a run: one row per completion of a step, of an evaluation, and of the updates of a step.

Null means: not scored (`reward`, `judged`, `score/<function>`), not part of the update (`advantage`, token columns),
sampled without a cut (`cut_logprobs`), not marked (`marks/<function>`).
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.errors import RunError, UserError
from posttrain.records import Finish, Grades, Group, Marks, Prompt, Rollout, TokenSequence
from posttrain.runs.reports import ScoredCompletions, UpdateTokens
from posttrain.turns import ToolCall, Turn

NO_COLUMNS: Mapping[str, Tensor] = MappingProxyType({})
NO_METADATA: Mapping[str, str] = MappingProxyType({})
NEEDED = (
    *("draw", "sample", "prompt_id", "prompt", "prompt_tokens", "tokens", "logprobs", "finish", "completion"),
    "reward",
)
"""Columns that `read_rollouts` requires."""
PROCESS, SAMPLED = "process_rewards", "sampled"
VERSION, SPANS = "weights_version", "weights_versions"
SUMS = "posttrain.rewards"
"""The metadata with the weights and bounds of the reward functions in that step, as JSON."""
TURNS = ("turn_ends", "turn_given", "turn_rewards", "turn_calls", "failure")
ROWS_IN_GROUP = 1024
"""Rows per row group: the minimum that a reader of a few rows must read."""
EXACT = 2**53
"""The largest integer below which a float64 represents all integers."""


def parquet_bytes(
    step: int,
    groups: Sequence[Group],
    grades: Grades,
    advantages: Float64[Tensor, "prompt group"],
    *,
    token_columns: Mapping[str, Float64[Tensor, " token"]] = NO_COLUMNS,
) -> bytes:
    """All rollouts of a step as a parquet file.

    `tokens` has all tokens of a completion; `sampled` says which of them the policy sampled.  `logprobs`,
    `cut_logprobs` and token columns, such as `token_advantages`, have a number for each sampled token.  Everything that
    a step is trained on is exact: `runs.recorded_step` reads it back.
    """
    assert grades.rewards.shape == advantages.shape == (len(groups), len(groups[0].rollouts))
    columns = {**rollout_columns(step, groups), **grade_columns(grades, advantages)}
    ends = list(accumulate(rollout.num_sampled for group in groups for rollout in group.rollouts))
    for name, column in token_columns.items():  # None for completions after its end
        values = column.tolist()
        columns[name] = [values[start:end] or None for start, end in pairwise([0, *ends])]
    weights = dict(zip(grades.names, grades.weights.tolist(), strict=True))
    sums = {"weights": weights, "clips": {name: [*map(str, bounds)] for name, bounds in grades.clips.items()}}
    types = {**TYPES, **dict.fromkeys(token_columns, "double list")}
    exact = np.array([each for group in groups for rollout in group.rollouts for each in rollout.logprobs])
    if (exact.astype(np.float32) != exact).any():  # of a model in float64, or an engine that has them so
        types["logprobs"] = "double list"
    return table_bytes(columns, types, {SUMS: json.dumps(sums)})


def evaluation_bytes(
    step: int, evaluation: str, completions: Sequence[ScoredCompletions], others: "Columns | None" = None
) -> bytes:
    """All completions of an evaluation as a parquet file, after the rows of other evaluations at the same step."""
    parts = [] if others is None else [others]
    for each in completions:
        rows = rollout_columns(step, each.groups)
        count = len(rows["step"])
        rows |= {"evaluation": [evaluation] * count, "greedy": [each.greedy] * count, "judged": nullable(each.judged)}
        parts.append({**rows, **grade_columns(each.grades)})
    return table_bytes(joined_tables(parts))


def without_evaluation(file: Path, evaluation: str) -> "Columns | None":
    """The rows of other evaluations in a file, or None.  Raises RunError for a damaged file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        columns: Columns = pq.read_table(file).to_pydict()
        kept = [row for row, each in enumerate(columns["evaluation"]) if each != evaluation]
    except (pa.ArrowException, KeyError) as error:
        says = str(error).splitlines()[0]
        raise RunError(f"{file}: damaged: not completions of an evaluation ({says}).  Delete it.") from error
    return {name: [column[row] for row in kept] for name, column in columns.items()} if kept else None


def token_column_bytes(step: int, updates: Sequence[UpdateTokens], updated: UpdateTokens | None = None) -> bytes:
    """What each update of a step computed, one row per completion that it trained on; see `UpdateTokens`.

    `updated` was computed after the last update: its rows have null as their `update`.
    """
    numbered: list[tuple[int | None, UpdateTokens]] = [*enumerate(updates, start=1)]
    numbered += [] if updated is None else [(None, updated)]
    parts: list[Columns] = []
    for number, update in numbered:
        draws, prompts, samples = zip(*update.rollouts, strict=True)
        names = {"draw": [*draws], "prompt_id": [*prompts], "sample": [*samples]}
        numbers: Columns = {"step": [step] * len(draws), "update": [number] * len(draws)}
        values = {
            name: [part.tolist() for part in column.split([*update.lengths])] for name, column in update.columns.items()
        }
        parts.append({**numbers, **names, **values})
    floats = {name for _, update in numbered for name, column in update.columns.items() if column.is_floating_point()}
    return table_bytes(joined_tables(parts), dict.fromkeys((name.partition("/")[0] for name in floats), "float list"))


Columns = dict[str, list[Any]]
"""Name -> values by row."""


def joined_tables(parts: Sequence[Columns]) -> Columns:
    """The rows of several tables in order; null where a table lacks a column."""
    names = dict.fromkeys(name for part in parts for name in part)
    counts = [len(next(iter(part.values()))) for part in parts]
    columns: Columns = {}
    for name in names:
        column = [value for part, count in zip(parts, counts, strict=True) for value in part.get(name, [None] * count)]
        columns[name] = of_one_type(column) if name.startswith("extra/") else column
    return columns


TYPES = {
    "tokens": "int32 list",
    "sampled": "bool list",
    "prompt_tokens": "int32 list",
    "logprobs": "float list",
    "cut_logprobs": "float list",
    "weights_versions": "int32 lists",
    "alternative_tokens": "int32 lists",
    "alternative_logprobs": "float lists",
    "turn_ends": "int32 list",
    "turn_given": "int32 list",
    "turn_rewards": "double list",
    "reward": "double",
    "advantage": "double",
    "judged": "double",
    "score": "double",
}
"""Column types by name or prefix before the slash; other columns have the type of their values."""


def table_bytes(
    columns: Mapping[str, Sequence[object]], types: Mapping[str, str] = TYPES, metadata: Mapping[str, str] = NO_METADATA
) -> bytes:
    """A table as a parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    plain = {"int32": pa.int32(), "bool": pa.bool_(), "float": pa.float32(), "double": pa.float64()}
    lists = {f"{name} list": pa.list_(each) for name, each in plain.items()}
    known = plain | lists | {f"{name}s": pa.list_(each) for name, each in lists.items()}
    arrays = {
        name: pa.array(column, type=known.get(types.get(name.partition("/")[0], "")))
        for name, column in columns.items()
    }
    sink = pa.BufferOutputStream()
    table = pa.table(arrays, metadata=dict(metadata) or None)
    pq.write_table(table, sink, compression="zstd", row_group_size=ROWS_IN_GROUP)
    return bytes(sink.getvalue())


def rollout_columns(step: int, groups: Sequence[Group]) -> dict[str, list[object]]:
    """The sampled completions, by prompt and sample."""
    rows: list[tuple[Group, Rollout]] = [(group, rollout) for group in groups for rollout in group.rollouts]
    columns_json = {group.draw: as_json(group.prompt.columns) for group in groups}
    kept = [rollout.alternatives for _, rollout in rows if rollout.alternatives is not None]
    alternatives: dict[str, list[object]] = {
        f"alternative_{name}": [[[each[place] for each in likeliest] for likeliest in tokens] for tokens in kept]
        for place, name in enumerate(("tokens", "logprobs") if len(kept) == len(rows) else ())
    }
    prefills: list[object] = [group.prompt.prefill for group, _ in rows]
    spans: list[object] = [[*map(list, rollout.sequence.versions)] for _, rollout in rows]
    return {
        "step": [step for _ in rows],
        "draw": [group.draw for group, _ in rows],
        "sample": [rollout.sample for _, rollout in rows],
        "prompt_id": [group.prompt.id for group, _ in rows],
        "prompt": [group.prompt.text for group, _ in rows],
        **({"prefill": prefills} if any(prefills) else {}),
        "completion": [rollout.text for _, rollout in rows],
        "prompt_tokens": [group.prompt.tokens for group, _ in rows],
        "tokens": [rollout.tokens for _, rollout in rows],
        "sampled": [rollout.sequence.sampled for _, rollout in rows],
        "logprobs": [rollout.logprobs for _, rollout in rows],
        "cut_logprobs": [rollout.cut_logprobs for _, rollout in rows],
        **alternatives,
        **turn_columns([rollout for _, rollout in rows]),
        "finish": [rollout.finish.value for _, rollout in rows],
        VERSION: [rollout.weights_version for _, rollout in rows],
        **({SPANS: spans} if any(len(rollout.sequence.versions) > 1 for _, rollout in rows) else {}),
        "columns": [columns_json[group.draw] for group, _ in rows],
    }


def turn_columns(rollouts: Sequence[Rollout]) -> dict[str, list[object]]:
    """The turns of completions with an environment, in lists by turn, and the traceback of one that failed.

    Without seconds: a resumed run writes the same file.
    """
    if not any(rollout.has_environment for rollout in rollouts):
        return {}
    turns = [rollout.turns for rollout in rollouts]
    calls = [[[dataclasses.asdict(call) for call in turn.calls] for turn in each] for each in turns]
    return {
        "turn_ends": [[turn.end for turn in each] for each in turns],
        "turn_given": [[turn.num_given for turn in each] for each in turns],
        "turn_rewards": [[turn.reward for turn in each] for each in turns],
        "turn_calls": [json.dumps(each) for each in calls],
        "failure": [rollout.failure for rollout in rollouts],
    }


def turns_of(row: Mapping[str, Any]) -> tuple[Turn, ...]:
    """The turns in a row of `turn_columns`; none in a file without them."""
    if row.get("turn_ends") is None:
        return ()
    listed = (row[name] for name in ("turn_ends", "turn_given", "turn_rewards"))
    return tuple(
        Turn(end=end, num_given=given, reward=reward, calls=tuple(ToolCall(**call) for call in calls))
        for end, given, reward, calls in zip(*listed, json.loads(row["turn_calls"]), strict=True)
    )


def grade_columns(grades: Grades, advantages: Float64[Tensor, "prompt group"] | None = None) -> dict[str, list[object]]:
    """Rewards, advantages, and what each function returned."""
    columns = {"reward": nullable(grades.rewards)}
    columns |= {} if advantages is None else {"advantage": nullable(advantages)}
    columns |= {f"score/{name}": nullable(scores) for name, scores in zip(grades.names, grades.scores, strict=True)}
    for name, outcomes in grades.outcomes.items():
        columns[f"outcome/{name}"] = [outcome for group in outcomes for outcome in group]
    for name, extras in grades.extras.items():
        rows = [extra or {} for group in extras for extra in group]
        for column in sorted({column for row in rows for column in row}):
            columns[f"extra/{name}/{column}"] = of_one_type([row.get(column) for row in rows])
    for name, marks in plain_marks(grades).items():
        columns[f"marks/{name}"] = [None if each is None else json.dumps(each) for group in marks for each in group]
    return columns


def plain_marks(grades: Grades) -> dict[str, tuple[tuple[dict[str, object] | None, ...], ...]]:
    return {
        name: tuple(
            tuple(None if marks is None else {"tokens": marks.tokens, "spans": marks.spans} for marks in group)
            for group in by_group
        )
        for name, by_group in grades.marks.items()
    }


def of_one_type(values: Sequence[object]) -> list[object]:
    """The values, if all of them are booleans, texts, numbers or None; else each as JSON text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {bool}:
        return list(values)
    if kinds == {str}:  # without halves of characters, which no file can hold
        return [value.encode("utf-8", "replace").decode() if isinstance(value, str) else None for value in values]
    if kinds <= {int, float}:
        numbers = [value for value in values if isinstance(value, int | float)]
        if all(abs(number) <= EXACT for number in numbers if isinstance(number, int)):
            as_float = float in kinds
            return [float(value) if as_float and isinstance(value, int) else value for value in values]
    return [None if value is None else json.dumps(value) for value in values]


def nullable(values: Float64[Tensor, "prompt group"]) -> list[object]:
    return [None if math.isnan(value) else value for value in values.flatten().tolist()]


def as_json(columns: Mapping[str, object]) -> str:
    """A problem's columns as JSON: records become objects, and values that JSON cannot hold become Python text."""

    def plain(item: object) -> object:
        return dataclasses.asdict(item) if dataclasses.is_dataclass(item) and not isinstance(item, type) else str(item)

    return json.dumps(dict(columns), default=plain)


def stored_steps(folder: str, option: str) -> list[Path]:
    files = sorted(Path(folder).glob("step-*.parquet"))
    if not files:
        raise UserError(
            f"{option} = {folder}: does not contain step-N.parquet files.  Give the folder `rollouts` of a run."
        )
    return files


def read_rollouts(file: Path) -> tuple[list[Group], Grades]:
    """The groups of a step, and their rewards and process rewards (as marks) under the name `stored`.

    Includes groups that dynamic sampling set aside, unless there are process rewards, which those groups do not have.
    Prompts do not have columns.  Raises UserError for another kind of file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file}: cannot be read as Parquet ({str(error).splitlines()[0]}).") from error
    lacking = [name for name in NEEDED if name not in table.column_names]
    if lacking:
        raise UserError(f"{file}: the column `{lacking[0]}` is missing.  Give a file of a run's folder `rollouts`.")
    marked = PROCESS in table.column_names
    if not marked and any(name.startswith("marks/") for name in table.column_names):
        raise UserError(
            f"{file}: has marks but no column `{PROCESS}`: an earlier version wrote it.  Give rollouts of this version."
        )
    by_draw: dict[int, list[dict[str, Any]]] = {}
    read = [*NEEDED, *(name for name in (PROCESS, SAMPLED, *TURNS) if name in table.column_names)]
    for row in table.select(read).to_pylist():
        row.setdefault(SAMPLED, [True] * len(row["tokens"]))  # all, in files without that column
        if not marked or row[PROCESS] is not None:
            by_draw.setdefault(row["draw"], []).append(row)
    groups = [group_of(draw, of_draw) for draw, of_draw in by_draw.items()]
    values = [[math.nan if row["reward"] is None else row["reward"] for row in rows] for rows in by_draw.values()]
    rewards = torch.tensor(values, dtype=torch.float64)
    ones = torch.ones(1, dtype=torch.float64)
    marks = {"stored": tuple(tuple(map(marks_of, rows)) for rows in by_draw.values())} if marked else {}
    return groups, Grades(names=("stored",), scores=rewards[None], weights=ones, rewards=rewards, marks=marks)


def marks_of(row: Mapping[str, Any]) -> Marks:
    """The process rewards of a completion's tokens, weighted."""
    earned = iter(row[PROCESS])
    values = [next(earned) if sampled else math.nan for sampled in row[SAMPLED]]
    return Marks(tokens=tuple(None if math.isnan(value) else value for value in values))


def group_of(draw: int, rows: Sequence[dict[str, Any]]) -> Group:
    """The group of the rows of one draw."""
    first = rows[0]
    prompt = Prompt(id=first["prompt_id"], text=first["prompt"], tokens=tuple(first["prompt_tokens"]))
    rollouts = tuple(
        Rollout(
            sample=row["sample"],
            sequence=TokenSequence(
                tokens=tuple(row["tokens"]),
                sampled=tuple(row[SAMPLED]),
                logprobs=tuple(row["logprobs"]),
                versions=tuple((first, version) for first, version in row.get(SPANS) or [(0, row.get(VERSION, 0))]),
                finish=Finish(row["finish"]),
            ),
            text=row["completion"],
            turns=turns_of(row),
            failure=row.get("failure") or "",
            in_conversation=row.get("turn_ends") is not None,
        )
        for row in rows
    )
    return Group(prompt=prompt, draw=draw, rollouts=rollouts)
