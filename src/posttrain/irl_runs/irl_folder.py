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
from typing import Any

import numpy as np
from numpy import ndarray

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
"""What overwriting removes; anything else in the folder stays."""


class IrlFolder(Folder):
    """The folder of a run of inverse RL."""

    contents = CONTENTS
    journals = ()
    folders = ()
    content_files = ("metrics.jsonl",)
    foreign = ("checkpoints", "scores.jsonl")
    resumed_by = ""

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
