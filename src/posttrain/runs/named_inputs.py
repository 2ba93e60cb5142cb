"""The files that a recipe names, models, rows and code, each with a digest of its content.  Torch-free.

What cannot be read has no digest, and is an error: it could become anything unnoticed.  The one exception is a data set
of the hub while the hub does not answer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from posttrain.binding import code_files, digest_of
from posttrain.config.collect import CollectConfig
from posttrain.config.kinds import AnyConfig
from posttrain.config.sections import Config, IrlConfig
from posttrain.errors import UserError
from posttrain.models.loading.folder_kinds import model_digest
from posttrain.options.collect import LlmJudgeOptions
from posttrain.options.dataset import BUNDLED_PROGRAMS, DatasetOptions
from posttrain.options.model import ModelOptions
from posttrain.options.reward import RewardOptions
from posttrain.options.row_source import RowSourceOptions
from posttrain.runs.run_inputs import MODEL, RunInput, RunInputs, began_with, changed_files, rows_input
from posttrain.tasks.row_files.generator_rows import generator_digest
from posttrain.tasks.row_files.rows import is_on_hub, rows_digest

Rows = Iterable[object]
Named = dict[str, Callable[[str], dict[str, RunInput]]]
"""What reads each thing that a recipe names, given its option: only what is used needs to be there."""


def named_files(config: AnyConfig, *, unused: Sequence[str] = ()) -> dict[str, RunInput]:
    """All that a recipe names, by option, but for options that begin with one of `unused`.

    Raises UserError for what is not there.
    """
    return read_all(named_options(config), unused)


def named_options(config: AnyConfig) -> Named:
    """Every option that names a file or a folder, with what reads it."""
    if isinstance(config, IrlConfig):
        return {}
    named: Named = {}
    if isinstance(config.task, DatasetOptions):
        named |= rows_of_task(config.task)
    elif isinstance(config.task, Mapping):
        named["task.path"] = partial(code, str(config.task["path"]))
    if isinstance(engine := getattr(config, "engine", None), Mapping):
        named["engine.path"] = partial(code, str(engine["path"]))
    if isinstance(config.model, ModelOptions):
        named |= files_of_model(config.model)
    for index, reward in enumerate(getattr(config, "rewards", ())):
        named |= files_of_reward(f"rewards[{index}]", reward)
    if isinstance(config, CollectConfig) and isinstance(judge := config.judge, LlmJudgeOptions) and judge.principles:
        named["judge.principles"] = partial(plain_file, judge.principles)
    if isinstance(config, Config):
        named |= files_of_algorithm(config)
        if config.behaviours.file:
            named["behaviours.file"] = partial(plain_file, config.behaviours.file)
    return named


def files_of_algorithm(config: Config) -> Named:
    """The algorithm of the user's own, and the models that it names."""
    named: Named = {}
    if path := config.algorithm.get("path"):
        named["algorithm.path"] = partial(code, str(path))
    for part, option in (("teacher", "model"), ("critic", "path")):
        options = config.algorithm.get(part)
        if isinstance(options, Mapping) and options.get(option):
            named[f"algorithm.{part}.{option}"] = partial(model_folder, ModelOptions(path=str(options[option])))
    if config.reference.path:
        named["reference.path"] = partial(model_folder, ModelOptions(path=config.reference.path))
    return named


def files_of_reward(where: str, reward: RewardOptions) -> Named:
    """The code or the models of an item of a recipe's `rewards`."""
    named: Named = {f"{where}.path": partial(code, reward.path)} if reward.path else {}
    members = {f"{where}.model": reward.model} if reward.model else {}
    members |= {f"{where}.ensemble[{place}]": each for place, each in enumerate(reward.ensemble)}
    if reward.chat_template:
        named[f"{where}.chat_template"] = partial(plain_file, reward.chat_template)
    return named | {option: partial(model_folder, ModelOptions(path=path)) for option, path in members.items()}


