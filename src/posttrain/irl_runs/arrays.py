"""Arrays in files of a person's own: nothing in them can run, and what is not made of numbers is refused by name."""

from collections.abc import Sequence
from pathlib import Path

from numpy import ndarray

from posttrain.errors import UserError
from posttrain.irl.array_files import read_file


def read_arrays(path: Path, where: str, *, needed: Sequence[str], known: Sequence[str] = ()) -> dict[str, ndarray]:
    """The arrays of an .npz file that are needed, and those of the other known ones that it holds."""
    found = stored_arrays(path, where, [*needed, *known])
    if isinstance(found, ndarray):
        raise UserError(f"{where} = {path}: holds one array without a name; give an .npz file, as np.savez writes it")
    missing = [name for name in needed if name not in found]
    if missing:
        raise UserError(f"{where} = {path}: it holds no array {missing[0]!r}; it needs {', '.join(needed)}")
    return {name: real_numbers(array, f"{where} = {path}: the array {name!r}") for name, array in found.items()}


def read_array(path: Path, where: str) -> ndarray:
    """The array of an .npy file."""
    found = stored_arrays(path, where, [])
    if not isinstance(found, ndarray):
        raise UserError(f"{where} = {path}: holds several arrays; give an .npy file with one")
    return real_numbers(found, f"{where} = {path}: the array")


def stored_arrays(path: Path, where: str, names: Sequence[str]) -> ndarray | dict[str, ndarray]:
    """The array of an .npy file, or those of an .npz file that have one of the names."""
    try:
        return read_file(path, names=names)
    except UserError as error:
        raise UserError(f"{where} = {error}") from error


def real_numbers(array: ndarray, what: str) -> ndarray:
    """The array, unless it holds anything but real numbers."""
    if array.dtype.kind not in "biuf":
        raise UserError(f"{what} holds no real numbers")
    return array
