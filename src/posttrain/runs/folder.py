"""The folder of a run of any kind.  Torch-free.

Its file `format` holds the version of its layout; a folder without this file has format 1.  When a call returns, its
files are on disk (fsync).
"""

import fcntl
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml

from posttrain.binding import digest_of
from posttrain.config import AnyConfig, as_recipe
from posttrain.config.recipes import RUN_RECIPE
from posttrain.config.run_trust import keep_recipe
from posttrain.errors import RunError, UserError
from posttrain.ranks.group import resume_flags
from posttrain.runs.files import TEMPORARY, LineJournal, reading, sync_folder, write_atomically, writing
from posttrain.runs.run_inputs import FILE as INPUTS, RunInputs

LOCK = ".posttrain.lock"
"""Lock of the active writer; it also marks a folder as one that posttrain made and may clear."""
FORMAT = "format"
LOOK_SECONDS = 0.02
"""Seconds between two attempts to lock a folder."""
WEIGHTS = "weights"
"""Folder of files for engines elsewhere; it only exists while a run is active."""
VERSION = 2
"""The newest layout of a run folder that this version of posttrain reads, and the one that it writes."""


class Folder:
    """The only writer of a run's folder; a context manager that releases the folder at its exit.

    A run claims its folder first, and starts to write when it has something to write.  Until then the folder's content
    stays; a folder made for a run that never starts is removed again.
    """

    contents: ClassVar[tuple[str, ...]]
    """What overwriting removes, config.yaml last; other files are kept."""
    journals: ClassVar[tuple[str, ...]] = ()
    folders: ClassVar[tuple[str, ...]] = ()
    content_files: ClassVar[tuple[str, ...]] = ("metrics.jsonl", "scores.jsonl")
    """Files that are only deleted with `overwrite`; a run that failed before it wrote them has nothing to lose."""
    foreign: ClassVar[tuple[str, ...]] = ()
    """Names that mark the folder of another command."""
    resumed_by: ClassVar[str] = "train"
    """The function with the argument `resume`, if any."""

    def __init__(self, path: Path, lock: int, *, begun: bool, new: bool = False) -> None:
        """Use `claim`, `create` or `resume`."""
        self.path = path.absolute()  # once: a reward function may change the working folder
        self.begun = begun
        """Whether the folder's content is this run's."""
        self._lock, self._new = lock, new
        self._held: list[Callable[[], object]] = []
        """Lines to write once the folder is started."""

    @classmethod
    def claim(cls, path: str | Path, *, overwrite: bool = False) -> Self:
        """Become the writer of a folder that is new or empty, or whose run may be overwritten."""
        path = Path(path)
        refuse_foreign_folder(path)
        new = not path.exists()
        with writing(path, path):
            path.mkdir(parents=True, exist_ok=True)
        folder = cls(path, lock_folder(path), begun=False, new=new)
        try:
            cls.refuse_other_runs(path, overwrite=overwrite)
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def create(cls, path: str | Path, config_yaml: str, *, overwrite: bool = False) -> Self:
        folder = cls.claim(path, overwrite=overwrite)
        try:
            folder.begin(config_yaml)
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def refuse_other_runs(cls, path: Path, *, overwrite: bool) -> None:
        """Raise UserError for a run of another command, and for one with content unless `overwrite` is set."""
        if any((path / name).exists() for name in cls.foreign):
            raise UserError(f"{path}: contains a run of another command.  Choose another run.folder (--run.folder).")
        files = [path / name for name in cls.content_files]
        if not overwrite and any(file.exists() and file.stat().st_size for file in files):
            says = f"{path}: this folder already contains a run.  Use"
            if not cls.resumed_by:
                raise UserError(f"{says} run.overwrite = true (--run.overwrite) or another run.folder (--run.folder).")
            raise UserError(
                f"{says} {cls.resumed_by}(..., resume=True), run.overwrite = true or another run.folder.",
                command=f"{says} --resume {path}, --run.overwrite or another --run.folder.",
            )

    def begin(self, config_yaml: str) -> None:
        """Remove an earlier run, create the new layout, and write the pending lines."""
        with writing(self.path, self.path):
            for name in (FORMAT, *self.contents):
                if (self.path / name).is_dir():
                    shutil.rmtree(self.path / name)
                else:
                    (self.path / name).unlink(missing_ok=True)
            self.write_format()
            self.replace_config(config_yaml)
            for name in self.folders:
                (self.path / name).mkdir()
            for name in self.journals:
                (self.path / name).touch()
            sync_folder(self.path)
        self.begun = True
        held, self._held = self._held, []
        for write in held:
            write()

    def write_format(self) -> None:
        self.write(FORMAT, f"{VERSION}\n")

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.path / name
        with writing(path, self.path):
            if path.parent != self.path:
                path.parent.mkdir(exist_ok=True)
            write_atomically(path, content.encode() if isinstance(content, str) else content)
        return path

    def write_inputs(self, inputs: RunInputs) -> None:
        self.write(INPUTS, inputs.as_json())

    def write_rows(self, name: str, rows: Sequence[Mapping[str, object]]) -> None:
        self.write(name, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))

    def replace_config(self, config_yaml: str) -> None:
        path = self.path / RUN_RECIPE
        before = digest_of(path) if self.begun else None
        self.write(RUN_RECIPE, config_yaml)
        keep_recipe(digest_of(path), before, str(path))

    def close(self) -> None:
        """Release the folder for other writers.  Closing twice has no effect."""
        if self._lock >= 0:
            if self._new and not self.begun:
                (self.path / LOCK).unlink(missing_ok=True)
                with suppress(OSError):  # it is no longer empty
                    self.path.rmdir()
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write_summary(self, summary: Mapping[str, object]) -> None:
        self.write("summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")

    def _append(self, name: str, records: Sequence[Mapping[str, object]]) -> None:
        if not self.begun:
            self._held.append(lambda: self._append(name, records))
            return
        LineJournal(self.path / name).append(records)


