"""Binds plain data from a recipe to a function or class by its signature.

An algorithm is a function and its signature is its config schema: {"clip_high": 0.3} becomes dapo(clip_high=0.3).
The schema of a section is a dataclass.  A user's function or class, FILE.py:NAME in a recipe, is bound in the same way.
"""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from typing_extensions import is_protocol

from posttrain.errors import UserError, exit_call
from posttrain.known_code import KnownCode, remember
from posttrain.schemas import PARSING, REQUIRED, Option, Schema, checker, did_you_mean, record_class, record_of

Built = TypeVar("Built")


def bind(target: Callable[..., Built], options: Mapping[str, object], *, where: str) -> Built:
    arguments = arguments_for(Schema(target), options, where=where)
    try:
        return target(**arguments)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def arguments_for(schema: Schema, options: object, *, where: str) -> dict[str, Any]:
    return call_arguments(record_of(record_class(schema), options, where=where), where=where)


def call_arguments(record: Any, *, where: str) -> dict[str, Any]:
    """Arguments for the target of a record's schema; records within it become objects."""
    arguments: dict[str, Any] = {}
    for option in type(record).schema.own.values():
        value = getattr(record, option.name)
        if value is None and option.default is REQUIRED:
            raise UserError(f"{where}.{option.name} is missing; it has no default")
        arguments[option.name] = constructed_within(value, f"{where}.{option.name}")
    return arguments


def constructed_within(value: Any, where: str) -> Any:
    if isinstance(value, tuple):
        return tuple(constructed_within(item, f"{where}[{index}]") for index, item in enumerate(value))
    return constructed(value, f"{where}.") if hasattr(type(value), "schema") else value


def constructed(record: Any, before: str) -> Any:
    """The object of a record; `before` begins its messages, such as `rollout.`."""
    arguments = call_arguments(record, where=before.rstrip(":. "))
    try:
        return type(record).schema.target(**arguments)
    except UserError as error:
        raise UserError(f"{before}{error}") from None


# What a recipe names as FILE.py:NAME

OWN = {"algorithm": "function", "task": "class", "engine": "class"}
"""Sections that may name a user's object by `path: FILE.py:NAME`, and its kind."""
INSTALLED = {"site-packages", "dist-packages"}
"""Folders of pip, whose files change by version and not by an edit."""
EXAMPLE = {"algorithm": "my_algorithm", "task": "MyTask", "engine": "MyEngine"}
GIVEN = {"algorithm": ([], []), "task": (["renderer"], ["seed"]), "engine": (["policy"], [])}
"""Arguments other than options: by position, and by name."""


def is_own(section: str, content: object) -> bool:
    return section in OWN and isinstance(content, Mapping) and "path" in content and "name" not in content


def is_name_in_file(path: object) -> bool:
    file, _, name = path.rpartition(":") if isinstance(path, str) else ("", "", "")
    return file.endswith(".py") and name.isidentifier()


def own_schema(section: str, path: object) -> Schema:
    """The options of a user's function or class, named as FILE.py:NAME: all parameters but those of GIVEN."""
    noun = OWN[section]
    if not is_name_in_file(path):
        rows = "  For rows of a file give task.name = dataset as well." if section == "task" else ""
        form = f"FILE.py:{noun.upper()}, such as mine.py:{EXAMPLE[section]}"
        raise UserError(f"{section}.path = {path} is not {form}.{rows}")
    target = object_in_file(str(path), where=section, noun=noun)
    if not callable(target) or isinstance(target, type) != (noun == "class"):
        kind = "class" if isinstance(target, type) else type(target).__name__
        raise UserError(f"{section}: {path} is a {kind}, not a {noun}")
    leading = Option("path", str, path, f"Your {noun}, as FILE.py:{noun.upper()}.")
    first, given = GIVEN[section]
    try:
        made_by = next((each for each in getattr(target, "__mro__", ()) if "__init__" in vars(each)), object)
        if is_protocol(made_by):  # whose `__init__` binds any arguments and accepts none
            raise TypeError(f"it has no `__init__`, and that of {made_by.__name__} takes nothing; write one")
        signature = inspect.signature(target)
        schema = Schema(target, (leading,), frozenset((*list(signature.parameters)[: len(first)], *given)))
        checker(record_class(schema))
        for name in schema.own.keys() & {"name", "path"}:
            raise UserError(f"`{name}` chooses it in a recipe, so no option can have that name")
        signature.bind(*first, **dict.fromkeys((*given, *schema.own)))
    except (UserError, NameError, TypeError) as error:
        form = f"({', '.join([*first, *(['*'] if given else []), *given, '**options'])})"
        raise UserError(f"{section}: {path} cannot be called as {form}: {error}") from None
    return schema


