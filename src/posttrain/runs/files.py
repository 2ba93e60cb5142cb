"""Files that survive a killed process: written completely or not at all, without a torn last line.  Torch-free.

The manifest of a checkpoint has hashes of its files, which reveal damage:

    {"format": 2, "step": 12, "score": null, "made_with": {"threads": 2, "torch": "2.13.0", "cpu": "AVX512"},
     "files": {"state.json": {"sha256": "9f86d0...", "bytes": 1520}, ...},
     "sha256": "d7a8fb..."}

The last entry is the hash of the rest, as JSON with sorted keys and without spaces.  Format 1, of earlier versions,
does not have it and is supported.
"""

import errno
import hashlib
import io
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from safetensors import SafetensorError

from posttrain.errors import RunError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MANIFEST, RECIPE = "manifest.json", "config.yaml"
"""Names of files in the folder of a checkpoint; the recipe's is also that in the run folder."""
FORMAT, WITHOUT_HASH = 2, 1
NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of an undamaged manifest."""

    step: int
    score: float | None
    """Higher is better; None is unknown."""
    made_with: Mapping[str, object]
    files: Mapping[str, Mapping[str, object]]
    """Name -> `sha256` and `bytes`."""


class DamageError(Exception):
    """A checkpoint has changed since it was written; the message names the file and the fault."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError for `path` into a message that names it."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror or error}.  Nothing was changed there.") from error


def saved_steps(folder: Path, *, empty: bool = False) -> dict[int, Path]:
    """Finished checkpoints by step, or the `empty` folders of some; unfinished and foreign folders are skipped."""
    with reading(folder):
        found = ((NAME.fullmatch(path.name), path) for path in folder.glob("step-*"))
        steps = {int(name[1]): path for name, path in found if name and path.is_dir() and is_empty(path) == empty}
    return dict(sorted(steps.items()))


def is_empty(folder: Path) -> bool:
    """Whether a folder is empty; False if it cannot be listed, since reading its manifest then reports why."""
    with reading(folder):
        return os.access(folder, os.R_OK | os.X_OK) and not os.listdir(folder)


def write_manifest(path: Path, step: int, score: float | None, made_with: Mapping[str, object]) -> None:
    files = {file.name: {"sha256": sha256(file), "bytes": file.stat().st_size} for file in sorted(path.iterdir())}
    content = {"format": FORMAT, "step": step, "score": score, "made_with": made_with, "files": files}
    write_atomically(path / MANIFEST, json.dumps({**content, "sha256": content_hash(content)}, indent=2).encode())


