"""Files, models, rows and code that a recipe names, each with a digest of its content.  Torch-free.

Something named that cannot be read is an error, since any change would go unnoticed.  The one exception is a data set
of the hub while the hub does not answer.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from posttrain.binding import code_files, digest_of
from posttrain.config.reading import AnyConfig
from posttrain.config.sections import CollectConfig, Config, IrlConfig
from posttrain.errors import UserError
from posttrain.models.loading.folder_kinds import model_digest
from posttrain.options.collect import LlmJudgeOptions
from posttrain.options.dataset import BUNDLED_PROGRAMS, DatasetOptions, RowSourceOptions
from posttrain.options.model import ModelOptions
from posttrain.options.reward import RewardOptions
from posttrain.runs.run_inputs import (
    MODEL,
    RunInput,
    RunInputs,
    began_with,
    class_name,
    differences,
    rows_input,
    sha256_of,
)
from posttrain.tasks.row_files.generator_rows import generator_digest
from posttrain.tasks.row_files.rows import is_on_hub, rows_digest

if TYPE_CHECKING:
    from posttrain.models.policy import Policy

Rows = Iterable[object]
REPLACED = {
    "rows": ("task.path", "task.sources"),
    "held_out_rows": ("task.held_out_path",),
    "task": ("task.",),
    "engine": ("engine.",),
    "policy": ("model.path", "model.chat_template"),
    "algorithm": ("algorithm.path",),
}
"""Object of a caller -> prefixes of the options that it replaces."""
SOME_WEIGHTS = 64
"""Numbers of each parameter that tell two policies of one shape apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedInput:
    """Something outside the recipe that an option names."""

    option: str
    kind: Literal["code", "file", "rows", "generator", "model"]
    path: str
    revision: str = ""
    """Of rows on the hub."""
    model: ModelOptions | None = None


def named_options(config: AnyConfig) -> Iterator[NamedInput]:
    """Every option that names a file or a folder."""
    if isinstance(config, IrlConfig):
        return
    if isinstance(config.task, DatasetOptions):
        yield from rows_of_task(config.task)
    for section in ("task", "engine", "algorithm"):
        content = getattr(config, section, None)
        if isinstance(content, Mapping) and content.get("path"):
            yield NamedInput(option=f"{section}.path", kind="code", path=str(content["path"]))
    if isinstance(config.model, ModelOptions):
        yield NamedInput(option=MODEL, kind="model", path=config.model.path, model=config.model)
        yield from named_file("model.chat_template", config.model.chat_template)
    for index, reward in enumerate(getattr(config, "rewards", ())):
        yield from files_of_reward(f"rewards[{index}]", reward)
    if isinstance(config, CollectConfig) and isinstance(config.judge, LlmJudgeOptions):
        yield from named_file("judge.principles", config.judge.principles)
    if isinstance(config, Config):
        for part, name in (("teacher", "model"), ("critic", "path")):
            options = config.algorithm.get(part)
            if isinstance(options, Mapping):
                yield from named_model(f"algorithm.{part}.{name}", str(options.get(name, "")))
        yield from named_model("reference.path", config.reference.path)
        yield from named_file("behaviours.file", config.behaviours.file)


def named_file(option: str, path: str) -> Iterator[NamedInput]:
    if path:
        yield NamedInput(option=option, kind="file", path=path)


def named_model(option: str, path: str) -> Iterator[NamedInput]:
    """A model besides the one that is trained."""
    if path:
        yield NamedInput(option=option, kind="model", path=path, model=ModelOptions(path=path))


def files_of_reward(where: str, reward: RewardOptions) -> Iterator[NamedInput]:
    """The code or the models of an item of a recipe's `rewards`."""
    if reward.path:
        yield NamedInput(option=f"{where}.path", kind="code", path=reward.path)
    yield from named_model(f"{where}.model", reward.model)
    for place, each in enumerate(reward.ensemble):
        yield from named_model(f"{where}.ensemble[{place}]", each)
    yield from named_file(f"{where}.chat_template", reward.chat_template)


def rows_of_task(task: DatasetOptions) -> Iterator[NamedInput]:
    """The rows that the options of a task name: files, saved folders, data sets on the hub, and generated ones."""
    of_option: dict[str, RowSourceOptions] = {
        "task.path": task,
        "task.held_out_path": replace(task, path=task.held_out_path, generator=""),
        **{f"task.sources[{index}].path": source for index, source in enumerate(task.sources)},
    }
    for option, rows in of_option.items():
        if rows.path not in ("", BUNDLED_PROGRAMS):
            yield NamedInput(option=option, kind="rows", path=rows.path, revision=rows.revision)
        if rows.generator:
            where = option.removesuffix("path") + "generator"
            yield NamedInput(option=where, kind="generator", path=f"{rows.generator} of reasoning-gym")


def named_files(config: AnyConfig) -> dict[str, RunInput]:
    """Everything that a recipe names, by option.  Raises UserError for what is missing."""
    return read_all(named_options(config))


def read_all(named: Iterable[NamedInput]) -> dict[str, RunInput]:
    found: dict[str, RunInput] = {}
    for each in named:
        found |= read_named_input(each)
    return found


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
            digest = rows_digest(path, named.revision)
            unanswered = not digest and is_on_hub(path)
            return {option: RunInput(path) if unanswered else require_digest(option, path, digest)}
        case "file":
            return {option: require_digest(option, path, digest_of(Path(path)))}
    assert named.model is not None
    return model_files(named.model, option)


def model_files(model: ModelOptions, option: str) -> dict[str, RunInput]:
    """A model by its files; nothing for a bundled one.

    The folder of the model that is trained may have moved: `require_same_model` checks it.
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
            f"{option} = {path}: cannot be read, so a change would go unnoticed.  Restore it or give its place;"
            " paths are relative to the folder you run in."
        )
    return RunInput(path, digest)


def inputs_of_run(
    config: AnyConfig,
    objects: Mapping[str, RunInput],
    *,
    rows: Rows | None = None,
    held_out_rows: Rows | None = None,
    files: Mapping[str, RunInput] | None = None,
) -> RunInputs:
    """The inputs of a run: a caller's objects and rows, and what the recipe names that none of them replaces."""
    given = {"rows": rows, "held_out_rows": held_out_rows}
    objects = {**objects, **{name: rows_input(each) for name, each in given.items() if each is not None}}
    replaced = tuple(prefix for name in objects for prefix in REPLACED.get(name, ()))
    named = (each for each in named_options(config) if not each.option.startswith(replaced))
    return RunInputs(objects=objects, files={**(files or {}), **read_all(named)})


def policy_input(policy: "Policy | None", *, name: str = "policy", weighed: bool = False) -> dict[str, RunInput]:
    """A caller's policy by its shape; `weighed` also by some of its weights, where no checkpoint holds them."""
    if policy is None:
        return {}
    parameters = [*policy.model.parameters()]
    what = f"{class_name(policy.model)} of {sum(each.numel() for each in parameters)} parameters"
    some = [each.detach().flatten()[:SOME_WEIGHTS].double().tolist() for each in parameters] if weighed else []
    return {name: RunInput(what, sha256_of(repr(some)) if weighed else "")}


def changed_since(folder: Path, config: AnyConfig) -> list[str]:
    """Changes to the files that a recipe names since the run in a folder began."""
    began = RunInputs(files=began_with(folder).files)
    return differences(began, RunInputs(files=named_files(config)))[0] if began.files else []
