"""Files of JSON lines that grow: only new lines are read, and a line that is too long is skipped and never held."""

import json
from collections.abc import Mapping
from pathlib import Path

from posttrain.viewer.folder_files import Stamp, open_file, stamp

MOST_FAULTS = 20
"""Damaged lines that are named one by one."""
MOST_LINE = 1 << 20
"""Bytes of a line."""
MOST_RECORDS = 10_000
"""Lines that a journal keeps."""


class LineFile:
    """A file of lines; what `take` keeps of each line is all that is held."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.faults: list[str] = []
        self.unfinished = False
        """Whether bytes without an end of line follow the last line: it is being written, or was cut off."""
        self.start, self.end, self._lines = 0, 0, 0
        """Where reading began, and what was read."""
        self._in_long_line = False
        self.stamp: Stamp | None = None

    def take(self, line: bytes, start: int) -> None:
        """Keep what is needed of a line.  Raises ValueError for a damaged one."""
        raise NotImplementedError

    def take_long(self, beginning: bytes, start: int) -> None:
        """What becomes of a line of more than `MOST_LINE` bytes, which may still lack its end."""
        raise ValueError(f"longer than {MOST_LINE:,} bytes")

    def forget(self) -> None:
        """The file was replaced or cut."""
        raise NotImplementedError

    def read_on(self) -> None:
        """Read the lines that are new."""
        now = stamp(self.path)
        if now == self.stamp:
            return
        grew = now is not None and self.stamp is not None and now[2] == self.stamp[2] and now[0] >= self.end
        if self.stamp is not None and not grew:
            self.faults, self.unfinished, self._in_long_line = [], False, False
            self.end, self._lines = self.start, 0
            self.forget()
        self.stamp = now
        if now is None:
            return
        try:
            with open_file(self.path) as file:
                file.seek(self.end)
                self.unfinished = False
                while part := file.readline(MOST_LINE):
                    if len(part) < MOST_LINE and not part.endswith(b"\n") and not self._in_long_line:
                        self.unfinished = True
                        break
                    self._pass(part)
        except OSError as error:
            self.note(f"cannot be read ({error.strerror or error})")

    def _pass(self, part: bytes) -> None:
        """A line, or a part of one that is too long."""
        start, ended, begins = self.end, part.endswith(b"\n"), not self._in_long_line
        self.end += len(part)
        self._in_long_line = not ended
        self._lines += begins
        if begins:
            try:
                (self.take if ended else self.take_long)(part, start)
            except (ValueError, RecursionError) as error:
                self.note(f"line {self._lines}: damaged ({str(error)[:120]}); left out")

    def note(self, fault: str) -> None:
        """Add a fault, unless there are many."""
        line = f"{self.path.name}, {fault}" if fault.startswith("line") else f"{self.path.name}: {fault}"
        if len(self.faults) < MOST_FAULTS and line not in self.faults:
            self.faults.append(line)


class Journal(LineFile):
    """A file of few lines, such as alarms.jsonl, each an object with a step."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._records: list[Mapping[str, object]] = []

    def records(self) -> list[Mapping[str, object]]:
        """All lines so far but those in `faults`."""
        self.read_on()
        return self._records

    def take(self, line: bytes, start: int) -> None:
        if len(self._records) < MOST_RECORDS:
            self._records.append(step_record(line))
        else:
            self.note(f"more than {MOST_RECORDS:,} lines; the later ones are left out")

    def forget(self) -> None:
        self._records = []


def step_record(line: bytes) -> dict[str, object]:
    """The object in a line, which has a step; inverse RL calls it an iteration.  Raises ValueError."""
    record = json.loads(line)
    if isinstance(record, dict) and "iteration" in record:
        record.setdefault("step", record["iteration"])
    if not isinstance(record, dict) or type(record.get("step")) is not int or abs(record["step"]) >= 2**53:
        raise ValueError("not a JSON object with a step")
    return record
