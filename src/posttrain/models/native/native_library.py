"""The C files as a library: compiled at its first use, into a cache that other processes share.

The cache is `$XDG_CACHE_HOME/posttrain/native` (or `~/.cache/…`), a file for each source, compiler and CPU.  Where it
cannot be written, the library is compiled for this process only.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SHARED = Path(__file__).with_name("kernel.h")
SOURCES = tuple(Path(__file__).with_name(name) for name in ("decoder.c", "layers.c", "attention.c", "output.c"))
FLAGS = ("-O3", "-march=native", "-std=c11", "-ffp-contract=fast", "-shared", "-fPIC")
COMPILE_SECONDS = 120
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NativeUnavailable(Exception):
    """Why this machine has no library."""


@cache
def native_library(flags: Sequence[str] = FLAGS) -> ctypes.CDLL:
    """The library.  Raises NativeUnavailable if there is no C compiler, or it fails."""
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        place = " ".join([sys.platform, platform.machine(), platform.libc_ver()[0] or "another libc"])
        raise NativeUnavailable(f"it was only tried on Linux, x86-64 and glibc, and this is {place}")
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        raise NativeUnavailable(f"there is no C compiler ({os.environ.get('CC') or 'cc'})")
    name = f"kernel-{library_key(compiler, flags)}.so"
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return loaded_from(folder / name, compiler, flags)
    except OSError:  # it is read-only or full, or belongs to somebody else
        private = Path(tempfile.mkdtemp(prefix="posttrain-native-"))
        try:
            return loaded_from(private / name, compiler, flags)
        except OSError as error:
            raise NativeUnavailable(f"it cannot be written or loaded ({error})") from error
        finally:
            shutil.rmtree(private, ignore_errors=True)  # the mapped file stays until the process ends


def run_natively(name: str, call: ctypes.Structure, tensors: Mapping[str, Tensor | None]) -> None:
    """Call a function of the library on tensors by the names of its record.  What it writes must be contiguous."""
    held = {field: tensor.detach().contiguous() for field, tensor in tensors.items() if tensor is not None}
    for field, tensor in held.items():
        setattr(call, field, tensor.data_ptr())
    if getattr(native_library(), name)(ctypes.byref(call), ctypes.c_int64(torch.get_num_threads())):
        raise MemoryError("not enough memory for an update by the native kernel")


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "posttrain" / "native"


def library_key(compiler: str, flags: Sequence[str]) -> str:
    """What the library depends on: the source, the flags, the compiler and the CPU."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=COMPILE_SECONDS).stdout
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    cpu = next((line for line in lines if line.startswith("flags")), "")
    parts = [*(source.read_bytes() for source in (SHARED, *SOURCES)), " ".join(flags).encode(), version, cpu.encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def loaded_from(file: Path, compiler: str, flags: Sequence[str]) -> ctypes.CDLL:
    """Load the file, after compiling it if it is absent, damaged, or could have been written by others."""
    if file.exists() and is_private(file) and is_private(file.parent):
        try:
            return ctypes.CDLL(str(file))
        except OSError:
            file.unlink()
    compile_to(file, compiler, flags)
    return ctypes.CDLL(str(file))


def is_private(path: Path) -> bool:
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & OTHERS_MAY_WRITE


def compile_to(file: Path, compiler: str, flags: Sequence[str]) -> None:
    """Compile under another name and rename: two processes may do so at once."""
    if not is_private(file.parent):
        raise PermissionError(f"{file.parent} can be written by others")
    number, made = tempfile.mkstemp(suffix=".so", dir=file.parent)
    os.close(number)
    try:
        command = [compiler, *flags, "-o", made, *map(str, SOURCES), "-lm", "-lpthread"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILE_SECONDS)
        if done.returncode:
            if shutil.disk_usage(file.parent).free == 0:
                raise OSError(f"{file.parent} is full")
            said = (done.stderr or done.stdout).strip().splitlines() or ["it says nothing"]
            raise NativeUnavailable(f"`{compiler}` failed: {said[-1]}")
        Path(made).chmod(0o700)
        Path(made).rename(file)
    finally:
        Path(made).unlink(missing_ok=True)