def build_own(section: str, content: Mapping[str, object], *given: object, **named: object) -> object:
    """What a user's function or class returns for a section and the arguments of GIVEN."""
    schema = own_schema(section, content["path"])
    arguments = arguments_for(schema, content, where=section)
    try:
        return schema.target(*given, **named, **arguments)
    except UserError as error:
        raise UserError(f"{section}: {error}") from None
    except SystemExit as leave:
        raise UserError(f"{section}: {content['path']} calls {exit_call(leave)}") from leave


def object_in_file(path: str, *, where: str, noun: str = "function") -> object:
    """The object FILE.py:NAME, a `noun`; `where` is the section of the recipe that messages begin with."""
    file = path.rpartition(":")[0]
    return object_in(module_from(Path(file), where), path, f"{where}: {file} has no {noun}")


def object_in(module: ModuleType, path: str, lacks: str) -> object:
    """The object of a module that a path names, remembered as known code."""
    name = path.rpartition(":")[2]
    if not hasattr(module, name):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(f"{lacks} `{name}`.  {did_you_mean(name, known)}")
    remember([known_code(path)])
    return getattr(module, name)


def object_in_module(path: str, *, where: str) -> object:
    """The object package.module:NAME of an installed module, or one in the working folder."""
    place = path.rpartition(":")[0]
    look_in_working_folder()
    with importing(f"module {place}", where):
        module = importlib.import_module(place)
    return object_in(module, path, f"{where}: module {place} has no function")


@contextmanager
def importing(what: str, where: str) -> Iterator[None]:
    """Report what a user's code raised, or that it ended the program, during its import."""
    try:
        yield
    except SystemExit as leave:
        raise UserError(f"{where}: {what} cannot be imported: it calls {exit_call(leave)}") from leave
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and f"{what}.".startswith(f"module {error.name}.")
        remedy = "  Python looks in the folder you run in and in installed packages." if missing else ""
        raise UserError(f"{where}: {what} cannot be imported: {type(error).__name__}: {error}.{remedy}") from error


def look_in_working_folder() -> None:
    """Let Python also find modules in the working folder, after all other places, so they shadow nothing."""
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)


