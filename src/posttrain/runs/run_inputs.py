"""What a run is made of beside its config, so that it is not resumed as another one.

    inputs.json    {"objects": {"task": {"is": "Sums (sums)", "sha256": ""}, "rewards[0]": ...},
                    "files": {"task.path": {"is": "rows.jsonl", "sha256": "9f86d0..."}}}

Objects are what a caller in Python brought; files are what the recipe names: see `named_inputs`.  An object's digest is
empty where its class is all that is known of it.  `code_digests` reads code.  Torch-free.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from posttrain.errors import RunError, UserError
from posttrain.options.model import ModelOptions

FILE = "inputs.json"
"""Its name in a run folder."""
MODEL = "model.path"


@dataclass(frozen=True, slots=True)
class RunInput:
    """One thing that a run is made of."""

    what: str
    """In words: the kind and name of an object, the path of a file."""
    digest: str = ""
    """SHA-256 of its content; empty where that cannot be had, or does not matter."""

    def differs(self, other: "RunInput") -> bool:
        """Whether the other is known to be another one."""
        known = self.digest != "" and other.digest != ""
        return self.what != other.what or (known and self.digest != other.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """All that a run is made of beside its config."""

    objects: Mapping[str, RunInput] = field(default_factory=dict)
    """By the argument of `posttrain.train`; rewards one by one."""
    files: Mapping[str, RunInput] = field(default_factory=dict)
    """By the option that names them."""
    recipe: str = ""
    """What the summary says that the config comes from; a run that has no checkpoint yet keeps it here."""
    changes: tuple[str, ...] = ()
    """What has become another since the run began, as it was told to whoever accepted it."""

    @property
    def notes(self) -> list[str]:
        """What to tell of it, in a line or none."""
        return [f"No longer as it was when the run began: {'; '.join(self.changes)}."] if self.changes else []

    def as_json(self) -> str:
        """The content of inputs.json."""
        content = {
            part: {name: {"is": each.what, "sha256": each.digest} for name, each in inputs.items()}
            for part, inputs in (("objects", self.objects), ("files", self.files))
        }
        changes = {"changes": list(self.changes)} if self.changes else {}
        recipe = {"recipe": self.recipe} if self.recipe else {}
        return json.dumps({**content, **recipe, **changes}, indent=2) + "\n"


def inputs_from_json(text: str) -> RunInputs:
    """What `as_json` wrote."""
    content = json.loads(text)
    read = {
        part: {name: RunInput(each["is"], each["sha256"]) for name, each in content[part].items()}
        for part in ("objects", "files")
    }
    return RunInputs(
        objects=read["objects"],
        files=read["files"],
        recipe=content.get("recipe", ""),
        changes=tuple(content.get("changes", ())),
    )


# Resuming


def inputs_in(file: Path) -> RunInputs:
    """What a run folder's inputs.json says.  Raises RunError where it is not as it was written."""
    try:
        return inputs_from_json(file.read_text(encoding="utf-8"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RunError(
            f"{file}: damaged: it does not say what the run was made of ({type(error).__name__}: {error})."
            "  Put it back as it was, or delete it: the run is then resumed without a look at what has changed."
        ) from error


def began_with(folder: Path) -> RunInputs:
    """What the run in a folder was made of; nothing is known of one of an earlier version."""
    file = folder / FILE
    return inputs_in(file) if file.is_file() else RunInputs()


def require_same_model(folder: Path, began: RunInput | None, now: RunInput | None) -> None:
    """Refuse a model that is gone from its place, and another one in a place that is named for it."""
    if began is None or now is None or not began.digest or ModelOptions(path=now.what).hub_name is not None:
        return
    here = f"resume {folder}: {MODEL} = {now.what}"
    if not Path(now.what).is_dir():
        says = f"{here}: no such folder.  If the model has moved, name its new place, and with the same files"
        says, file = f"{says} the run goes on:", folder / "config.yaml"
        raise UserError(
            f'{says} train(load_recipe("{file}", model={{"path": NEW}}, run={{"folder": "{folder}"}}), resume=True).',
            command=f"{says} --resume {folder} --{MODEL} NEW.",
        )
    if began.what != now.what and began.digest != now.digest:
        raise UserError(
            f"{here}: its files are not those that were in {began.what} when the run began, by their names, their sizes"
            " and the first and last MiB of each.  Name the folder where that model is now, with nothing added to it."
        )


def require_same_inputs(folder: Path, now: RunInputs, *, accept_changes: bool) -> RunInputs:
    """Refuse to resume a run with other inputs than its own, or note what is another where that is accepted.

    Returns the inputs with the run's changes.  A run of an earlier version has no record of what it was made of.
    """
    if not (folder / FILE).is_file():
        return now
    began = began_with(folder)
    lacking = {name: each for name, each in began.objects.items() if name not in now.objects}
    if lacking:
        listed = ", ".join(f"{name} = {each.what}" for name, each in lacking.items())
        arguments = ", ".join(f"{name}=..." for name in dict.fromkeys(name.partition("[")[0] for name in began.objects))
        raise UserError(
            f"resume {folder}: the run was made with objects that this resume lacks: {listed}."
            f"  Resume it from Python: posttrain.train(config, {arguments}, resume=True)."
        )
    require_same_model(folder, began.files.get(MODEL), now.files.get(MODEL))
    found = [*other_objects(began.objects, now.objects), *changed_files(began.files, now.files)]
    if found and not accept_changes:
        says = (
            f"resume {folder}: {'; '.join(found)}.  A resumed run keeps what it was made of: put that back as it was,"
        )
        says += " start another run, or go on with what there is now"
        raise UserError(
            f"{says}: train(config, resume=True, accept_changes=True).", command=f"{says}: --accept-changes."
        )
    noted = [*moved_model(began.files, now.files), *unknown_files(began.files, now.files), *found]
    return replace(
        now, recipe=began.recipe, changes=(*began.changes, *(each for each in noted if each not in began.changes))
    )


def other_objects(began: Mapping[str, RunInput], now: Mapping[str, RunInput]) -> Iterator[str]:
    """What to tell of objects that are not the run's own."""
    for name, each in now.items():
        if name not in began:
            yield f"{name} = {each.what} is given, and the run was made without"
        elif each.what != began[name].what:
            yield f"{name} = {each.what} is given, and the run was made with {began[name].what}"
        elif each.differs(began[name]):
            yield f"{name} = {each.what} is not as it was when the run began"


def moved_model(began: Mapping[str, RunInput], now: Mapping[str, RunInput]) -> Iterator[str]:
    """What to note of a model that is in another place than it was."""
    before, after = began.get(MODEL), now.get(MODEL)
    if before is not None and after is not None and before.what != after.what and before.digest == after.digest != "":
        yield f"{MODEL} = {after.what}, the same files that were in {before.what}"


def changed_files(began: Mapping[str, RunInput], now: Mapping[str, RunInput]) -> Iterator[str]:
    """What to tell of files that have changed; of other paths the config itself tells."""
    for name in began.keys() & now.keys():
        if began[name].what == now[name].what and now[name].differs(began[name]):
            yield f"{name} = {now[name].what} has changed since the run began"


def unknown_files(began: Mapping[str, RunInput], now: Mapping[str, RunInput]) -> Iterator[str]:
    """What to note of files of which nobody can tell whether they have changed."""
    for name in sorted(began.keys() & now.keys() - {MODEL}):
        if began[name].what == now[name].what and "" in (began[name].digest, now[name].digest):
            yield f"{name} = {now[name].what}, of which the run kept nothing to compare it with"


# Digests


def sha256_of(text: str) -> str:
    """The SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def rows_input(rows: Iterable[object]) -> RunInput:
    """Rows by their content; of a value that is neither known to JSON nor an array nor bytes its class."""
    digest, listed = hashlib.sha256(), list(rows)
    for row in listed:
        text = json.dumps(dict(row) if isinstance(row, Mapping) else row, default=content_of)
        digest.update(text.encode("utf-8", "surrogatepass"))
    return RunInput(f"{len(listed)} rows", digest.hexdigest())


def content_of(value: Any) -> object:
    """What tells a value that JSON does not know from others of its kind."""
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


def class_name(value: object) -> str:
    """The name of an object's class, without its module: that of a program depends on how it is started."""
    return type(value).__qualname__
