"""Finds the runs below a folder."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from posttrain.config.recipes import BESIDE_RUN_RECIPE, RUN_RECIPE
from posttrain.viewer.opened_run import MARKS

INSIDE = (
    "rollouts",
    "evaluations",
    "token_columns",
    "demonstrations",
    "checkpoints",
    "model",
    "adapter",
    "critic",
    "tokenizer",
    "weights",
)
"""Folders inside a run, which do not contain runs."""
DEPTH = 4
MOST_RUNS = 1000


@dataclass(frozen=True, slots=True)
class FoundRuns:
    """The runs below a folder, and one line for what was not searched."""

    folders: list[Path]
    faults: list[str]


def run_folders(below: Path) -> list[Path]:
    """The runs in and below a folder, also those inside a comparison, newest first."""
    return runs_below(below).folders


def runs_below(below: Path) -> FoundRuns:
    """The runs, and whether there may be more."""
    too_deep: list[Path] = []
    found = list(islice(walk(below, DEPTH, too_deep), MOST_RUNS + 1))
    faults = []
    if len(found) > MOST_RUNS:
        faults.append(f"{below}: only the first {MOST_RUNS:,} runs are listed.  Name a folder with fewer runs.")
    if too_deep:
        what = f"folders more than {DEPTH} levels down are not searched, such as {too_deep[0]}"
        faults.append(f"{below}: {what}.  Name them to see their runs.")
    return FoundRuns(sorted(found[:MOST_RUNS], key=changed_at, reverse=True), faults)


def walk(folder: Path, depth: int, too_deep: list[Path]) -> Iterator[Path]:
    """Runs from a folder down; links are not followed.  Folders that are not searched are added to `too_deep`."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    if is_run(folder):
        yield folder
    for entry in entries:
        hidden = entry.name.startswith(".") or entry.name in INSIDE
        if hidden or not entry.is_dir(follow_symlinks=False):
            continue
        if depth:
            yield from walk(folder / entry.name, depth - 1, too_deep)
        else:
            too_deep.append(folder / entry.name)


def holds_runs(folder: Path) -> bool:
    """Whether it is a comparison or has phases, so that the runs inside belong to its page."""
    return any((folder / name).is_file() for name in MARKS)


def is_run(folder: Path) -> bool:
    recipe = (folder / RUN_RECIPE).is_file() and any((folder / name).exists() for name in BESIDE_RUN_RECIPE)
    return recipe or any((folder / name).is_file() for name in MARKS)


def changed_at(folder: Path) -> float:
    files = (folder / "metrics.jsonl", folder / RUN_RECIPE, *(folder / name for name in MARKS))
    return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)
