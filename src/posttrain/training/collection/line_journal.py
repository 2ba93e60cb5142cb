"""A file that grows by whole lines of JSON: what is in it is on the disk, and a kill tears at most its last line."""

import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.runs.files import append_lines, changed_line, no_link, sync_folder, writing
from posttrain.runs.manifest import reading


class LineJournal:
    """One such file, of a folder that has one writer; its threads append to the same object, one after another."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    def records(self) -> list[dict[str, Any]]:
        """What was appended so far; a last line that a kill has torn is cut off.  Raises RunError for a changed one."""
        if not self.path.exists():
            return []
        found: list[dict[str, Any]] = []
        whole = 0
        with reading(self.path), self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                found.append(self._record(number, line))
        if whole < self.path.stat().st_size:
            with writing(self.path, self.path.parent), open(self.path, "r+b", opener=no_link) as file:
                file.truncate(whole)
                os.fsync(file.fileno())
        return found

    def append(self, records: Sequence[Mapping[str, object]]) -> None:
        """Add records; they are on the disk when this returns, and none of them is in the file where it raises."""
        lines = [json.dumps(record, allow_nan=False) for record in records]
        with self._lock:  # what is cut off after an error is this call's own
            self._append(lines)

    def _append(self, lines: list[str]) -> None:
        size = self.path.stat().st_size if self.path.exists() else None
        with writing(self.path, self.path.parent):
            try:
                append_lines(self.path, lines)
            except OSError:
                if self.path.exists():  # half a line would be the beginning of the next one
                    with open(self.path, "r+b", opener=no_link) as file:
                        file.truncate(size or 0)
                raise
            if size is None:
                sync_folder(self.path.parent)

    def _record(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise changed_line(self.path, number, f"not JSON ({error})") from error
        if not isinstance(record, dict):
            raise changed_line(self.path, number, f"{type(record).__name__} in place of an object")
        return record