def files_of_model(model: ModelOptions) -> Named:
    """The model that is trained, and its chat template."""
    named: Named = {MODEL: partial(trained_model, model)}
    return named | ({"model.chat_template": partial(plain_file, model.chat_template)} if model.chat_template else {})


def rows_of_task(task: DatasetOptions) -> Named:
    """The rows that the options of a task name: files, several of them, saved folders, and data sets on the hub."""
    of_option: dict[str, RowSourceOptions] = {
        "task.path": task,
        "task.held_out_path": replace(task, path=task.held_out_path, generator=""),
        **{f"task.sources[{index}].path": source for index, source in enumerate(task.sources)},
    }
    named: Named = {}
    for option, each in of_option.items():
        if each.path not in ("", BUNDLED_PROGRAMS):
            named[option] = partial(named_rows, each)
        if each.generator:
            named[option.removesuffix("path") + "generator"] = partial(generated, each)
    return named


def read_all(named: Named, unused: Sequence[str] = ()) -> dict[str, RunInput]:
    """What is in the files that options name."""
    found: dict[str, RunInput] = {}
    for option, read in named.items():
        if not option.startswith(tuple(unused)):
            found |= read(option)
    return found


# Each kind of thing that an option names


def code(path: str, option: str) -> dict[str, RunInput]:
    """What FILE.py:NAME or package.module:NAME names: its file, and the files beside it that it imports."""
    file, *imported = code_files(path, where=option)
    beside = {f"{option}, which imports {name}": RunInput(name, digest_of(each)) for name, each in imported}
    return {option: RunInput(path, digest_of(file[1])), **beside}


def plain_file(path: str, option: str) -> dict[str, RunInput]:
    """Any other file."""
    return {option: known(option, path, digest_of(Path(path)))}


def named_rows(source: RowSourceOptions, option: str) -> dict[str, RunInput]:
    """Rows by their files, or their commit on the hub; a hub that does not answer leaves them unknown."""
    digest = rows_digest(source.path, source.revision)
    if not digest and is_on_hub(source.path):
        return {option: RunInput(source.path)}
    return {option: known(option, source.path, digest)}


def generated(source: RowSourceOptions, option: str) -> dict[str, RunInput]:
    """Rows that are generated."""
    return {option: RunInput(f"{source.generator} of reasoning-gym", generator_digest())}


def trained_model(model: ModelOptions, option: str) -> dict[str, RunInput]:
    """The model that is trained; one whose folder is gone may have moved, which `require_same_model` asks."""
    if not model.is_bundled and model.hub_name is None and not Path(model.path).is_dir():
        return {option: RunInput(model.path)}
    return model_folder(model, option)


def model_folder(model: ModelOptions, option: str) -> dict[str, RunInput]:
    """A model by its files; nothing of a bundled one."""
    if model.is_bundled:
        return {}
    folder = Path(model.path)
    if model.hub_name is not None:
        from posttrain.models.loading.folder_kinds import hub_folder

        folder = hub_folder(model.hub_name, model.hub_revision, with_code=model.trust_remote_code, option=option)
    return {option: known(option, model.path, model_digest(folder))}


def known(option: str, path: str, digest: str) -> RunInput:
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
    named = files_of_model(model) if policy is None and isinstance(model, ModelOptions) else {}
    if isinstance(task, DatasetOptions):
        named |= rows_of_task(task)
    unused = ["task.path", "task.sources"] if rows is not None else []
    unused += ["task.held_out_path"] if held_out_rows is not None else []
    for name, given in (("rows", rows), ("held_out_rows", held_out_rows)):
        if given is not None:
            objects[name] = rows_input(given)
    return RunInputs(objects=objects, files=read_all(named, unused))


def changed_since(folder: Path, config: AnyConfig) -> list[str]:
    """What has changed of the files that a recipe names since the run in a folder began by it."""
    began = began_with(folder).files
    return list(changed_files(began, named_files(config))) if began else []
