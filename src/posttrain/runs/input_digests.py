"""What tells the rows and functions of a run from others: rows by their content, code by its source.  Torch-free.

Names that code reads are followed, to the user's functions and classes and to plain settings.  A module that it reads
counts by its file.  The file that a function is in does not count: it may also start the run, and that part may change.
"""

import functools
import hashlib
import inspect
import json
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from posttrain.binding import INSTALLED, code_digest
from posttrain.runs.run_inputs import RunInput, class_name, sha256_of
from posttrain.schemas import PARSING

STANDARD = Path(sysconfig.get_paths()["stdlib"]).resolve()
PLAIN = (type(None), bool, int, float, str, bytes)
SETTINGS = (*PLAIN, re.Pattern, tuple, frozenset, functools.partial)
"""Values of a module that count whole; of others, which may change as the run goes on, only the class does."""


class NoSourceError(Exception):
    """The source of a function is not known, such as one that was typed at a prompt."""


def rows_input(rows: Iterable[object]) -> RunInput:
    """Rows by their content.  Values that JSON does not know count by their class, apart from arrays and bytes."""
    digest, listed = hashlib.sha256(), list(rows)
    for row in listed:
        text = json.dumps(dict(row) if isinstance(row, Mapping) else row, default=content_of)
        digest.update(text.encode("utf-8", "surrogatepass"))
    return RunInput(f"{len(listed)} rows", digest.hexdigest())


def content_of(value: Any) -> object:
    """What tells a value that JSON does not know from others of its class."""
    if isinstance(value, bytes | bytearray):
        return f"{class_name(value)} {hashlib.sha256(value).hexdigest()}"
    if hasattr(value, "detach") and hasattr(value, "numpy"):  # a tensor
        plain = value.detach().cpu().to_dense()
        return f"{class_name(value)} {value.dtype} {[*value.shape]} {sha256_of(repr(plain.tolist()))}"
    if not all(hasattr(value, name) for name in ("dtype", "shape", "tobytes", "tolist")):
        return class_name(value)
    if value.dtype.hasobject:  # whose bytes are addresses
        return [class_name(value), [*value.shape], value.tolist()]
    return f"{class_name(value)} {value.dtype} {[*value.shape]} {hashlib.sha256(value.tobytes()).hexdigest()}"


def code_input(what: str, value: object) -> RunInput:
    """A function, or an object made of functions and settings, by the source and the settings that it is made of."""
    texts: list[str] = []
    seen: list[object] = []
    unread = [value]
    try:
        while unread:
            each = unread.pop(0)
            if not any(each is other for other in seen):
                text, parts = canonical_value(each)
                texts.append(text)
                unread += parts
                seen += [] if isinstance(each, PLAIN) else [each]
    except NoSourceError:
        return RunInput(what)
    return RunInput(what, sha256_of("\n".join(texts)))


def canonical_value(value: Any) -> tuple[str, list[object]]:
    """A value as text that is the same in another process, and what it is made of."""
    match value:
        case None | bool() | int() | float() | str() | bytes():
            return repr(value), []
        case re.Pattern():
            return f"{value.pattern!r} {value.flags}", []
        case functools.partial():
            return "partial", [value.func, value.args, value.keywords]
        case Mapping():
            return f"mapping {len(value)}", [*value.keys(), *value.values()]
        case list() | tuple():
            return f"list {len(value)}", [*value]
        case set() | frozenset():
            return f"set {sorted(repr(each) for each in value if isinstance(each, PLAIN))}", []
        case MethodType():
            return class_name(value.__self__), [value.__func__, type(value.__self__)]
        case ModuleType():
            return code_digest(Path(str(value.__file__))), []
        case FunctionType():
            return function_source(value)
        case type():
            return class_source(value)
    if callable(value) and hasattr(value, "__wrapped__"):  # by functools.cache, say
        return class_name(value), [value.__wrapped__]
    names = [each.name for each in fields(value)] if is_dataclass(value) else []
    return f"{class_name(value)} {names}", [type(value), *(getattr(value, name) for name in names)]


def function_source(function: FunctionType) -> tuple[str, list[object]]:
    """A function by its source, what it has from around it and what it reads by name."""
    wrapped = [function.__wrapped__] if hasattr(function, "__wrapped__") else []
    if not is_users(function):
        return ("", wrapped) if wrapped else (code_text(function), [])
    names, values = names_read([function])
    return f"{names} {code_text(function)}", [*settings_in(function.__closure__ or ()), *wrapped, *values]


def class_source(kind: type) -> tuple[str, list[object]]:
    """A class by its source, the classes that it is made from and what its methods read by name."""
    if not is_users(kind):
        return kind.__qualname__, []
    methods = [getattr(each, "__func__", getattr(each, "fget", each)) for each in vars(kind).values()]
    names, values = names_read([inspect.unwrap(each) for each in methods if isinstance(each, FunctionType)])
    return f"{names} {code_text(kind)}", [*(each for each in kind.__bases__ if is_users(each)), *values]


def settings_in(closure: Sequence[CellType]) -> Iterator[object]:
    """What a function has from around it, apart from what it may fill as it runs, such as a list."""
    for cell in closure:
        try:
            content = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if not isinstance(content, list | dict | set):
            yield content


def names_read(functions: Iterable[FunctionType]) -> tuple[list[str], list[object]]:
    """The names of their modules that functions of the user's read and do not set, and what counts of each."""
    found: dict[str, object] = {}
    for function in (each for each in functions if is_users(each)):
        stated = re.findall(r"^\s*global (.+)$", code_text(function), re.MULTILINE)
        set_here = {name.strip() for names in stated for name in names.split(",")}
        for name in referenced_names(function.__code__) - set_here:
            value = function.__globals__.get(name)
            if value is None or name.startswith("__"):
                continue
            if isinstance(value, SETTINGS):
                found[name] = value
            elif isinstance(value, ModuleType):
                found |= {name: value} if is_users_module(value.__name__) else {}
            else:
                code = value if callable(value) and hasattr(value, "__module__") else type(value)
                found |= {name: code} if is_users(code) else {}
    return sorted(found), [found[name] for name in sorted(found)]


def referenced_names(code: CodeType) -> set[str]:
    """All names that code and the functions in it refer to, attributes too."""
    return {*code.co_names}.union(*(referenced_names(each) for each in code.co_consts if isinstance(each, CodeType)))


def is_users(code: Any) -> bool:
    """Whether a function or class is of a module of the user's; a wrapped function says the module that it wraps."""
    return is_users_module(str(code.__globals__.get("__name__") if isinstance(code, FunctionType) else code.__module__))


def is_users_module(name: str) -> bool:
    """Whether a module is neither this package's, nor installed, nor Python's own."""
    if name == "__main__":
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or name.partition(".")[0] == "posttrain":
        return False
    folders = Path(file).resolve().parents
    return STANDARD not in folders and INSTALLED.isdisjoint(part for folder in folders for part in folder.parts)


def code_text(code: type | FunctionType) -> str:
    """The source of a function or class; of ours its name, so that a new version of the package resumes a run."""
    if code.__module__.partition(".")[0] == "posttrain":
        return code.__qualname__
    try:
        with PARSING:
            return inspect.getsource(code.__code__ if isinstance(code, FunctionType) else code)
    except (OSError, TypeError) as error:
        if isinstance(code, type):
            return code.__qualname__
        raise NoSourceError from error
