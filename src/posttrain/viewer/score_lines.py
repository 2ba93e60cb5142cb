"""scores.jsonl: the line of one group, found without holding the file, which can be larger than all rollouts."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from posttrain.viewer.folder_files import Stamp, Unreadable, mapping, stamp

LINE = re.compile(rb'\{"step": (\d{1,12}), "draw": (\d{1,12}),')
MOST_BYTES = 64 << 20
"""Of a line."""


class ScoreLines:
    """Where the line of each group is; only new lines are read when the file grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: Stamp | None = None
        self._end = 0
        self._places: dict[tuple[int, int], int] = {}

    def of_group(self, step: int, draw: int) -> Mapping[str, object]:
        """The record of a group, empty where there is none.  Raises Unreadable for a damaged line."""
        now = stamp(self.path)
        if now is None:
            return {}
        try:
            self._read_on(now)
            if (step, draw) not in self._places:
                return {}
            with self.path.open("rb") as file:
                file.seek(self._places[step, draw])
                return mapping(json.loads(file.readline(MOST_BYTES)))
        except (OSError, ValueError, RecursionError) as error:
            raise Unreadable(self.path.name, f"cannot be read at step {step}, prompt {draw} ({error})") from error

    def _read_on(self, now: Stamp) -> None:
        if self._stamp is not None and (now[2] != self._stamp[2] or now[0] < self._end):
            self._end, self._places = 0, {}
        if now == self._stamp:
            return
        with self.path.open("rb") as file:
            file.seek(self._end)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                if found := LINE.match(line):
                    self._places[int(found[1]), int(found[2])] = self._end
                self._end += len(line)
        self._stamp = now
