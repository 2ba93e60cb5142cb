"""Arrays in files of a person's own: nothing in them can run, and what is not made of numbers is refused by name."""

from collections.abc import Sequence
from pathlib import Path
from zipfile import BadZipFile
from zlib import error as BadCompression

import numpy as np
from numpy import ndarray

from posttrain.errors import UserError


def read_arrays(path: Path, where: str, *, needed: Sequence[str], known: Sequence[str] = ()) -> dict[str, ndarray]:
    """The arrays of an .npz file that are needed, and those of the other known ones that it holds."""
    found = content(path, where, [*needed, *known])
    if isinstance(found, ndarray):
        raise UserError(f"{where} = {path}: holds one array without a name; give an .npz file, as np.savez writes it")
    missing = [name for name in needed if name not in found]
    if missing:
        raise UserError(f"{where} = {path}: it holds no array {missing[0]!r}; it needs {', '.join(needed)}")
    return {name: numbers(array, f"{where} = {path}: the array {name!r}") for name, array in found.items()}


def read_array(path: Path, where: str) -> ndarray:
    """The array of an .npy file."""
    found = content(path, where, [])
    if not isinstance(found, ndarray):
        raise UserError(f"{where} = {path}: holds several arrays; give an .npy file with one")
    return numbers(found, f"{where} = {path}: the array")


def content(path: Path, where: str, names: Sequence[str]) -> ndarray | dict[str, object]:
    """The array of an .npy file, or those of an .npz file that have one of the names."""
    try:
        found: ndarray | np.lib.npyio.NpzFile = np.load(path, allow_pickle=False)
        if isinstance(found, ndarray):
            return found
        with found:
            return {name: found[name] for name in names if name in found}
    except FileNotFoundError:
        raise UserError(f"{where} = {path}: there is no such file") from None
    except OSError as error:
        raise UserError(f"{where} = {path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, BadZipFile, BadCompression) as error:
        raise UserError(f"{where} = {path}: not a file of numpy arrays: {error}") from error


def numbers(array: object, what: str) -> ndarray:
    """The same, once it is found to hold real numbers; a file in an archive that is no array comes as bytes."""
    if not isinstance(array, ndarray) or array.dtype.kind not in "biuf":
        raise UserError(f"{what} holds no real numbers")
    return array