def require_run_folder(run: Path) -> None:
    """Reject a folder that is not a run, that a newer version wrote, or whose file `format` is damaged."""
    file, text = run / FORMAT, "1"
    if file.is_file():
        with reading(file):
            text = file.read_bytes()[:40].decode(errors="replace").strip()
    if not (text.isascii() and text.isdigit()):
        raise RunError(f"{file}: damaged: {text!r} is not a version.  Write {VERSION} there, or delete the file.")
    if int(text) > VERSION:
        raise UserError(
            f"{run}: a run folder of format {text}, but this version of posttrain supports 1 to {VERSION}.  Update"
            " posttrain."
        )
    if not (run / RUN_RECIPE).is_file():
        rule = f"not a run folder: {RUN_RECIPE} is missing.  Name the folder of a run."
        raise UserError(f"run.folder = {run}: {rule}", command=f"--resume {run}: {rule}")


def shown(path: Path) -> Path:
    """The path relative to the working folder, if it is in there."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def resume_command(run: Path, command: str) -> str:
    return shlex.join(["posttrain", command, "--resume", str(shown(run)), *resume_flags()])


def interrupted_lines(run: Path, step: int, reason: str, command: str) -> list[str]:
    go_on = f"continue     {resume_command(run, command)}"
    return [f"{reason}: stopped after step {step}; everything is saved.", go_on]


def saved_recipe(config: AnyConfig) -> str:
    """The recipe for a run's folder.  It never sets `overwrite`: running it must not delete this run."""
    kept: Any = config  # each kind has a `run` of its own class
    return as_recipe(replace(kept, run=replace(kept.run, overwrite=False)))


def shared_recipe(config: AnyConfig) -> str:
    """The recipe without paths that may differ between the ranks of a run: its folder and the model's."""
    recipe: dict[str, Any] = yaml.safe_load(saved_recipe(config))
    for section, name in (("run", "folder"), ("model", "path")):
        recipe.get(section, {}).pop(name, None)
    return json.dumps(recipe, sort_keys=True)


def refuse_foreign_folder(path: Path) -> None:
    """Reject a folder with other content: overwriting must never remove what posttrain did not make."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: is a file, but a run needs a folder.  Choose another run.folder (--run.folder).")
    with reading(path):
        names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    ours = {LOCK, FORMAT, *([WEIGHTS] if LOCK in names else [])}  # of a run that was killed before its first step
    others = sorted(name for name in names - ours if not name.startswith(TEMPORARY))
    if others and not {LOCK, "config.yaml"} <= names:
        listed = ", ".join(others[:3]) + (" ..." if len(others) > 3 else "")
        raise UserError(
            f"{path}: not empty and not a run folder: {listed}.  Choose a new or empty run.folder (--run.folder)."
        )


def lock_folder(path: Path) -> int:
    """Become the folder's only writer.  The system releases the lock when the process ends for any reason."""
    with writing(path, path):
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        for tries_left in (2, 1, 0):  # a viewer that looks whether there is a writer holds it for microseconds
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not tries_left:
                    raise
                time.sleep(LOOK_SECONDS)
    except BlockingIOError:
        writer = os.read(descriptor, 32).decode().strip() or "just started"
        os.close(descriptor)
        raise UserError(
            f"{path}: process {writer} is writing to this run folder.  Stop it, or choose another run.folder"
            " (--run.folder)."
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Make a folder and lock it.  Raises UserError if there is another writer."""
    with writing(folder, folder):
        folder.mkdir(parents=True, exist_ok=True)
    lock = lock_folder(folder)
    try:
        yield
    finally:
        os.close(lock)