def module_from(file: Path, where: str) -> ModuleType:
    """Run a user's Python file as a module; it may import its neighbours, as a script may."""
    if not file.is_file():
        raise UserError(f"{where}: {file}: no such file. Paths are relative to the folder you run in.")
    # One module per file until it changes, under a name that shadows no other module.
    name = f"posttrain_file_of_user.{file.resolve()}@{digest_of(file)}"
    if name in sys.modules:
        return sys.modules[name]
    loader = UncachedLoader(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None, file
    module = importlib.util.module_from_spec(spec)
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    sys.modules[name] = module  # where dataclasses look for the module of a class
    try:
        with importing(str(file), where):
            loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class UncachedLoader(SourceFileLoader):
    """Runs a file's current code: Python compares compiled code only by whole seconds and size."""

    def path_stats(self, path: Any) -> Any:
        """Raise, so that compiled code is neither read nor written."""
        raise OSError(f"{path}: compiled again each time")


def digest_of(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""


# The files of a user's code


def code_files(path: str, *, where: str) -> list[tuple[str, Path]]:
    """The file of FILE.py:NAME or package.module:NAME, and its neighbours that it imports, by their names."""
    place, _, _ = path.rpartition(":")
    file = Path(place) if is_name_in_file(path) else module_file(place)
    if file is None or not file.is_file():
        raise UserError(f"{where}: {path}: no such file.  Paths are relative to the folder you run in.")
    return [(file.name, file), *sorted(imported_beside(file).items())]


def code_digest(file: Path) -> str:
    """The SHA-256 of a file of code and of its neighbours that it imports; empty for a missing file."""
    beside = sorted(imported_beside(file).items())
    listed = "".join(f"{name} {digest_of(each)}\n" for name, each in beside)
    return hashlib.sha256(f"{digest_of(file)}\n{listed}".encode()).hexdigest() if beside else digest_of(file)


def known_code(path: str) -> KnownCode:
    """FILE.py:NAME or package.module:NAME with the digest of all that its import runs; empty for a missing file."""
    place, _, name = path.rpartition(":")
    if place.endswith(".py"):
        return KnownCode(code_digest(Path(place)), name, path)
    parts = place.split(".")
    files = [module_file(".".join(parts[:count])) for count in range(1, len(parts) + 1)]
    digests = [code_digest(file) for file in files if file is not None]  # a folder without __init__.py has none
    whole = hashlib.sha256(" ".join(digests).encode()).hexdigest() if files[-1] is not None else ""
    return KnownCode(whole, name, path)


def module_file(place: str) -> Path | None:
    """The file of a module by its dotted name, or None.  `find_spec` of that name would import packages above it."""
    look_in_working_folder()
    first, *names = place.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return None
    for name in names:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{name}", spec.submodule_search_locations)
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin is not None else None


def imported_beside(file: Path) -> dict[str, Path]:
    """The files that a file of code imports, directly or not, by their paths from its folder.

    They are next to the file, next to its package or in the working folder; if the file uses `sys.path`, also one
    folder above and below.  Installed packages are not followed.
    """
    top = next((folder for folder in file.resolve().parents if not (folder / "__init__.py").is_file()), file.parent)
    if not INSTALLED.isdisjoint(top.parts):
        return {}
    roots, found, unread = list(dict.fromkeys([file.resolve().parent, top, Path.cwd()])), {}, [file.resolve()]
    while unread:
        for root, parts in imports_of(unread.pop(), roots):
            for each in module_files(root, parts):
                name = Path(os.path.relpath(each, file.resolve().parent)).as_posix()
                if each != file.resolve() and name not in found:
                    found[name] = each
                    unread.append(each)
    return found


def imports_of(file: Path, roots: Sequence[Path]) -> Iterator[tuple[Path, list[str]]]:
    """Every import in a file, as a folder and the names from there; none if the file does not parse."""
    try:
        source = file.read_bytes()
        with PARSING:
            statements = list(ast.walk(ast.parse(source)))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    if b"sys.path" in source:  # it may add the folder above, or one below
        below = (each for each in sorted(file.parent.iterdir()) if each.is_dir() and os.access(each, os.X_OK))
        roots = [*roots, file.parent.parent, *below]
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from ((root, alias.name.split(".")) for alias in statement.names for root in roots)
        elif isinstance(statement, ast.ImportFrom):
            names = statement.module.split(".") if statement.module else []
            folders = [file.parents[statement.level - 1]] if statement.level else roots
            yield from ((folder, [*names, alias.name]) for alias in statement.names for folder in folders)


def module_files(root: Path, names: Sequence[str]) -> Iterator[Path]:
    """The files in a folder that an import of dotted names runs: packages on the way, and the module."""
    if names[0] == "posttrain":
        return
    for count in range(1, len(names) + 1):
        place = root.joinpath(*names[:count])
        yield from (each for each in (place / "__init__.py", place.with_name(f"{place.name}.py")) if each.is_file())
