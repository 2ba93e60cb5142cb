"""Inputs of a run besides its config; a resume compares them with the run's first inputs.  Torch-free.

    inputs.json    {"objects": {"task": {"is": "Sums (sums)", "sha256": ""}, "rewards[0]": ...},
                    "files": {"task.path": {"is": "rows.jsonl", "sha256": "9f86d0..."}}, "format": 3}

Objects come from a caller in Python: see `code_input`.  Files are named by the recipe: see `named_inputs`.
"""

import functools
import hashlib
import inspect
import json
import re
import sys
import sysconfig
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from posttrain.binding import INSTALLED, code_digest
from posttrain.errors import RunError, UserError
from posttrain.options.model import ModelOptions
from posttrain.schemas import PARSING

FILE = "inputs.json"
MODEL = "model.path"
FORMAT = 3
"""Earlier formats computed digests of code in other ways: they are not compared."""
CODE = ("rewards[", "algorithm", "task", "engine", "environment", "tools[")
"""Prefixes of objects whose digests are of code."""
STANDARD = Path(sysconfig.get_paths()["stdlib"]).resolve()
PLAIN = (type(None), bool, int, float, str, bytes)
SETTINGS = (*PLAIN, re.Pattern, tuple, frozenset)
"""Globals of these types are compared by value; other objects may change during a run, so only their class is
compared."""


