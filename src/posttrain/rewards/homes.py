"""Where a function that a user wrote is found by name, so that another process can call it and a cache can know it."""

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from posttrain.errors import RunError, UserError


@dataclass(frozen=True, slots=True)
class Home:
    """A name in a file or in a module."""

    place: str
    """An absolute path that ends in .py, or the dotted name of a module."""
    name: str
    """A name there, dotted where it is within a class."""
    file: str
    """The file that defines it."""
    digest: str
    """The SHA-256 of the file when it was loaded."""

    def require_unchanged(self) -> None:
        """Refuse to go on with a function that is no longer the one that scored so far."""
        if digest_of(Path(self.file)) != self.digest:
            raise RunError(
                f"{self.file} has changed since `{self.name}` was loaded from it, and a run keeps its rewards."
                "  Put it back as it was and resume the run, or start another."
            )


def home_in_file(file: Path, name: str) -> Home:
    """The home of a function that a recipe names as FILE.py:FUNCTION."""
    return Home(place=str(file.resolve()), name=name, file=str(file.resolve()), digest=digest_of(file))


def digest_of(file: Path) -> str:
    """The SHA-256 of a file's content; empty where there is no such file."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""


@functools.cache  # as it was when first asked for: a file may change after its function has been imported
def home_of(call: Callable[..., object], reward: str) -> Home:
    """The home of a function that Python code handed over.  Raises UserError where no name leads back to it."""
    remedy = (
        "  Write it as a `def` at the top of a file of its own and import it from there, or name it in the recipe as"
        " FILE.py:FUNCTION."
    )
    if not inspect.isfunction(call):
        kind = type(call).__name__
        raise UserError(f"reward {reward!r} is a {kind}, which neither a worker nor a cache finds by name.{remedy}")
    module, name = call.__module__, call.__qualname__
    if module == "__main__" or "<" in name:
        where = "in the program that was started" if module == "__main__" else "inside another function, or a lambda"
        raise UserError(f"reward {reward!r} is {where}, where neither a worker nor a cache finds it by name.{remedy}")
    found: object = sys.modules.get(module)
    file = getattr(found, "__file__", None)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not call or file is None:
        raise UserError(f"reward {reward!r}: {module}:{name} is not this function.{remedy}")
    return Home(place=module, name=name, file=file, digest=digest_of(Path(file)))
