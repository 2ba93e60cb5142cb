"""scores.jsonl: finds the line of one group without loading the file, which can be larger than all rollouts."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from posttrain.viewer.folder_files import Unreadable, mapping, open_file
from posttrain.viewer.line_files import LineFile

LINE = re.compile(rb'\{"step": (\d{1,12}), "draw": (\d{1,12}),')
MOST_BYTES = 8 << 20
"""Of a line."""


class ScoreLines(LineFile):
    """Where the line of each group is."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.forget()

    def forget(self) -> None:
        self._places: dict[tuple[int, int], int] = {}

    def take(self, line: bytes, start: int) -> None:
        if found := LINE.match(line):
            self._places[int(found[1]), int(found[2])] = start

    def take_long(self, beginning: bytes, start: int) -> None:
        self.take(beginning, start)

    def of_group(self, step: int, draw: int) -> Mapping[str, object]:
        """The record of a group, empty where there is none.  Raises Unreadable for a damaged line."""
        self.read_on()
        if self.faults:
            raise Unreadable(self.path.name, self.faults[0].partition(": ")[2])
        if (step, draw) not in self._places:
            return {}
        try:
            with open_file(self.path) as file:
                file.seek(self._places[step, draw])
                line = file.readline(MOST_BYTES)
                if len(line) == MOST_BYTES:
                    raise ValueError(f"longer than {MOST_BYTES:,} bytes")
                return mapping(json.loads(line))
        except (OSError, ValueError, RecursionError) as error:
            raise Unreadable(self.path.name, f"cannot be read at step {step}, prompt {draw} ({error})") from error
