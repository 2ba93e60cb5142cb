"""The folder of a run of inverse RL; reading it does not need posttrain.

config.yaml         the resolved configuration; running it again gives the same run
metrics.jsonl       one line per iteration of the fit
summary.json        the results
reward.npz          weights, the learned reward, the policy and its visits, with the number of each state
demonstrations.npz  the episodes, as `Demonstrations.save` writes them
plots/              rewards.png, policy.png, visits.png, convergence.png
"""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from posttrain.errors import UserError
from posttrain.runs.files import LineJournal
from posttrain.runs.folder import Folder

CONTENTS = (
    "summary.json",
    "metrics.jsonl",
    "reward.npz",
    "demonstrations.npz",
    "plots",
    "config.yaml",  # last: a half cleared folder is still recognised as a run's
)
"""Removed by overwriting; anything else in the folder stays."""
TRAINING_CONTENTS = ("checkpoints", "scores.jsonl")
"""Marks of a folder of a run that trained a model."""


class IrlFolder(Folder):
    """The folder of a run of inverse RL."""

    contents = CONTENTS
    journals = ()
    folders = ()

    @classmethod
    def refuse_other_runs(cls, path: Path, *, overwrite: bool) -> None:
        """A run that got somewhere is replaced only with `overwrite`; one of another command never."""
        if any((path / name).exists() for name in TRAINING_CONTENTS):
            raise UserError(f"{path}: holds a run that trained a model.  Choose another run.folder (--run.folder).")
        if (path / "metrics.jsonl").exists() and not overwrite:
            raise UserError(
                f"{path}: already holds a run.  Replace it by run.overwrite = true (--run.overwrite), or choose another"
                " run.folder (--run.folder)."
            )

    def write_curve(self, curve: Sequence[Mapping[str, float]]) -> None:
        """Write metrics.jsonl: the numbers of each iteration, counted from 0, before the first step."""
        lines = [{"iteration": index, **without_infinities(numbers)} for index, numbers in enumerate(curve)]
        LineJournal(self.path / "metrics.jsonl").append(lines)

    def write_summary(self, summary: Mapping[str, object]) -> None:
        super().write_summary(without_infinities(summary))

    def write_arrays(self, name: str, arrays: Mapping[str, ndarray]) -> None:
        content = io.BytesIO()
        named: dict[str, Any] = dict(arrays)
        np.savez_compressed(content, **named)
        self.write(name, content.getvalue())


def without_infinities(numbers: Mapping[str, object]) -> dict[str, object]:
    """The same with null where a number is none: JSON has no NaN or infinity."""
    return {name: _without_infinities(value) for name, value in numbers.items()}


def _without_infinities(value: object) -> object:
    if isinstance(value, Mapping):
        return without_infinities(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
