"""The files that a recipe names, models, rows and code, each with a digest of its content.  Torch-free.

A file that cannot be read has no digest, and is an error: it could become anything unnoticed.  The one exception is a
data set of the hub while the hub does not answer.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from posttrain.binding import code_files, digest_of
from posttrain.config.kinds import AnyConfig
from posttrain.config.sections import CollectConfig, Config, IrlConfig
from posttrain.errors import UserError
from posttrain.models.loading.folder_kinds import model_digest
from posttrain.options.collect import LlmJudgeOptions
from posttrain.options.dataset import BUNDLED_PROGRAMS, DatasetOptions
from posttrain.options.model import ModelOptions
from posttrain.options.reward import RewardOptions
from posttrain.options.row_source import RowSourceOptions
from posttrain.runs.input_digests import rows_input
from posttrain.runs.run_inputs import MODEL, RunInput, RunInputs, began_with, changed_inputs
from posttrain.tasks.row_files.generator_rows import generator_digest
from posttrain.tasks.row_files.rows import is_on_hub, rows_digest

Rows = Iterable[object]
REPLACED = {
    "rows": ("task.path", "task.sources"),
    "held_out_rows": ("task.held_out_path",),
    "task": ("task.",),
    "engine": ("engine.",),
    "policy": ("model.path", "model.chat_template"),
    "algorithm": ("algorithm.path",),
}
"""Object of a caller -> how the options begin that it takes the place of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedInput:
    """Something outside the recipe that an option names."""

    option: str
    kind: Literal["code", "file", "rows", "generator", "model"]
    path: str
    rows: RowSourceOptions | None = None
    model: ModelOptions | None = None


def named_options(config: AnyConfig) -> Iterator[NamedInput]:
    """Every option that names a file or a folder."""
    if isinstance(config, IrlConfig):
        return
    if isinstance(config.task, DatasetOptions):
        yield from rows_of_task(config.task)
    elif isinstance(config.task, Mapping):
        yield NamedInput(option="task.path", kind="code", path=str(config.task["path"]))
    if isinstance(engine := getattr(config, "engine", None), Mapping):
        yield NamedInput(option="engine.path", kind="code", path=str(engine["path"]))
    if isinstance(config.model, ModelOptions):
        yield from files_of_model(config.model)
    for index, reward in enumerate(getattr(config, "rewards", ())):
        yield from files_of_reward(f"rewards[{index}]", reward)
    if isinstance(config, CollectConfig) and isinstance(judge := config.judge, LlmJudgeOptions) and judge.principles:
        yield NamedInput(option="judge.principles", kind="file", path=judge.principles)
    if isinstance(config, Config):
        yield from files_of_algorithm(config)
        if config.behaviours.file:
            yield NamedInput(option="behaviours.file", kind="file", path=config.behaviours.file)


def files_of_algorithm(config: Config) -> Iterator[NamedInput]:
    """The algorithm of the user's, and the models that it names."""
    if path := config.algorithm.get("path"):
        yield NamedInput(option="algorithm.path", kind="code", path=str(path))
    for part, name in (("teacher", "model"), ("critic", "path")):
        options = config.algorithm.get(part)
        if isinstance(options, Mapping) and options.get(name):
            yield model_at(f"algorithm.{part}.{name}", str(options[name]))
    if config.reference.path:
        yield model_at("reference.path", config.reference.path)


def files_of_reward(where: str, reward: RewardOptions) -> Iterator[NamedInput]:
    """The code or the models of an item of a recipe's `rewards`."""
    if reward.path:
        yield NamedInput(option=f"{where}.path", kind="code", path=reward.path)
    if reward.model:
        yield model_at(f"{where}.model", reward.model)
    for place, each in enumerate(reward.ensemble):
        yield model_at(f"{where}.ensemble[{place}]", each)
    if reward.chat_template:
        yield NamedInput(option=f"{where}.chat_template", kind="file", path=reward.chat_template)


def files_of_model(model: ModelOptions) -> Iterator[NamedInput]:
    """The model that is trained, and its chat template."""
    yield NamedInput(option=MODEL, kind="model", path=model.path, model=model)
    if model.chat_template:
        yield NamedInput(option="model.chat_template", kind="file", path=model.chat_template)


def model_at(option: str, path: str) -> NamedInput:
    """Another model."""
    return NamedInput(option=option, kind="model", path=path, model=ModelOptions(path=path))


