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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy import ndarray

from posttrain.config import IrlConfig, as_recipe
from posttrain.errors import UserError
from posttrain.runs.files import append_lines, write_atomically, writing
from posttrain.runs.lock import lock_folder, refuse_foreign_folder

CONTENTS = (
    "summary.json",
    "metrics.jsonl",
    "reward.npz",
    "demonstrations.npz",
    "plots",
    "config.yaml",  # last: a folder that is half cleared can still be told from someone else's
)
"""What overwriting removes; anything else in the folder stays."""
TRAINING_CONTENTS = ("checkpoints", "scores.jsonl")
"""What tells a folder of a run that trained a model."""


class IrlFolder:
    """The one writer of a run folder of inverse RL; a context manager, whose exit lets the next writer in."""

    def __init__(self, path: Path, lock: int) -> None:
        """Use `claim`."""
        self.path = path
        self._lock = lock

    @classmethod
    def claim(cls, path: str | Path, *, overwrite: bool = False) -> "IrlFolder":
        """Become the writer of a folder before anything is spent; what it holds is still there, until `begin`.

        Raises UserError where the folder is not for a run, has another writer, or holds a run that `overwrite` does
        not give up, or one that trained a model, which it never gives up.
        """
        path = Path(path)
        refuse_foreign_folder(path)
        with writing(path, path):
            path.mkdir(parents=True, exist_ok=True)
        folder = cls(path, lock_folder(path))
        try:
            refuse_other_runs(path, overwrite=overwrite)
        except BaseException:
            folder.close()
            raise
        return folder

    def close(self) -> None:
        """Let another writer in.  Closing twice does nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> "IrlFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin(self, config_yaml: str) -> None:
        """Clear what an earlier run left and save the recipe of this one: once it has something to show, not before."""
        with writing(self.path, self.path):
            for name in CONTENTS:
                if (self.path / name).is_dir():
                    shutil.rmtree(self.path / name)
                else:
                    (self.path / name).unlink(missing_ok=True)
            write_atomically(self.path / "config.yaml", config_yaml.encode())

    def write_curve(self, curve: Sequence[Mapping[str, float]]) -> None:
        """Write metrics.jsonl: the numbers of each iteration, counted from 0, before the first step."""
        lines = [
            json.dumps({"iteration": index, **without_infinities(numbers)}, allow_nan=False)
            for index, numbers in enumerate(curve)
        ]
        with writing(self.path / "metrics.jsonl", self.path):
            append_lines(self.path / "metrics.jsonl", lines)

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Replace summary.json."""
        content = json.dumps(without_infinities(summary), indent=2, allow_nan=False) + "\n"
        with writing(self.path / "summary.json", self.path):
            write_atomically(self.path / "summary.json", content.encode())

    def write_arrays(self, name: str, arrays: Mapping[str, ndarray]) -> None:
        """Write an .npz file, whole or not at all."""
        content = io.BytesIO()
        named: dict[str, Any] = dict(arrays)
        np.savez_compressed(content, **named)
        with writing(self.path / name, self.path):
            write_atomically(self.path / name, content.getvalue())


def claim_folder(config: IrlConfig) -> IrlFolder:
    """Claim the folder that a recipe names."""
    return IrlFolder.claim(config.run.folder, overwrite=config.run.overwrite)


def saved_recipe(config: IrlConfig) -> str:
    """The recipe as the run's folder keeps it: running that must not delete this run."""
    return as_recipe(replace(config, run=replace(config.run, overwrite=False)))


def refuse_other_runs(path: Path, *, overwrite: bool) -> None:
    """A run that got somewhere is replaced only with `overwrite`; one of another command never."""
    if any((path / name).exists() for name in TRAINING_CONTENTS):
        raise UserError(
            f"{path}: this folder holds a run that trained a model.  Choose another folder with --run.folder."
        )
    if (path / "metrics.jsonl").exists() and not overwrite:
        raise UserError(
            f"{path}: this folder already holds a run.  Replace it with --run.overwrite, or choose another folder with"
            " --run.folder."
        )


def without_infinities(numbers: Mapping[str, object]) -> dict[str, object]:
    """The same with null where a number is none: JSON has no NaN or infinity."""
    return {name: _without_infinities(value) for name, value in numbers.items()}


def _without_infinities(value: object) -> object:
    if isinstance(value, Mapping):
        return without_infinities(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
