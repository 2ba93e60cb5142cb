"""Reads files of numpy arrays, which may hold anything: nothing in them can run, and all must be real numbers."""

import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy import ndarray

from posttrain.errors import UserError

DAMAGED = (
    *(ValueError, TypeError, EOFError, RuntimeError, MemoryError),
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError),
)
"""What numpy and zipfile raise for a file that numpy did not write, or that was changed later."""


def file_path(path: object) -> Path:
    """A path; rejects numbers, which `open` takes for files that are already open."""
    if not isinstance(path, str | Path) or not str(path):
        raise UserError(f"path = {path!r}: give the name of a file")
    return Path(path)


def read_arrays(
    path: object, *, needed: Sequence[str], known: Sequence[str] = (), where: str = ""
) -> dict[str, ndarray]:
    """The arrays of an .npz file that are needed, and those of the known ones that it holds."""
    found = stored_arrays(path, [*needed, *known], where)
    missing = needed if isinstance(found, ndarray) else [name for name in needed if name not in found]
    if isinstance(found, ndarray) or missing:
        raise UserError(
            f"{where}{path}: it holds no array {missing[0]!r}; give an .npz file (np.savez) with {', '.join(needed)}"
        )
    return {name: real_numbers(array, f"{where}{path}: the array {name!r}") for name, array in found.items()}


def read_array(path: object, *, where: str = "") -> ndarray:
    found = stored_arrays(path, [], where)
    if not isinstance(found, ndarray):
        raise UserError(f"{where}{path}: holds several arrays; give an .npy file with one")
    return real_numbers(found, f"{where}{path}: the array")


def stored_arrays(path: object, names: Sequence[str], where: str) -> ndarray | dict[str, ndarray]:
    """The array in an .npy file, or those in an .npz file that have one of the names."""
    try:
        with open(file_path(path), "rb") as file:
            content = np.load(file, allow_pickle=False)
            if isinstance(content, ndarray):
                return content
            found = {name: content[name] for name in names if name in content}
    except FileNotFoundError:
        raise UserError(f"{where}{path}: the file does not exist") from None
    except OSError as error:
        raise UserError(f"{where}{path}: cannot be read: {error.strerror or error}") from error
    except DAMAGED as error:
        raise UserError(f"{where}{path}: not a file of numpy arrays, or damaged ({error}); use np.savez") from error
    if not all(isinstance(array, ndarray) for array in found.values()):
        raise UserError(f"{where}{path}: not a file of numpy arrays, but an archive of something else")
    return found


def real_numbers(array: ndarray, what: str) -> ndarray:
    if array.dtype.kind not in "biuf":
        raise UserError(f"{what} holds {array.dtype}; give real numbers")
    return array
