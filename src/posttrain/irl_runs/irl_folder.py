"""The folder that a run of inverse RL leaves behind; nothing in it needs posttrain to be read.

config.yaml         the resolved configuration; running it again gives the same run
metrics.jsonl       one line per iteration of the fit
summary.json        what came out
reward.npz          weights, the learned reward, the policy and its visits, with the number of each state
demonstrations.npz  the episodes, as `Demonstrations.save` writes them
plots/              rewards.png, policy.png, visits.png, convergence.png
"""

import io
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from posttrain.config import IrlConfig, as_recipe
from posttrain.errors import UserError
from posttrain.runs.files import append_lines, write_atomically, writing
from posttrain.runs.lock import lock_folder, refuse_foreign_folder

CONTENTS = ("summary.json", "metrics.jsonl", "reward.npz", "demonstrations.npz", "plots", "config.yaml")
"""What overwriting removes; anything else in the folder stays."""


@contextmanager
def claimed(config: IrlConfig) -> Iterator[Path]:
    """The folder of a run, for one writer; what it holds is still there."""
    path = Path(config.run.folder)
    refuse_foreign_folder(path)
    with writing(path, path):
        path.mkdir(parents=True, exist_ok=True)
    lock = lock_folder(path)
    try:
        refuse_other_runs(path, overwrite=config.run.overwrite)
        yield path
    finally:
        os.close(lock)


def refuse_other_runs(path: Path, *, overwrite: bool) -> None:
    """A run that got somewhere is replaced only when told; one of another command never."""
    if any((path / name).exists() for name in ("checkpoints", "scores.jsonl")):
        raise UserError(
            f"{path}: this folder holds a run that trained a model.  Choose another folder with --run.folder."
        )
    if (path / "metrics.jsonl").exists() and not overwrite:
        raise UserError(
            f"{path}: this folder already holds a run.  Replace it with --run.overwrite, or choose another folder with"
            " --run.folder."
        )


def begin(path: Path, config: IrlConfig) -> None:
    """Remove what an earlier run left, and write the recipe of this one."""
    saved = replace(config, run=replace(config.run, overwrite=False))  # running it must not delete this run
    with writing(path, path):
        for name in CONTENTS:
            if (path / name).is_dir():
                shutil.rmtree(path / name)
            else:
                (path / name).unlink(missing_ok=True)
        write_atomically(path / "config.yaml", as_recipe(saved).encode())


def write_curve(path: Path, curve: Sequence[Mapping[str, float]]) -> None:
    """metrics.jsonl: the numbers of each iteration, counted from 0, before the first step."""
    lines = [json.dumps({"iteration": index, **finite(numbers)}) for index, numbers in enumerate(curve)]
    with writing(path / "metrics.jsonl", path):
        append_lines(path / "metrics.jsonl", lines)


def write_summary(path: Path, summary: Mapping[str, object]) -> None:
    """summary.json."""
    with writing(path / "summary.json", path):
        write_atomically(path / "summary.json", (json.dumps(finite(summary), indent=2) + "\n").encode())


def write_arrays(path: Path, name: str, arrays: Mapping[str, ndarray]) -> None:
    """An .npz file, whole or not at all."""
    content = io.BytesIO()
    named: dict[str, Any] = dict(arrays)
    np.savez_compressed(content, **named)
    with writing(path / name, path):
        write_atomically(path / name, content.getvalue())


def finite(numbers: Mapping[str, object]) -> dict[str, object]:
    """The same with null where a number is none: JSON has no NaN or infinity."""
    return {name: finite_value(value) for name, value in numbers.items()}


def finite_value(value: object) -> object:
    """A value as JSON can say it."""
    if isinstance(value, Mapping):
        return finite(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
