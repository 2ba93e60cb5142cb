"""Sequences with other parts than they were sampled with, and columns that a test knows of them."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from posttrain.records import Rollout


def resampled(rollout: Rollout, **changes: Any) -> Rollout:
    """The rollout with these parts of its sequence changed; new `tokens` are all sampled by default."""
    if "tokens" in changes:
        changes.setdefault("sampled", (True,) * len(changes["tokens"]))
    return replace(rollout, sequence=replace(rollout.sequence, **changes))


def known(**columns: Tensor | None) -> dict[str, Tensor]:
    """The columns that are there, by name."""
    return {name: column for name, column in columns.items() if column is not None}
