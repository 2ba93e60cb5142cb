"""What a resume compares: the recipe, and the files, models, rows and code that it names, with digests.  Torch-free.

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
import shlex
from dataclasses import asdict
from typing import Any

from posttrain.config import TrainingConfig, build
from posttrain.config.reading import resolved_config
from posttrain.config.recipes import RecipeLayer, parse_yaml, read_recipe
from posttrain.config.sections import plain
from posttrain.errors import RunError
from posttrain.runs.files import RECIPE, saved_steps
from posttrain.runs.folder import require_run_folder

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


MAY_CHANGE = frozenset(
    [
        *("checkpoint", "tracker", "rollout.keep_alternatives", "run.folder", "run.overwrite", "run.num_steps"),
        *("run.time_limit_minutes", "run.token_limit", "run.early_stop_evaluations", "run.report_to", "run.curves"),
        "run.keep_token_columns",
    ]
)
"""Sections and options that a resumed run may change: its length, and what is kept of it."""


def run_recipe(run: Path) -> RecipeLayer:
    """The recipe in a run folder.  Raises UserError where there is none, RunError where it is empty."""
    require_run_folder(run)
    file = run / RECIPE
    layer = read_recipe(str(file), of_run=True)
    if not layer.sections:
        raise RunError(f"{file}: empty.  {remedy(run)}.")
    return layer


def require_same_recipe(run: Path, config: TrainingConfig, made_with: str) -> None:
    """Refuse to resume a run with another recipe; its length and what is kept of it may change.

    The place of the model may change too, if its files are the same.  `made_with` is the text of the recipe in the
    checkpoint; config.yaml replaces it where there is none.
    """
    began = build(type(config), [recipe_of_checkpoint(made_with) if made_with else run_recipe(run)], to_run=False)
    if isinstance(began.model, ModelOptions) and isinstance(config.model, ModelOptions):
        first, now = began_with(run).files.get(MODEL), model_files(config.model, MODEL).get(MODEL)
        if first is not None and now is not None and first.digest == now.digest != "":
            began = replace(began, model=replace(began.model, path=config.model.path))
    if found := option_differences(lasting_options(began), lasting_options(config)):
        says = f"resume {run}: the config differs from the run's own in {'; '.join(found)}"
        raise UserError(f"{says}.  {remedy(run)}, or start another run.")


def recipe_of_checkpoint(text: str) -> RecipeLayer:
    sections = parse_yaml(text)
    assert isinstance(sections, dict), "a saved recipe is a mapping of sections"
    return RecipeLayer(where=f"the checkpoint's {RECIPE}", sections=sections, run_digest=sha256_of(text))


def remedy(run: Path) -> str:
    """How to restore config.yaml."""
    copies = [path / RECIPE for path in saved_steps(run / "checkpoints").values() if (path / RECIPE).is_file()]
    if not copies:
        return f"Restore {run / RECIPE}"
    return f"Restore it: cp {shlex.quote(str(copies[-1]))} {shlex.quote(str(run / RECIPE))}"


def lasting_options(config: AnyConfig, may_change: frozenset[str] = MAY_CHANGE) -> dict[str, object]:
    """Every option that a resumed run may not change, by its dotted path."""
    return {
        path: value
        for path, value in option_values(config).items()
        if may_change.isdisjoint((path, path.partition("[")[0], path.partition(".")[0]))
    }


def option_values(config: AnyConfig) -> dict[str, object]:
    """Every option of a config by its dotted path."""
    return dict(leaves("", plain(asdict(resolved_config(config)))))


def leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Every value in nested mappings and lists, with its path; an empty mapping or list is a value too."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(f"{path}.{name}" if path else name, inner)
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from leaves(f"{path}[{index}]", inner)
    else:
        yield path, value


def option_differences(began: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Every option that changed, with both values."""
    return [
        f"{path} = {now.get(path, 'missing')}, which was {began.get(path, 'missing')}"
        for path in dict.fromkeys([*began, *now])
        if path not in began or path not in now or began[path] != now[path]
    ]


def changed_options(kept: Path, config: AnyConfig) -> list[str]:
    """Options of a run's config that differ from the recipe file that an earlier one was begun with.

    The file is read with today's defaults, which count for options that are newer than the file.  Paths next to the
    run's folder count relative to its parent, so that all of them may have moved together.
    """
    try:
        earlier: Any = build(type(config), [read_recipe(str(kept), of_run=True)], to_run=False)
    except UserError as error:
        return [f"{error}"]
    return option_differences(placeless(earlier), placeless(config))


def placeless(config: Any) -> Mapping[str, object]:
    """Every option, with the parent of the run's folder as `…`."""
    parent = f"{Path(config.run.folder).parent}/"
    return {
        option: f"…/{value.removeprefix(parent)}" if isinstance(value, str) and value.startswith(parent) else value
        for option, value in option_values(config).items()
    }


def first_changes(changed: list[str]) -> str:
    """The first three, for a message."""
    return "; ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