def rows_of_task(task: DatasetOptions) -> Iterator[NamedInput]:
    """The rows that the options of a task name: files, saved folders, data sets on the hub, and generated ones."""
    of_option: dict[str, RowSourceOptions] = {
        "task.path": task,
        "task.held_out_path": replace(task, path=task.held_out_path, generator=""),
        **{f"task.sources[{index}].path": source for index, source in enumerate(task.sources)},
    }
    for option, rows in of_option.items():
        if rows.path not in ("", BUNDLED_PROGRAMS):
            yield NamedInput(option=option, kind="rows", path=rows.path, rows=rows)
        if rows.generator:
            where = option.removesuffix("path") + "generator"
            yield NamedInput(option=where, kind="generator", path=f"{rows.generator} of reasoning-gym")


def read_all(named: Iterable[NamedInput], objects: Iterable[str] = ()) -> dict[str, RunInput]:
    """All that options name, but for those in whose place a caller's objects are.

    Raises UserError for what is not there.
    """
    unused = tuple(prefix for name in objects for prefix in REPLACED.get(name, ()))
    found: dict[str, RunInput] = {}
    for each in named:
        if not each.option.startswith(unused):
            found |= read_named_input(each)
    return found


def named_files(config: AnyConfig) -> dict[str, RunInput]:
    """All that a recipe names, by option.  Raises UserError for what is not there."""
    return read_all(named_options(config))


def read_named_input(named: NamedInput) -> dict[str, RunInput]:
    """What an option names, with a digest; of code also the files next to it that it imports."""
    option, path = named.option, named.path
    match named.kind:
        case "code":
            (_, file), *imported = code_files(path, where=option)
            found = {f"{option}, which imports {name}": RunInput(name, digest_of(each)) for name, each in imported}
            return {option: RunInput(path, digest_of(file)), **found}
        case "generator":
            return {option: RunInput(path, generator_digest())}
        case "rows":
            digest = rows_digest(path, named.rows.revision if named.rows else "")
            unanswered = not digest and is_on_hub(path)
            return {option: RunInput(path) if unanswered else require_digest(option, path, digest)}
        case "file":
            return {option: require_digest(option, path, digest_of(Path(path)))}
    assert named.model is not None
    return model_files(named.model, option)


def model_files(model: ModelOptions, option: str) -> dict[str, RunInput]:
    """A model by its files; nothing of a bundled one.

    The folder of the model that is trained may have moved: `require_same_model` asks.
    """
    if model.is_bundled:
        return {}
    folder = Path(model.path)
    if model.hub_name is not None:
        from posttrain.models.loading.folder_kinds import hub_folder

        folder = hub_folder(model.hub_name, model.hub_revision, with_code=model.trust_remote_code, option=option)
    elif option == MODEL and not folder.is_dir():
        return {option: RunInput(model.path)}
    return {option: require_digest(option, model.path, model_digest(folder))}


def require_digest(option: str, path: str, digest: str) -> RunInput:
    """A named file or folder with its digest.  Raises UserError where there is none."""
    if not digest:
        raise UserError(
            f"{option} = {path}: there is nothing here that can be read, so nobody could tell whether it has changed."
            "  Put it back, or name its place; paths are relative to the folder you run in."
        )
    return RunInput(path, digest)


def inputs_of_rows(
    model: object, task: object, *, policy: RunInput | None, rows: Rows | None, held_out_rows: Rows | None
) -> RunInputs:
    """What a run that learns rows is made of: the caller's objects, and files whose place none of them takes.

    A model that is made from nothing, and a task that has no rows, are in the config alone.
    """
    objects: dict[str, RunInput] = {} if policy is None else {"policy": policy}
    objects |= given_rows(rows, held_out_rows)
    named = [*files_of_model(model)] if isinstance(model, ModelOptions) else []
    named += rows_of_task(task) if isinstance(task, DatasetOptions) else []
    return RunInputs(objects=objects, files=read_all(named, objects))


def given_rows(rows: Rows | None, held_out_rows: Rows | None) -> dict[str, RunInput]:
    """The rows that a caller brings."""
    given = {"rows": rows, "held_out_rows": held_out_rows}
    return {name: rows_input(each) for name, each in given.items() if each is not None}


def changed_since(folder: Path, config: AnyConfig) -> list[str]:
    """What has changed of the files that a recipe names since the run in a folder began by it."""
    began = RunInputs(files=began_with(folder).files)
    return changed_inputs(began, RunInputs(files=named_files(config))) if began.files else []
