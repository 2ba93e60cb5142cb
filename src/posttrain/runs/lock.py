"""One writer for a run folder, and no folder that is someone else's.  Torch-free, for every command that makes runs."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.errors import UserError
from posttrain.runs.files import TEMPORARY, writing
from posttrain.runs.manifest import reading

LOCK = ".posttrain.lock"
"""Held by the writer while it lives; it also marks a folder as one that posttrain made and may clear."""


def refuse_foreign_folder(path: Path) -> None:
    """A folder with other things in it is not for a run: overwriting must never remove what posttrain did not make."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: is a file; a run needs a folder.  Choose another run.folder (--run.folder).")
    with reading(path):
        names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    others = sorted(name for name in names if name != LOCK and not name.startswith(TEMPORARY))
    if others and not {LOCK, "config.yaml"} <= names:
        raise UserError(
            f"{path}: not empty and not a run folder; it holds {', '.join(others[:3])}"
            f"{' ...' if len(others) > 3 else ''}.  Choose a new or empty run.folder (--run.folder)."
        )


def lock_folder(path: Path) -> int:
    """Become the folder's one writer.  The system drops the lock with the process, however that dies."""
    with writing(path, path):
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        writer = os.read(descriptor, 32).decode().strip() or "just started"
        os.close(descriptor)
        raise UserError(
            f"{path}: process {writer} is writing to this run folder, and a run has one writer.  "
            "Wait until it ends, stop it, or choose another run.folder (--run.folder)."
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Make a folder, and keep a second writer out of it.  Raises UserError where there is one."""
    with writing(folder, folder):
        folder.mkdir(parents=True, exist_ok=True)
    lock = lock_folder(folder)
    try:
        yield
    finally:
        os.close(lock)
