"""How often completions show a behaviour, step by step, with examples; read file by file as the page asks."""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import monotonic
from typing import Any

import numpy as np

from posttrain.behaviours.behaviour_table import TABLE, Row, Signs
from posttrain.behaviours.sign_reader import PatternTimeout, SignReader
from posttrain.runs.intervals import share_interval
from posttrain.viewer.folder_files import noting
from posttrain.viewer.opened_run import OpenedRun
from posttrain.viewer.problem_responses import BehaviourEntry, BehaviourPage, BehaviourPoint
from posttrain.viewer.response_types import Link
from posttrain.viewer.step_files import StepFile

READ_SECONDS = 0.5
"""Seconds that a response reads files before it reports its progress."""
EXAMPLES = 3
COLUMNS = ("draw", "sample", "completion", "columns")


@dataclass(frozen=True, slots=True)
class ReadStep:
    """The content of a step's file, cached until the file changes."""

    file: StepFile
    points: Mapping[str, BehaviourPoint]


class BehaviourCurves:
    """Behaviours of one run.  The recipe's own patterns are not used: they may be someone else's, and slow."""

    def __init__(self, run: OpenedRun) -> None:
        self.run = run
        self._steps: dict[int, ReadStep] = {}

    @cached_property
    def reader(self) -> SignReader:
        return SignReader(TABLE)

    def page(self) -> BehaviourPage:
        """The curves for the files read so far; when all are read, behaviours that no completion shows are left out."""
        faults: list[str] = []
        end, read = monotonic() + READ_SECONDS, 0
        steps = self.run.rollouts.steps()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PatternTimeout)
            for step in steps:
                read += 1
                with noting(faults):
                    self._read(step)
                if monotonic() > end:
                    break
        points = {step: self._steps[step].points for step in steps[:read] if step in self._steps}
        return BehaviourPage(
            behaviours=[entry for name, row in TABLE.items() if (entry := behaviour_entry(name, row, points))],
            done=read == len(steps),
            read=read,
            of_files=len(steps),
            faults=faults,
        )

    def _read(self, step: int) -> None:
        file = self.run.rollouts.file(step)
        known = self._steps.get(step)
        if known is None or known.file is not file:
            self._steps[step] = ReadStep(file, step_points(self.reader, step, file.read(COLUMNS).to_pylist()))


def behaviour_entry(name: str, row: Row, points: Mapping[int, Mapping[str, BehaviourPoint]]) -> BehaviourEntry | None:
    """A behaviour's curve, or None if no completion shows it."""
    shown = [of_step[name] for of_step in points.values() if name in of_step]
    if not any(point["share"] for point in shown):
        return None
    return BehaviourEntry(name=name, says=row.says, kind=row.kind, points=shown)


def step_points(reader: SignReader, step: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, BehaviourPoint]:
    """A point for each behaviour that could be read; the interval is over prompts."""
    signs = [(row, reader.read(row["completion"] or "", columns_of(row))) for row in rows]
    names = dict.fromkeys(name for _, found in signs for name in found)
    return {name: point(step, [(row, found[name]) for row, found in signs if name in found]) for name in names}


def columns_of(row: Mapping[str, Any]) -> Mapping[str, object]:
    """The dataset's columns, without columns that are not a valid Countdown problem."""
    try:
        found = json.loads(row.get("columns") or "{}")
    except (ValueError, RecursionError):
        return {}
    numbers = found.get("numbers") if isinstance(found, dict) else None
    is_problem = isinstance(numbers, list) and all(isinstance(each, int) for each in numbers)
    return found if is_problem and isinstance(found.get("target"), int) else {}


def point(step: int, rows: Sequence[tuple[Mapping[str, Any], Signs]]) -> BehaviourPoint:
    """The share of a step's completions that show a behaviour, and some that do."""
    by_prompt: dict[int, list[bool]] = {}
    for row, signs in rows:
        by_prompt.setdefault(row["draw"], []).append(signs.shown)
    means = np.array([sum(shown) / len(shown) for shown in by_prompt.values()])
    low, high = share_interval(means)
    examples = sorted((each for each in rows if each[1].shown), key=lambda each: -each[1].count)[:EXAMPLES]
    return BehaviourPoint(
        step=step,
        share=float(means.mean()),
        low=low,
        high=high,
        examples=[
            Link(
                at=f"rollouts/{step}/{row['draw']}/{row['sample']}",
                label=f"prompt {row['draw']}, completion {row['sample']}: {signs.count}",
            )
            for row, signs in examples
        ],
    )