def content_hash(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(path: Path) -> Manifest:
    """The manifest in a checkpoint's folder.  Raises DamageError if it has changed since it was written."""
    file = path / MANIFEST
    try:
        return manifest_from(file.read_bytes(), path.name)
    except OSError as error:
        raise DamageError(f"{file}: missing or not readable, so the checkpoint cannot be trusted") from error
    except DamageError as wrong:
        raise DamageError(f"{file}: damaged: {wrong}") from wrong


def manifest_from(text: bytes, name: str) -> Manifest:
    """The manifest of the checkpoint of that name.  Raises DamageError if it has changed since it was written."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamageError("not readable as a manifest, so the checkpoint cannot be trusted") from error
    if wrong := fault(content, name):
        raise DamageError(wrong)
    return Manifest(**{name: content[name] for name in ("step", "score", "made_with", "files")})


def fault(content: object, name: str) -> str | None:
    """Why JSON data is not the manifest of the checkpoint of that name, or None."""
    if not isinstance(content, dict):
        return f"{type(content).__name__} instead of an object"
    if content.get("format") not in (FORMAT, WITHOUT_HASH):
        return f"format = {content.get('format')!r:.40}; this version supports {WITHOUT_HASH} and {FORMAT}"
    if content["format"] == FORMAT:
        rest = {key: value for key, value in content.items() if key != "sha256"}
        if content.get("sha256") != content_hash(rest):
            return "its content does not match its SHA-256"
    step, score, made_with, files = (content.get(key) for key in ("step", "score", "made_with", "files"))
    if type(step) is not int or f"step-{step:06d}" != name:
        return f"step = {step!r:.40} in the folder {name}"
    if score is not None and type(score) not in (int, float):
        return f"score = {score!r:.40} is not a number"
    if not has_types(made_with, threads=int, torch=str, cpu=str) or made_with["threads"] < 1:
        return f"made_with = {made_with!r:.80} does not have threads, torch or cpu"
    listed = isinstance(files, dict) and all(
        file == Path(file).name and has_types(written, sha256=str, bytes=int) for file, written in files.items()
    )
    return None if listed and "score" in content else "`score`, or the size or hash of a file, is missing"


def has_types(content: object, **types: type) -> TypeGuard[dict[str, Any]]:
    return isinstance(content, dict) and all(type(content.get(name)) is kind for name, kind in types.items())


def damage(path: Path) -> str | None:
    """The first fault of a checkpoint's files, or None."""
    try:
        require_undamaged(path)
    except DamageError as wrong:
        return str(wrong)
    return None


def require_undamaged(path: Path) -> Manifest:
    """The manifest of a checkpoint.  Raises DamageError if the manifest or a file has changed since it was written."""
    manifest = read_manifest(path)
    for name, written in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise DamageError(f"{file}: missing, but {MANIFEST} lists it")
        if (size := file.stat().st_size) != written["bytes"]:
            raise DamageError(f"{file}: damaged: {size} bytes, but {MANIFEST} says {written['bytes']}")
        with reading(file):
            if sha256(file) != written["sha256"]:
                raise DamageError(f"{file}: damaged: its SHA-256 is not the one in {MANIFEST}")
    return manifest


def sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


TEMPORARY = ".tmp-"
"""Prefix of names that are still being written or removed; anyone may delete them."""

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
NATIVE_ERROR = re.compile(r"\(os error (\d+)\)")
"""The end of the message of an operating-system error that safetensors and tokenizers raise as a plain Exception."""


@contextmanager
def writing(path: Path, run: Path) -> Iterator[None]:
    """Turn an OSError for `path` into a message that says what is saved and what to do."""
    try:
        yield
    except Exception as error:
        reason, by_system = str(error), NATIVE_ERROR.search(str(error))
        full = by_system is not None and int(by_system[1]) in DISK_FULL
        if isinstance(error, OSError):
            linked = error.errno == errno.ELOOP
            reason = f"{error.filename} is a link; put the file itself there" if linked else error.strerror or reason
            full = error.errno in DISK_FULL
        elif not (isinstance(error, SafetensorError) or by_system):
            raise
        saved = saved_steps(run / "checkpoints")
        kept = f"{saved[max(saved)]} and every step before it" if saved else "the steps finished so far"
        remedy = "Free some space" if full else "Make the folder writable or choose another run.folder (--run.folder)"
        resume = f", then resume with --resume {run} (in Python train(config, resume=True))" if saved else ""
        raise RunError(f"{path}: cannot be written: {reason}.  Kept: {kept}.  {remedy}{resume}.") from error


def sync_folder(folder: Path) -> None:
    """Make file names in a folder survive a power cut; otherwise, a rename may be lost."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file: a reader, or a run after a crash, finds either the old or the new content.

    A link is replaced; its target does not change.
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
    """Write a picture in the format of its suffix, completely or not at all."""
    content = io.BytesIO()
    figure.savefig(content, format=picture.suffix.removeprefix("."), **options)
    write_atomically(picture, content.getvalue())


def no_link(path: str, flags: int) -> int:
    """An opener that does not follow links, which someone else's run folder may contain.  Raises OSError."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def append_lines(path: Path, lines: Sequence[str]) -> None:
    """Append whole lines, all or none; they are on disk when this returns.  A kill can only tear the last one."""
    size = path.stat().st_size if path.exists() else None
    try:
        with open(path, "ab", opener=no_link) as file:
            file.write("".join(f"{line}\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        if path.exists():  # half a line would be the beginning of the next one
            cut_file(path, size or 0)
        raise
    if size is None:
        sync_folder(path.parent)


def cut_file(path: Path, size: int) -> None:
    with open(path, "r+b", opener=no_link) as file:
        file.truncate(size)
        os.fsync(file.fileno())


def whole_lines(path: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Number, end in bytes and record of each line; a torn last line (without a newline) is skipped.

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
                raise changed_line(path, number, f"{type(record).__name__} instead of an object")
            yield number, end, record


def json_lines(path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Each line's end in bytes and its record.  Raises RunError for a line that is not a record of a step."""
    for number, end, record in whole_lines(path):
        if type(record.get("step")) is not int:
            raise changed_line(path, number, f"step = {record.get('step')!r:.40} is not the number of a step")
        yield end, record


class LineJournal:
    """A file of JSON lines in a folder with a single writer, whose threads append to the same object."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    def records(self) -> list[dict[str, Any]]:
        """The records so far; a torn last line is removed.  Raises RunError for a changed line."""
        if not self.path.exists():
            return []
        lines = list(whole_lines(self.path))
        end = lines[-1][1] if lines else 0
        if end < self.path.stat().st_size:
            with writing(self.path, self.path.parent):
                cut_file(self.path, end)
        return [record for _, _, record in lines]

    def append(self, records: Sequence[Mapping[str, object]]) -> None:
        """Add records, all or none; they are on disk when this returns."""
        lines = [json.dumps(record, allow_nan=False) for record in records]
        with self._lock, writing(self.path, self.path.parent):  # an error cuts off this call's lines only
            append_lines(self.path, lines)


def changed_line(path: Path, number: int, what: str) -> RunError:
    remedy = "the file was changed after it was written.  Restore the file or delete that line."
    return RunError(f"{path}, line {number}: {what}; {remedy}")


def read_metrics(path: Path) -> list[Mapping[str, object]]:
    return [record for _, record in json_lines(path)]


def cut_lines_after(path: Path, step: int, *, one_a_step: bool = False) -> None:
    """Shorten a journal to its lines up to `step`, and remove a torn last line.

    With `one_a_step` a step's second line and everything after it are removed too: the run had ended there, and now
    continues.  Steps never decrease along the file, so one truncation is enough, which also works on a full disk.
    """
    kept, before = 0, -1
    for end, record in json_lines(path):
        of_line = int(str(record["step"]))
        if of_line > step or (one_a_step and of_line == before):
            break
        kept, before = end, of_line
    cut_file(path, kept)
