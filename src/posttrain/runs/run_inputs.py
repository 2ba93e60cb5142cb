"""What a run is made of besides its config, so that it is not resumed as another one.

    inputs.json    {"objects": {"task": {"is": "Sums (sums)", "sha256": ""}, "rewards[0]": ...},
                    "files": {"task.path": {"is": "rows.jsonl", "sha256": "9f86d0..."}}, "format": 2}

Objects are what a caller in Python brought, by the argument of `posttrain.train`: see `input_digests`.  Files are what
the recipe names, by option: see `named_inputs`.  A digest is empty where nothing more is known.  Torch-free.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from posttrain.errors import RunError, UserError
from posttrain.options.model import ModelOptions

FILE = "inputs.json"
"""Its name in a run folder."""
MODEL = "model.path"
FORMAT = 2
"""Since then code is told apart by its source; digests of code from before say nothing."""
CODE = ("rewards[", "algorithm")
"""How objects are called whose digests are of code."""


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
        return json.dumps({**content, **recipe, **changes, "format": FORMAT}, indent=2) + "\n"


def inputs_from_json(text: str) -> RunInputs:
    """What `as_json` wrote, also that of an earlier version."""
    content = json.loads(text)
    objects, files = (
        {name: RunInput(each["is"], each["sha256"]) for name, each in content[part].items()}
        for part in ("objects", "files")
    )
    if content.get("format", 1) < FORMAT:
        objects |= {name: RunInput(each.what) for name, each in objects.items() if name.startswith(CODE)}
    changes = tuple(content.get("changes", ()))
    return RunInputs(objects=objects, files=files, recipe=content.get("recipe", ""), changes=changes)


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
    found = changed_inputs(began, now)
    if found and not accept_changes:
        says = (
            f"resume {folder}: {'; '.join(found)}.  A resumed run keeps what it was made of: put that back as it was,"
        )
        says += " start another run, or go on with what there is now"
        raise UserError(
            f"{says}: train(config, resume=True, accept_changes=True).", command=f"{says}: --accept-changes."
        )
    noted = [*remarks(began, now), *found]
    return replace(
        now, recipe=began.recipe, changes=(*began.changes, *(each for each in noted if each not in began.changes))
    )


def changed_inputs(began: RunInputs, now: RunInputs) -> list[str]:
    """What is not as it was when the run began; of other paths the config itself tells."""
    found = []
    for name, each in now.objects.items():
        before = began.objects.get(name)
        if before is None:
            found.append(f"{name} = {each.what} is given, and the run was made without")
        elif each.what != before.what:
            found.append(f"{name} = {each.what} is given, and the run was made with {before.what}")
        elif each.differs(before):
            found.append(f"{name} = {each.what} is not as it was when the run began")
    for name, before, after in in_both(began.files, now.files):
        if before.what == after.what and after.differs(before):
            found.append(f"{name} = {after.what} has changed since the run began")
    return found


def remarks(began: RunInputs, now: RunInputs) -> Iterator[str]:
    """What to note of inputs: a model in another place, and what the run kept nothing of to compare it with."""
    for name, before, after in in_both(began.files, now.files):
        if before.what != after.what and name == MODEL and before.digest == after.digest != "":
            yield f"{MODEL} = {after.what}, the same files that were in {before.what}"
        elif before.what == after.what and name != MODEL and "" in (before.digest, after.digest):
            yield f"{name} = {after.what}, of which the run kept nothing to compare it with"
    for name, before, after in in_both(began.objects, now.objects):
        if name.startswith(CODE) and before.what == after.what and not before.digest and after.digest:
            yield f"{name} = {after.what}, of which the run kept nothing to compare it with"


def in_both(began: Mapping[str, RunInput], now: Mapping[str, RunInput]) -> Iterator[tuple[str, RunInput, RunInput]]:
    """Inputs of one name, as they were and as they are."""
    return ((name, began[name], now[name]) for name in sorted(began.keys() & now.keys()))


def sha256_of(text: str) -> str:
    """The SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def class_name(value: object) -> str:
    """The name of an object's class, without its module: that of a program depends on how it is started."""
    return type(value).__qualname__