@dataclass(frozen=True, slots=True)
class RunInput:
    """One object, or one file."""

    what: str
    """The kind and name of an object, the path of a file."""
    digest: str = ""
    """SHA-256 of its content; empty if it is unknown or does not matter."""

    def differs(self, other: "RunInput") -> bool:
        known = self.digest != "" and other.digest != ""
        return self.what != other.what or (known and self.digest != other.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """All inputs of a run besides its config."""

    objects: Mapping[str, RunInput] = field(default_factory=dict)
    """Objects by their argument of `posttrain.train`; rewards one by one."""
    files: Mapping[str, RunInput] = field(default_factory=dict)
    """Files by the option that names them."""
    recipe: str = ""
    """Source of the config, for the summary; stored here until there is a checkpoint."""
    changes: tuple[str, ...] = ()
    """Changes since the start of the run that the user accepted."""

    @property
    def notes(self) -> list[str]:
        return [f"Changed since the run began: {'; '.join(self.changes)}."] if self.changes else []

    def as_json(self) -> str:
        content: dict[str, object] = {
            part: {name: {"is": each.what, "sha256": each.digest} for name, each in inputs.items()}
            for part, inputs in (("objects", self.objects), ("files", self.files))
        }
        more = {"recipe": self.recipe, "changes": list(self.changes)}
        content |= {name: value for name, value in more.items() if value}
        return json.dumps({**content, "format": FORMAT}, indent=2) + "\n"


def began_with(folder: Path) -> RunInputs:
    """The inputs that a run started with; unknown for runs of early versions.  Raises RunError for damage."""
    file = folder / FILE
    if not file.is_file():
        return RunInputs()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        objects, files = (
            {name: RunInput(each["is"], each["sha256"]) for name, each in content[part].items()}
            for part in ("objects", "files")
        )
        if content.get("format", 1) < FORMAT:
            objects |= {name: RunInput(each.what) for name, each in objects.items() if name.startswith(CODE)}
        changes = tuple(content.get("changes", ()))
        return RunInputs(objects=objects, files=files, recipe=content.get("recipe", ""), changes=changes)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        says = f"{file}: damaged: the inputs of the run cannot be read ({type(error).__name__}: {error})"
        raise RunError(f"{says}.  Restore the file, or delete it to resume without a comparison.") from error


def require_same_inputs(folder: Path, now: RunInputs, *, accept_changes: bool) -> RunInputs:
    """Reject a resume with changed inputs, or record the changes if they are accepted.

    Returns the inputs with the run's changes.  A run of an early version does not have an inputs.json to compare with.
    """
    if not (folder / FILE).is_file():
        return now
    began = began_with(folder)
    lacking = [f"{name} = {each.what}" for name, each in began.objects.items() if name not in now.objects]
    if lacking:
        arguments = ", ".join(f"{name}=..." for name in dict.fromkeys(name.partition("[")[0] for name in began.objects))
        raise UserError(
            f"resume {folder}: the run was made with objects that this resume lacks: {', '.join(lacking)}."
            f"  Resume it from Python: posttrain.train(config, {arguments}, resume=True)."
        )
    require_same_model(folder, began.files.get(MODEL), now.files.get(MODEL))
    changed, noted = differences(began, now)
    if changed and not accept_changes:
        why = f"resume {folder}: {'; '.join(changed)}.  Undo the change, start another run, or accept it"
        raise UserError(f"{why}: train(config, resume=True, accept_changes=True).", command=f"{why}: --accept-changes.")
    return replace(now, recipe=began.recipe, changes=tuple(dict.fromkeys([*began.changes, *noted, *changed])))


def require_same_model(folder: Path, began: RunInput | None, now: RunInput | None) -> None:
    """Reject a missing model folder, and a moved one with different files."""
    if began is None or now is None or not began.digest or ModelOptions(path=now.what).hub_name is not None:
        return
    here = f"resume {folder}: {MODEL} = {now.what}"
    if not Path(now.what).is_dir():
        says = f"{here}: no such folder.  If the model has moved, name its new path"
        raise UserError(
            f'{says}: train(load_recipe("{folder}/config.yaml", model={{"path": NEW}}, run={{"folder": "{folder}"}}),'
            " resume=True).",
            command=f"{says}: --resume {folder} --{MODEL} NEW.",
        )
    if began.what != now.what and began.digest != now.digest:
        raise UserError(
            f"{here}: its files differ from those in {began.what} when the run began, by name, size or the first and"
            " last MiB.  Name the folder that holds the same files."
        )


def differences(began: RunInputs, now: RunInputs) -> tuple[list[str], list[str]]:
    """Changes since the start of the run, and notes: a moved model, and inputs that cannot be compared.

    Other paths are in the config, which is compared elsewhere.
    """
    changed, noted = [], []
    for name, each in now.objects.items():
        before = began.objects.get(name, RunInput("nothing"))
        if each.what != before.what:
            changed.append(f"{name} = {each.what} is given, but the run was made with {before.what}")
        elif each.differs(before):
            changed.append(f"{name} = {each.what} has changed since the run began")
        elif name.startswith(CODE) and (before.digest == "") != (each.digest == ""):
            noted.append(f"{name} = {each.what} cannot be compared with what the run began with")
    for name in sorted(began.files.keys() & now.files.keys()):
        before, each = began.files[name], now.files[name]
        if before.what != each.what and name == MODEL and before.digest == each.digest != "":
            noted.append(f"{MODEL} = {each.what}, the same files that were in {before.what}")
        elif before.what == each.what and each.differs(before):
            changed.append(f"{name} = {each.what} has changed since the run began")
        elif before.what == each.what and name != MODEL and "" in (before.digest, each.digest):
            noted.append(f"{name} = {each.what} cannot be compared with what the run began with")
    return changed, noted


def sha256_of(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def class_name(value: object) -> str:
    """The name of an object's class, without its module, which depends on how a program is started."""
    return type(value).__qualname__


class NoSourceError(Exception):
    """The source of a function is unknown, for example because it was typed at a prompt."""


def rows_input(rows: Iterable[object]) -> RunInput:
    """Rows by their content.  Values that JSON cannot hold are compared by class, except arrays and bytes."""
    digest, listed = hashlib.sha256(), list(rows)
    for row in listed:
        text = json.dumps(dict(row) if isinstance(row, Mapping) else row, default=content_of)
        digest.update(text.encode("utf-8", "surrogatepass"))
    return RunInput(f"{len(listed)} rows", digest.hexdigest())


def content_of(value: Any) -> object:
    """The content of a value that JSON cannot hold: the data of bytes, arrays and tensors, else the class name."""
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
    """A function, a class, or an object of functions and settings, identified by its code and settings.

    Code of a user's module is identified by the module's file and the neighbouring files that it imports.  The file of
    `__main__` also starts the run and may change, so code there is identified by its own source and by what it reads by
    name.  Other code is identified by its name.  The digest is empty if a function's source is unknown.
    """
    texts: list[str] = []
    seen: list[object] = []
    unread = [value]
    try:
        while unread:
            each = unread.pop(0)
            if not any(each is other for other in seen):
                text, parts = text_and_parts(each)
                texts.append(text)
                unread += parts
                seen += [] if isinstance(each, PLAIN) else [each]
    except NoSourceError:
        return RunInput(what)
    return RunInput(what, sha256_of("\n".join(texts)))


def text_and_parts(value: Any) -> tuple[str, list[Any]]:
    """A value as text that is the same in another process, and the values that it contains."""
    wrapped = [value.__wrapped__] if callable(value) and hasattr(value, "__wrapped__") else []
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
            return f"{value.__name__} {module_digest(value)}", []
        case FunctionType():
            text, parts = code_text(value, value.__globals__.get("__name__") or value.__module__)
            closure = [each.cell_contents for each in value.__closure__ or () if each != CellType()]
            filled = (list, dict, set)  # a function may fill these as it runs
            return text, [*(each for each in closure if not isinstance(each, filled)), *wrapped, *parts]
        case type():
            return code_text(value, value.__module__)
    names = [each.name for each in fields(value)] if is_dataclass(value) else []
    return f"{class_name(value)} {names}", [type(value), *(getattr(value, name) for name in names), *wrapped]


def code_text(code: FunctionType | type, module_name: object) -> tuple[str, list[Any]]:
    """What identifies a function or class: its name and its module's file, or its source and the names it reads."""
    module = sys.modules.get(str(module_name))
    if module is not None and module_name != "__main__" and getattr(module, "__file__", None):
        return f"{code.__qualname__} {module_digest(module)}", []
    function = code if isinstance(code, FunctionType) else None
    try:
        with PARSING:
            source = inspect.getsource(function.__code__ if function else code)
            compiled = function.__code__ if function else compile(textwrap.dedent(source), "class", "exec")
    except (OSError, TypeError, SyntaxError) as error:
        if function and module_name == "__main__":
            raise NoSourceError from error
        return code.__qualname__, []
    assigned = re.findall(r"\w+", " ".join(re.findall(r"^\s*global (.+)$", source, re.MULTILINE)))
    scope = function.__globals__ if function else vars(module or sys)
    read = [scope[name] for name in sorted(names_in(compiled) & scope.keys() - {*assigned})]
    kept = (*SETTINGS, ModuleType)
    return source, [each if callable(each) or isinstance(each, kept) else type(each) for each in read]


def names_in(code: CodeType) -> set[str]:
    """All names that code and its nested functions refer to, including attributes."""
    return {*code.co_names}.union(*(names_in(each) for each in code.co_consts if isinstance(each, CodeType)))


def module_digest(module: ModuleType) -> str:
    """The digest of a user's module and of neighbouring files that it imports; empty for ours and installed ones."""
    if module.__name__.partition(".")[0] == "posttrain" or not getattr(module, "__file__", None):
        return ""
    file = Path(str(module.__file__)).resolve()
    is_users = STANDARD not in file.parents and INSTALLED.isdisjoint(file.parts)
    return code_digest(file) if is_users else ""
