"""The rollouts of a step, read back from the file that a run has kept: `rollout_file` writes it."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from posttrain.errors import UserError
from posttrain.records import Finish, Grades, Group, Marks, Prompt, Rollout, TokenSequence

NEEDED = (
    "draw",
    "sample",
    "prompt_id",
    "prompt",
    "prompt_tokens",
    "tokens",
    "logprobs",
    "finish",
    "completion",
    "reward",
)
PROCESS, SAMPLED = "process_rewards", "sampled"


def stored_steps(folder: str, option: str) -> list[Path]:
    """The files of a folder of rollouts, step by step; `option` is what named it.  Raises UserError where none is."""
    files = sorted(Path(folder).glob("step-*.parquet"))
    if not files:
        raise UserError(f"{option} = {folder}: holds no step-N.parquet.  Give the folder `rollouts` of a run.")
    return files


def read_rollouts(file: Path) -> tuple[list[Group], Grades]:
    """The groups of a step and what they earned, under the name `stored`: rewards, and process rewards as marks.

    Groups that dynamic sampling set aside are among them, unless there are process rewards, which they lack.  Prompts
    come back without their columns.  Raises UserError where the file is no such file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file}: cannot be read as Parquet ({str(error).splitlines()[0]}).") from error
    lacking = [name for name in NEEDED if name not in table.column_names]
    if lacking:
        raise UserError(f"{file}: has no column `{lacking[0]}`, so it is not the rollouts of a step of a run.")
    marked = require_told_marks(file, table.column_names)
    by_draw: dict[int, list[dict[str, Any]]] = {}
    read = [*NEEDED, *([PROCESS] if marked else []), *([SAMPLED] if SAMPLED in table.column_names else [])]
    for row in table.select(read).to_pylist():
        if not marked or row[PROCESS] is not None:
            by_draw.setdefault(row["draw"], []).append(row)
    groups = [group_of(draw, of_draw) for draw, of_draw in by_draw.items()]
    nan = float("nan")
    rewards = torch.tensor(
        [[nan if row["reward"] is None else row["reward"] for row in of_draw] for of_draw in by_draw.values()],
        dtype=torch.float64,
    )
    ones = torch.ones(1, dtype=torch.float64)
    marks = {"stored": tuple(tuple(map(marks_of, rows)) for rows in by_draw.values())} if marked else {}
    return groups, Grades(names=("stored",), scores=rewards[None], weights=ones, rewards=rewards, marks=marks)


def require_told_marks(file: Path, columns: Sequence[str]) -> bool:
    """Whether tokens earned something by themselves.  Raises UserError where that is known, and not what."""
    told = PROCESS in columns
    if not told and any(name.startswith("marks/") for name in columns):
        raise UserError(
            f"{file}: its rewards marked tokens, and it has no column `{PROCESS}` with what they earned: an earlier"
            " version wrote it.  Give rollouts of this version."
        )
    return told


def marks_of(row: Mapping[str, Any]) -> Marks:
    """What the tokens of a completion earned, each with the weight of its function; a given token earned nothing."""
    earned = iter(row[PROCESS])
    values = [next(earned) if sampled else math.nan for sampled in sampled_of(row)]
    return Marks(tokens=tuple(None if math.isnan(value) else value for value in values))


def sampled_of(row: Mapping[str, Any]) -> tuple[bool, ...]:
    """Which tokens of a completion were sampled: all of them in files of versions before the column."""
    return tuple(row[SAMPLED]) if SAMPLED in row else (True,) * len(row["tokens"])


def group_of(draw: int, rows: Sequence[dict[str, Any]]) -> Group:
    """The group that some rows are of."""
    first = rows[0]
    prompt = Prompt(id=first["prompt_id"], text=first["prompt"], tokens=tuple(first["prompt_tokens"]))
    rollouts = tuple(
        Rollout(
            sample=row["sample"],
            sequence=TokenSequence(
                tokens=tuple(row["tokens"]),
                sampled=sampled_of(row),
                logprobs=tuple(row["logprobs"]),
                finish=Finish(row["finish"]),
            ),
            text=row["completion"],
        )
        for row in rows
    )
    return Group(prompt=prompt, draw=draw, rollouts=rollouts)
