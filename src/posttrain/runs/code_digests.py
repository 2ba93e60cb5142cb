"""Functions, and objects made of functions and settings, by their source, so that a changed one is known.  Torch-free.

What code reads by name is followed: the functions, classes and modules of the user's, and their plain settings.  Names
are followed and not whole files, for a file may also hold what starts the run, which may change.
"""

import dis
import functools
import inspect
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from posttrain.binding import INSTALLED, code_digest
from posttrain.runs.run_inputs import RunInput, class_name, sha256_of
from posttrain.schemas import PARSING

NO_SOURCE = "\0"
"""Stands in a description where a function's source cannot be had."""
STANDARD = Path(sysconfig.get_paths()["stdlib"]).resolve()
Inner = Callable[[object], str]
"""The description of something within what is described."""


def code_input(what: str, value: object) -> RunInput:
    """A function, or an object made of functions and settings, by their source and by the settings in it."""
    text = description(value, frozenset(), set())
    return RunInput(what, "" if NO_SOURCE in text else sha256_of(text))


def description(value: object, above: frozenset[int], told: set[int]) -> str:
    """The functions and settings that an object is made of, as text that is the same in another process.

    `told` are the functions and classes that have been described: each is once.
    """
    if id(value) in above:
        return "..."
    inner = functools.partial(description, above=above | {id(value)}, told=told)
    match value:
        case None | bool() | int() | float() | str():
            return repr(value)
        case re.Pattern():
            return f"{value.pattern!r} {value.flags}"
        case functools.partial():
            return f"{inner(value.func)}({inner(value.args)}, {inner(value.keywords)})"
        case Mapping():
            return f"{{{', '.join(f'{inner(key)}: {inner(item)}' for key, item in value.items())}}}"
        case list() | tuple():
            return f"[{', '.join(map(inner, value))}]"
        case set() | frozenset():
            return f"{{{', '.join(sorted(map(inner, value)))}}}"
        case MethodType():
            own = inner(type(value.__self__)) if is_users(type(value.__self__)) else ""
            return f"{class_name(value.__self__)}.{inner(value.__func__)}{own}"
        case FunctionType() | type():
            if id(value) in told:
                return value.__qualname__
            told.add(id(value))
            return class_text(value, inner) if isinstance(value, type) else function_text(value, inner)
    if callable(value) and hasattr(value, "__wrapped__"):  # by functools.cache, say
        return f"{class_name(value)}({inner(value.__wrapped__)})"
    if is_dataclass(value):
        content = [f"{each.name}={inner(getattr(value, each.name))}" for each in fields(value)]
        return f"{class_name(value)}{content}{inner(type(value)) if is_users(type(value)) else ''}"
    return f"{class_name(value)} {inner(type(value))}"


def function_text(function: FunctionType, inner: Inner) -> str:
    """A function's source, what it has from around it, and what it reads by name."""
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None and not is_users(function):
        return inner(wrapped)
    enclosed = [inner(item) for item in settings_in(function.__closure__ or ())]
    text = source_text(function) or NO_SOURCE
    return f"{function.__qualname__}{enclosed} {text}{inner(wrapped) if wrapped else ''}{read_text([function], inner)}"


def class_text(kind: type, inner: Inner) -> str:
    """A class's source, what its methods read by name, and the classes of the user's that it is made from."""
    methods = [getattr(each, "__func__", getattr(each, "fget", each)) for each in vars(kind).values()]
    bases = [inner(each) for each in kind.__bases__ if is_users(each)]
    functions = [inspect.unwrap(each) for each in methods if isinstance(each, FunctionType)]
    return f"{source_text(kind)}{bases or ''}{read_text(functions, inner)}"


def settings_in(closure: Sequence[CellType]) -> Iterator[object]:
    """What a function has from around it, but for what it may fill as it runs, such as a list."""
    for cell in closure:
        try:
            content = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if not isinstance(content, list | dict | set):
            yield content


# What code reads by name


def read_text(functions: Iterable[FunctionType], inner: Inner) -> str:
    """What functions of the user's read by name from their modules: settings that do not change, and code."""
    found = []
    for function in (each for each in functions if is_users(each)):
        read = sorted(dict(read_by_name(function)).items())
        found += [f"{name}={text}" for name, value in read if (text := value_text(value, inner))]
    return str(found or "")


def value_text(value: Any, inner: Inner) -> str:
    """A value of a module; nothing of what is installed, and of what may change as it runs no more than its class."""
    match value:
        case bool() | int() | float() | str() | re.Pattern() | tuple() | frozenset() | functools.partial():
            return inner(value)
        case ModuleType():
            return code_digest(Path(str(value.__file__))) if is_users_module(value.__name__) else ""
        case FunctionType() | type() | MethodType():
            return inner(value) if is_users(value) else ""
    if callable(value) and hasattr(value, "__wrapped__"):
        return inner(value) if is_users(value) else ""
    return inner(type(value)) if is_users(type(value)) else ""


def read_by_name(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function reads by name and does not set, by names such as `helper` or `module.helper`."""
    read: set[tuple[str, ...]] = set()
    kept: set[str] = set()
    codes = [function.__code__]
    for code in codes:  # which grows by those of inner functions
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        path: tuple[str, ...] = ()
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and path:
                path = (*path, str(instruction.argval))
                continue
            read |= {path} if path else set()
            path = (str(instruction.argval),) if instruction.opname == "LOAD_GLOBAL" else ()
            kept |= {str(instruction.argval)} if instruction.opname == "STORE_GLOBAL" else set()
    for first, *below in read:
        value = function.__globals__.get(first)
        if first in kept or first.startswith("__"):
            continue
        name = first
        while isinstance(value, ModuleType) and below:
            name, value = f"{name}.{below[0]}", getattr(value, below.pop(0), None)
        yield name, value


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


def source_text(code: type | FunctionType) -> str:
    """The source of a function or class; for ours its name, so that a new version of the package goes on with a run."""
    if code.__module__.partition(".")[0] == "posttrain":
        return code.__qualname__
    try:
        with PARSING:
            return inspect.getsource(code.__code__ if isinstance(code, FunctionType) else code)
    except (OSError, TypeError):  # typed at a prompt, or compiled
        return ""
