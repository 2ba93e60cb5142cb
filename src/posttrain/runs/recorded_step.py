"""A step read from its rollout file, exact enough that training on it again gives the same weights, bit for bit."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.errors import RunError, UserError
from posttrain.records import Grades, Group, Marks
from posttrain.runs.rollout_file import NEEDED, SAMPLED, SUMS, TURNS, VERSION, group_of
from posttrain.runs.run_folder import rollout_step

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroups:
    """Groups with their grades.  Prompts have tokens and text, but not their columns."""

    groups: Sequence[Group]
    grades: Grades


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """What a step was trained on, and what dynamic sampling set aside."""

    step: int
    trained: RecordedGroups
    replaced: RecordedGroups | None = None


def recorded_files(folder: Path) -> dict[int, Path]:
    """The rollout files of a run by step, in order."""
    found = {rollout_step(file): file for file in folder.glob("step-*.parquet")}
    return {step: found[step] for step in sorted(step for step in found if step is not None)}


def read_step(file: Path) -> RecordedStep:
    """Raises UserError for rollouts of another version, RunError for a damaged file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(file)
        rows = table.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise RunError(f"{file}: damaged: cannot be read as Parquet ({str(error).splitlines()[0]}).") from error
    said = (table.schema.metadata or {}).get(SUMS.encode())
    if said is None or SAMPLED not in table.column_names:
        raise UserError(f"{file}: does not contain the weights of rewards.  Replay a run of this version.")
    sums = json.loads(said)
    require_columns(file, table.column_names, sums)
    by_draw: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_draw.setdefault(row["draw"], []).append(row)
    taken = {draw: any(row["advantage"] is not None for row in of_draw) for draw, of_draw in by_draw.items()}
    parts = list[RecordedGroups | None]()
    for wanted in (True, False):
        of_draws = [of_draw for draw, of_draw in by_draw.items() if taken[draw] is wanted]
        groups = [group_of(each[0]["draw"], each) for each in of_draws]
        parts.append(RecordedGroups(groups=groups, grades=grades_of(of_draws, sums)) if groups else None)
    if parts[0] is None:
        raise RunError(f"{file}: damaged: none of its completions was trained on.  Restore the file.")
    return RecordedStep(step=rows[0]["step"], trained=parts[0], replaced=parts[1])


def require_columns(file: Path, columns: Collection[str], sums: Mapping[str, Any]) -> None:
    """Raises RunError if a column that every step of its kind has is missing."""
    needed = ["step", *NEEDED, SAMPLED, VERSION, "advantage", *(f"score/{name}" for name in sums["weights"])]
    needed += TURNS if any(name in columns for name in TURNS) else ()
    if missing := next((name for name in needed if name not in columns), None):
        raise RunError(f"{file}: damaged: the column `{missing}` is missing.  Restore the file.")


def grades_of(of_draws: Sequence[Rows], sums: Mapping[str, Any]) -> Grades:
    """The grades of some groups, completed with what no column stores."""
    names = tuple(sums["weights"])
    marked = [name for name in names if f"marks/{name}" in of_draws[0][0]]
    return Grades(
        names=names,
        scores=torch.stack([numbers(of_draws, f"score/{name}") for name in names]),
        weights=torch.tensor(list(sums["weights"].values()), dtype=torch.float64),
        rewards=numbers(of_draws, "reward"),
        clips={name: (float(low), float(high)) for name, (low, high) in sums["clips"].items()},
        marks={
            name: tuple(tuple(marks_from(row[f"marks/{name}"]) for row in rows) for rows in of_draws) for name in marked
        },
    )


def numbers(of_draws: Sequence[Rows], name: str) -> Float64[Tensor, "prompt group"]:
    """A column by group; null is NaN."""
    found = [[math.nan if row[name] is None else row[name] for row in rows] for rows in of_draws]
    return torch.tensor(found, dtype=torch.float64)


def marks_from(text: str | None) -> Marks | None:
    """Marks from their JSON."""
    if text is None:
        return None
    said = json.loads(text)
    spans = tuple((start, end, value) for start, end, value in said["spans"])
    return Marks(tokens=tuple(said["tokens"]), spans=spans)
