"""Which folders below a folder are runs."""

import os
from collections.abc import Iterator
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
"""Folders of a run, which hold no runs."""
DEPTH = 4
MOST_RUNS = 1000


def run_folders(below: Path) -> list[Path]:
    """The runs in and below a folder, also those inside a comparison, newest first."""
    found = [folder for folder, _ in zip(walk(below, DEPTH), range(MOST_RUNS), strict=False)]
    return sorted(found, key=changed, reverse=True)


def walk(folder: Path, depth: int) -> Iterator[Path]:
    """Runs from a folder down; links are not followed."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    if is_run(folder):
        yield folder
    for entry in entries:
        hidden = entry.name.startswith(".") or entry.name in INSIDE
        if depth and not hidden and entry.is_dir(follow_symlinks=False):
            yield from walk(folder / entry.name, depth - 1)


def holds_runs(folder: Path) -> bool:
    """Whether it is a comparison or has phases: then the runs inside belong to its page."""
    return any((folder / name).is_file() for name in MARKS)


def is_run(folder: Path) -> bool:
    recipe = (folder / RUN_RECIPE).is_file() and any((folder / name).exists() for name in BESIDE_RUN_RECIPE)
    return recipe or any((folder / name).is_file() for name in MARKS)


def changed(folder: Path) -> float:
    files = (folder / "metrics.jsonl", folder / RUN_RECIPE, *(folder / name for name in MARKS))
    return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)
