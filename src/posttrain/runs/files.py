"""Files that survive a killed process: written whole or not at all, and read without a torn last line.  Torch-free."""

import errno
import io
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from posttrain.errors import RunError
from posttrain.runs.manifest import reading, saved_steps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPORARY = ".tmp-"
"""Prefix of names that are still being written or removed; anyone may delete them."""

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def refusal(path: Path, run: Path, reason: str, *, full: bool) -> RunError:
    saved = saved_steps(run / "checkpoints")
    kept = f"{saved[max(saved)]} and every step before it" if saved else "the steps finished so far"
    remedy = "Free some space" if full else "Make the folder writable or choose another run.folder (--run.folder)"
    resume = f", then resume with --resume {run} (in Python train(config, resume=True))" if saved else ""
    return RunError(f"{path}: cannot be written: {reason}.  Kept: {kept}.  {remedy}{resume}.")


@contextmanager
def writing(path: Path, run: Path) -> Iterator[None]:
    """Turn an OSError for `path` into a message that says what is kept and what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.ELOOP:
            reason = f"{error.filename} is a link; put the file itself there"
        raise refusal(path, run, reason, full=error.errno in DISK_FULL) from error
    except SafetensorError as error:  # its text holds the system's error
        full = any(f"os error {code}" in str(error) for code in DISK_FULL)
        raise refusal(path, run, str(error), full=full) from error


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut; without it a rename may be lost."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file: a reader, or a run after a crash, finds the old content or the new one.

    A link is replaced; its target stays unchanged.
    """
    temporary = path.with_name(TEMPORARY + path.name)
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def save_figure(figure: "Figure", picture: Path, **options: Any) -> None:
    """Write a picture, in the format of its suffix, whole or not at all."""
    content = io.BytesIO()
    figure.savefig(content, format=picture.suffix.removeprefix("."), **options)
    write_atomically(picture, content.getvalue())


def no_link(path: str, flags: int) -> int:
    """An opener that follows no link, which a foreign run folder may hold.  Raises OSError."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def append_lines(path: Path, lines: Sequence[str]) -> None:
    """Append whole lines, all or none; they are on the disk when this returns.  A kill can tear the last one only."""
    size = path.stat().st_size if path.exists() else None
    try:
        write_to_end(path, "".join(f"{line}\n" for line in lines).encode())
    except OSError:
        if path.exists():  # half a line would be the beginning of the next one
            cut_file(path, size or 0)
        raise
    if size is None:
        sync_folder(path.parent)


def write_to_end(path: Path, content: bytes) -> None:
    with open(path, "ab", opener=no_link) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def cut_file(path: Path, size: int) -> None:
    with open(path, "r+b", opener=no_link) as file:
        file.truncate(size)
        os.fsync(file.fileno())


def whole_lines(path: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Number, end in bytes and record of each line; a torn last line, which has no newline, is left out.

    Raises RunError for a line that is not a JSON object.
    """
    end = 0
    with reading(path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            end += len(line)
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise changed_line(path, number, f"not JSON ({error})") from error
            if not isinstance(record, dict):
                raise changed_line(path, number, f"{type(record).__name__} in place of an object")
            yield number, end, record


def json_lines(path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Each line's end in bytes and its record.  Raises RunError for a line that is not the record of a step."""
    for number, end, record in whole_lines(path):
        if type(record.get("step")) is not int:
            raise changed_line(path, number, f"step = {record.get('step')!r:.40} is not the number of a step")
        yield end, record


class LineJournal:
    """A file of JSON lines in a folder that has one writer, whose threads append to the same object."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    def records(self) -> list[dict[str, Any]]:
        """What was appended so far; a torn last line is cut off.  Raises RunError for a changed one."""
        if not self.path.exists():
            return []
        lines = list(whole_lines(self.path))
        end = lines[-1][1] if lines else 0
        if end < self.path.stat().st_size:
            with writing(self.path, self.path.parent):
                cut_file(self.path, end)
        return [record for _, _, record in lines]

    def append(self, records: Sequence[Mapping[str, object]]) -> None:
        """Add records, all or none; they are on the disk when this returns."""
        lines = [json.dumps(record, allow_nan=False) for record in records]
        with self._lock, writing(self.path, self.path.parent):  # an error cuts off this call's lines only
            append_lines(self.path, lines)


def changed_line(path: Path, number: int, what: str) -> RunError:
    changed = f"{path}, line {number}: {what}; the file was changed after it was written."
    return RunError(f"{changed}  Restore the file or delete that line.")


def read_metrics(path: Path) -> list[Mapping[str, object]]:
    """The metrics of every finished step, in order."""
    return [record for _, record in json_lines(path)]


def cut_lines_after(path: Path, step: int, *, one_a_step: bool = False) -> None:
    """Shorten a journal to its lines up to `step`, and remove a torn last line.

    With `one_a_step` a second line of a step goes too, and what follows: the run had ended there, and now continues.
    Steps never decrease along the file, so one truncation is enough, and it needs no room on a full disk.
    """
    kept, before = 0, -1
    for end, record in json_lines(path):
        of_line = int(str(record["step"]))
        if of_line > step or (one_a_step and of_line == before):
            break
        kept, before = end, of_line
    cut_file(path, kept)
