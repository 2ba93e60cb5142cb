"""metrics.jsonl as columns of numbers, which take a tenth of the memory of its lines and grow with the file."""

from array import array
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrain.viewer.folder_files import json_number, stamp
from posttrain.viewer.line_files import LineFile, step_record
from posttrain.viewer.response_types import Number

Values = NDArray[Any]
TAIL_BYTES = 64 << 10
"""At the end of the file: enough for a list of many runs."""
MOST_NUMBERS = 6_000_000
"""That are kept, 12 bytes each."""
MOST_NAMES = 2000


@dataclass(frozen=True, slots=True)
class Series:
    """A metric by step; NaN for a value that is not a number."""

    steps: Values
    values: Values


class MetricLines(LineFile):
    """The numbers of each metric and the lines that have them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.forget()

    def forget(self) -> None:
        self.steps = array("q")
        """Of each line."""
        self._lines_of: dict[str, array[int]] = {}
        self._values_of: dict[str, array[float]] = {}
        self._count = 0

    def whole(self) -> "MetricLines":
        """All lines so far."""
        self.read_on()
        return self

    def tail(self) -> "MetricLines":
        """The last lines, without reading and keeping the others; all of them if they were read."""
        now = stamp(self.path)
        if now is None or now == self.stamp:
            return self
        last = MetricLines(self.path)
        last.start = last.end = max(0, now[0] - TAIL_BYTES)
        last.read_on()
        if last.faults and last.start:  # of the line that it began in
            del last.faults[0]
        self.faults = self.faults or last.faults
        return last

    def take(self, line: bytes, start: int) -> None:
        record = step_record(line)
        if self._count + len(record) > MOST_NUMBERS:
            self.note(f"more than {MOST_NUMBERS:,} numbers; the later lines are left out")
            return
        place = len(self.steps)
        self.steps.append(int(str(record.pop("step"))))
        for name, value in record.items():
            if name not in self._lines_of:
                if len(self._lines_of) >= MOST_NAMES:
                    self.note(f"more than {MOST_NAMES:,} metrics; the others are left out")
                    continue
                self._lines_of[name], self._values_of[name] = array("I"), array("d")
            self._lines_of[name].append(place)
            known = json_number(value)
            self._values_of[name].append(float("nan") if known is None else known)
            self._count += 1

    @property
    def names(self) -> list[str]:
        return [*self._lines_of]

    @property
    def last_step(self) -> int:
        return max(self.steps, default=0)

    def lines_with(self, name: str) -> tuple[Values, Values]:
        """The lines that have a metric, and its values."""
        if name not in self._lines_of:
            return np.zeros(0, dtype=int), np.zeros(0)
        return np.array(self._lines_of[name], dtype=int), np.array(self._values_of[name])

    def series(self, name: str) -> Series:
        """A metric by step; a later line of a step replaces an earlier one."""
        lines, values = self.lines_with(name)
        steps = np.array(self.steps)[lines]
        if len(steps) > 1 and not (np.diff(steps) > 0).all():
            steps, last = np.unique(steps[::-1], return_index=True)
            values = values[::-1][last]
        return Series(steps, values)

    def by_step(self, name: str) -> dict[int, Number]:
        found = self.series(name)
        return dict(zip(found.steps.tolist(), plain_values(found.values), strict=True))

    def last(self, name: str) -> Number:
        """A metric at the last step that has it."""
        values = plain_values(self.series(name).values[-1:])
        return values[0] if values else None

    def of_step(self, step: int) -> list[dict[str, Number]]:
        """The lines of a step."""
        return [self._line(int(place)) for place in np.flatnonzero(np.array(self.steps) == step)]

    def _line(self, place: int) -> dict[str, Number]:
        found: dict[str, Number] = {"step": self.steps[place]}
        for name, lines in self._lines_of.items():
            at = bisect_left(lines, place)
            if at < len(lines) and lines[at] == place:
                found[name] = json_number(self._values_of[name][at])
        return found


def plain_values(values: Values) -> list[Number]:
    """Numbers as JSON has them: null for NaN."""
    return [None if value != value else value for value in values.tolist()]
