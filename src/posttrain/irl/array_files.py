"""Reading files of numpy arrays, which may hold anything."""

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
"""What numpy and zipfile raise on reading what numpy did not write, or wrote and something changed."""


def file_path(path: object) -> Path:
    """A path; refuses numbers, which `open` takes for files that are open already."""
    if not isinstance(path, str | Path) or not str(path):
        raise UserError(f"path = {path!r}: give the name of a file")
    return Path(path)


def read_file(path: Path | str, *, names: Sequence[str]) -> ndarray | dict[str, ndarray]:
    """The array in an .npy file, or those in an .npz file that have one of the names; nothing in it can run."""
    try:
        with open(file_path(path), "rb") as file:
            content = np.load(file, allow_pickle=False)
            if isinstance(content, ndarray):
                return content
            found = {name: content[name] for name in names if name in content}
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except DAMAGED as error:
        raise UserError(
            f"{path}: not a file of numpy arrays, or a damaged one ({error}); write numbers with np.savez or np.save"
        ) from error
    if not all(isinstance(array, ndarray) for array in found.values()):
        raise UserError(f"{path}: not a file of numpy arrays, but an archive of something else")
    return found
