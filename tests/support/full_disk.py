"""Every write to a folder in this process, one after another: the n-th meets a full disk, and so do all after it.

Seen are files opened for writing, bytes that go to them, syncs, renames and new folders, and the files that safetensors
and tokenizers write by code of their own, which say it in errors of their own.  On a full disk the n-th write still
writes half of its bytes, as a disk does; a sync or rename that fails is the only one.
"""

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerFast

NATIVE = f"I/O error: {os.strerror(errno.ENOSPC)} (os error {errno.ENOSPC})"


class FullDisk:
    """A disk under a folder, which is full from a write on."""

    def __init__(self, folder: Path, number: int | None = None, *, short: bool = False) -> None:
        """Without a number, writes are only counted; a `short` write is the only thing that happens."""
        self.folder, self.number, self.short = folder.absolute(), number, short
        self.writes: list[tuple[str, str]] = []
        """What was done, and to which file, in order."""
        self.full = False

    def meets(self, what: str, path: object) -> bool:
        """Count a write to a file of the folder; whether it is the one that fails."""
        place = Path(os.fsdecode(path) if isinstance(path, bytes) else str(path)).absolute()
        if not place.is_relative_to(self.folder):
            return False
        self.writes.append((what, place.relative_to(self.folder).as_posix()))
        return len(self.writes) - 1 == self.number

    def need_room(self, what: str, path: object) -> None:
        """Raises OSError where there is none."""
        hit = self.meets(what, path) and not self.short
        self.full |= hit
        if self.full and (hit or Path(str(path)).absolute().is_relative_to(self.folder)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def once(self, what: str, path: object) -> None:
        """A sync or a rename, which may fail and needs no room."""
        if self.meets(what, path) and not self.short:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


class CountedFile(io.FileIO):
    """A file whose writes a disk counts."""

    disk: FullDisk

    def write(self, data: Any, /) -> int:
        half = len(memoryview(data).cast("B")) // 2
        if self.disk.meets("write", self.name) and half:
            self.disk.full = not self.disk.short
            return super().write(memoryview(data).cast("B")[:half])
        if self.disk.full or (self.disk.number == len(self.disk.writes) - 1 and not self.disk.short):
            self.disk.full = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.name))
        return super().write(data)


@contextmanager
def full_disk(disk: FullDisk) -> Iterator[FullDisk]:
    """Have this process write to that disk."""
    opens = io.open

    def opened(file: Any, mode: str = "r", buffering: int = -1, *text: Any, closefd: bool = True, **more: Any) -> Any:
        inside = not isinstance(file, int) and Path(os.fsdecode(file)).absolute().is_relative_to(disk.folder)
        if not inside or not set(mode) & set("wxa+"):
            return opens(file, mode, buffering, *text, closefd=closefd, **more)
        if "r" not in mode:  # a new file, or more of one
            disk.need_room("open", os.fsdecode(file))
        raw = CountedFile(os.fsdecode(file), mode.replace("t", ""), opener=more.pop("opener", None))
        raw.disk = disk
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *text, **more)

    def seen(function: Callable[..., Any], see: Callable[[str, object], None], path: Callable[..., object]) -> Any:
        def with_disk(*given: Any, **named: Any) -> Any:
            see(function.__name__, path(*given))
            return function(*given, **named)

        return mock.patch.object(os, function.__name__, with_disk)

    def written(function: Callable[..., Any], path: Callable[..., object], error: type[Exception]) -> Any:
        def with_disk(*given: Any, **named: Any) -> Any:
            try:
                disk.need_room("write", path(*given, **named))
            except OSError as full:
                Path(str(path(*given, **named))).touch()
                raise error(NATIVE) from full
            return function(*given, **named)

        return with_disk

    serialize, save = safetensors.torch.serialize_file, PreTrainedTokenizerFast._save_pretrained
    with (
        mock.patch.object(io, "open", opened),
        mock.patch.object(builtins, "open", opened),
        seen(os.fsync, disk.once, lambda file: os.readlink(f"/proc/self/fd/{file}")),
        seen(os.rename, disk.once, lambda source, target: target),
        seen(os.replace, disk.once, lambda source, target: target),
        seen(os.mkdir, disk.need_room, lambda folder, *mode: folder),
        mock.patch.object(
            safetensors.torch, "serialize_file", written(serialize, lambda _, file, **more: file, SafetensorError)
        ),
        mock.patch.object(
            PreTrainedTokenizerFast,
            "_save_pretrained",
            written(save, lambda _, save_directory, *more, **named: Path(save_directory) / "tokenizer.json", Exception),
        ),
    ):
        yield disk
