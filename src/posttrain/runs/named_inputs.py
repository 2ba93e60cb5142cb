"""What a resume compares: the recipe, and the files, models, rows and code that it names.  Torch-free.

If a named input cannot be read, this is an error, since a change would go unnoticed.  The only exception is a hub
dataset while the hub does not answer.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from posttrain.binding import code_files, digest_of
from posttrain.config import TrainingConfig, build
from posttrain.config.reading import AnyConfig, resolved_config
from posttrain.config.recipes import RecipeLayer, parse_yaml, read_recipe
from posttrain.config.sections import CollectConfig, Config, IrlConfig, plain
from posttrain.errors import RunError, UserError
from posttrain.models.loading.folder_kinds import hub_folder, model_digest
from posttrain.options.collect import LlmJudgeOptions
from posttrain.options.dataset import BUNDLED_PROGRAMS, DatasetOptions, RowSourceOptions
from posttrain.options.environment import EnvironmentOptions
from posttrain.options.model import ModelOptions
from posttrain.options.reward import RewardOptions
from posttrain.options.rollout import HttpSeconds
from posttrain.runs import run_inputs
from posttrain.runs.files import RECIPE, saved_steps
from posttrain.runs.folder import require_run_folder
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
    "environment": ("environment.", "tools["),
    "tools": ("environment.", "tools["),
    "policy": ("model.path", "model.chat_template"),
    "algorithm": ("algorithm.path",),
}
"""Argument of a Python caller -> prefixes of the options that it replaces."""


@dataclass(frozen=True, slots=True)
class NamedInput:
    """Something outside the recipe that an option names."""

    option: str
    kind: Literal["code", "file", "rows", "generator", "model"]
    path: str
    """Empty if the option does not name anything."""
    revision: str = ""
    model: ModelOptions | None = None
    """Options of the model that is trained."""


def named_options(config: AnyConfig) -> list[NamedInput]:
    """Every option that names a file or a folder."""
    if isinstance(config, IrlConfig):
        return []
    found = rows_of_task(config.task) if isinstance(config.task, DatasetOptions) else []
    for section in ("task", "engine", "algorithm"):
        content = getattr(config, section, None)
        if isinstance(content, Mapping):
            found.append(NamedInput(f"{section}.path", "code", str(content.get("path") or "")))
    if isinstance(config.model, ModelOptions):
        found.append(NamedInput(run_inputs.MODEL, "model", config.model.path, model=config.model))
        found.append(NamedInput("model.chat_template", "file", config.model.chat_template))
    if isinstance(environment := getattr(config, "environment", None), EnvironmentOptions):
        found.append(NamedInput("environment.path", "code", environment.path))
    tools = enumerate(getattr(config, "tools", ()))
    found += [NamedInput(f"tools[{index}]", "code", tool) for index, tool in tools if ":" in tool]
    for index, reward in enumerate(getattr(config, "rewards", ())):
        found += files_of_reward(f"rewards[{index}]", reward)
    if isinstance(config, CollectConfig) and isinstance(config.judge, LlmJudgeOptions):
        found.append(NamedInput("judge.principles", "file", config.judge.principles))
    if isinstance(config, Config):
        for part, name in (("teacher", "model"), ("critic", "path")):
            options = config.algorithm.get(part)
            if isinstance(options, Mapping):
                found.append(NamedInput(f"algorithm.{part}.{name}", "model", str(options.get(name, ""))))
        found.append(NamedInput("reference.path", "model", config.reference.path))
        found.append(NamedInput("behaviours.file", "file", config.behaviours.file))
    return [each for each in found if each.path]


def files_of_reward(where: str, reward: RewardOptions) -> list[NamedInput]:
    """The code or the models of an item of a recipe's `rewards`."""
    found = [
        NamedInput(f"{where}.path", "code", reward.path),
        NamedInput(f"{where}.model", "model", reward.model),
        *(NamedInput(f"{where}.ensemble[{place}]", "model", each) for place, each in enumerate(reward.ensemble)),
        NamedInput(f"{where}.chat_template", "file", reward.chat_template),
    ]
    return [each for each in found if each.path]


def rows_of_task(task: DatasetOptions) -> list[NamedInput]:
    """The rows that a task's options name: files, saved folders, hub datasets, and generated rows."""
    of_option: dict[str, RowSourceOptions] = {
        "task.path": task,
        "task.held_out_path": replace(task, path=task.held_out_path, generator=""),
        **{f"task.sources[{index}].path": source for index, source in enumerate(task.sources)},
    }
    found = []
    for option, rows in of_option.items():
        if rows.path not in ("", BUNDLED_PROGRAMS):
            found.append(NamedInput(option, "rows", rows.path, rows.revision))
        if rows.generator:
            where = option.removesuffix("path") + "generator"
            found.append(NamedInput(where, "generator", f"{rows.generator} of reasoning-gym"))
    return found


def named_files(config: AnyConfig) -> dict[str, run_inputs.RunInput]:
    return read_all(named_options(config))


def read_all(named: Iterable[NamedInput]) -> dict[str, run_inputs.RunInput]:
    return {option: each for one in named for option, each in read_named_input(one).items()}


def read_named_input(named: NamedInput) -> dict[str, run_inputs.RunInput]:
    """What an option names, with a digest; for code, also the neighbouring files that it imports."""
    option, path = named.option, named.path
    match named.kind:
        case "code":
            (_, file), *imported = code_files(path, where=option)
            found = {
                f"{option}, which imports {name}": run_inputs.RunInput(name, digest_of(each)) for name, each in imported
            }
            return {option: run_inputs.RunInput(path, digest_of(file)), **found}
        case "generator":
            return {option: run_inputs.RunInput(path, generator_digest())}
        case "rows":
            digest = rows_digest(path, named.revision)
            unanswered = not digest and is_on_hub(path)
            return {option: run_inputs.RunInput(path) if unanswered else require_digest(option, path, digest)}
        case "file":
            return {option: require_digest(option, path, digest_of(Path(path)))}
    return model_files(named.model or ModelOptions(path=path), option)


def model_files(model: ModelOptions, option: str) -> dict[str, run_inputs.RunInput]:
    """A model, identified by its files; nothing for a bundled one.

    The folder of the model that is trained may have moved: `require_same_model` checks it.
    """
    if model.is_bundled:
        return {}
    folder = Path(model.path)
    if model.hub_name is not None:
        folder = hub_folder(model.hub_name, model.hub_revision, with_code=model.trust_remote_code, option=option)
    elif option == run_inputs.MODEL and not folder.is_dir():
        return {option: run_inputs.RunInput(model.path)}
    return {option: require_digest(option, model.path, model_digest(folder))}


def require_digest(option: str, path: str, digest: str) -> run_inputs.RunInput:
    if not digest:
        raise UserError(
            f"{option} = {path}: cannot be read, so a change would go unnoticed.  Restore it, or give its new path;"
            " paths are relative to the folder you run in."
        )
    return run_inputs.RunInput(path, digest)


def inputs_of_run(
    config: AnyConfig,
    objects: Mapping[str, run_inputs.RunInput],
    *,
    rows: Rows | None = None,
    held_out_rows: Rows | None = None,
    files: Mapping[str, run_inputs.RunInput] | None = None,
) -> run_inputs.RunInputs:
    """The inputs of a run: a caller's objects and rows, and what else the recipe names."""
    given = {"rows": rows, "held_out_rows": held_out_rows}
    objects = {**objects, **{name: run_inputs.rows_input(each) for name, each in given.items() if each is not None}}
    replaced = tuple(prefix for name in objects for prefix in REPLACED.get(name, ()))
    named = (each for each in named_options(config) if not each.option.startswith(replaced))
    return run_inputs.RunInputs(objects=objects, files={**(files or {}), **read_all(named)})


def policy_input(
    policy: "Policy | None", *, name: str = "policy", weighed: bool = False
) -> dict[str, run_inputs.RunInput]:
    """A caller's policy by its shape; with `weighed`, also by some weights, if checkpoints do not hold them."""
    if policy is None:
        return {}
    digest = ""
    if weighed:
        from posttrain.rewards.model import some_weights

        digest = some_weights(policy.model)
    parameters = [*policy.model.parameters()]
    what = f"{run_inputs.class_name(policy.model)} of {sum(each.numel() for each in parameters)} parameters"
    return {name: run_inputs.RunInput(what, digest)}


def changed_since(folder: Path, config: AnyConfig) -> list[str]:
    began = run_inputs.RunInputs(files=run_inputs.began_with(folder).files)
    return run_inputs.differences(began, run_inputs.RunInputs(files=named_files(config)))[0] if began.files else []


SECONDS = tuple(each.name for each in fields(HttpSeconds))
MAY_CHANGE = frozenset(
    [
        "checkpoint",
        "tracker",
        "placement",
        "rollout.keep_alternatives",
        "run.folder",
        "run.overwrite",
        "run.num_steps",
        "run.time_limit_minutes",
        "run.token_limit",
        "run.early_stop_evaluations",
        "run.report_to",
        "run.curves",
        "run.keep_token_columns",
        "run.rank_timeout_seconds",
        "engine.urls",
        "engine.evaluation",
        "engine.transport",
        "engine.transfer_folder",
        "engine.key_env",
        *(f"engine.seconds.{name}" for name in SECONDS),
        "environment.url",
        "environment.seconds",
        "environment.workers",
        "environment.max_failures",
    ]
)
"""Sections and options that a resumed run may change: its length, what it keeps, and where its servers are."""


def run_recipe(run: Path) -> RecipeLayer:
    """The recipe in a run folder.  Raises UserError if it is missing, RunError if it is empty."""
    require_run_folder(run)
    file = run / RECIPE
    layer = read_recipe(str(file), of_run=True)
    if not layer.sections:
        raise RunError(f"{file}: empty.  {remedy(run)}.")
    return layer


def require_same_recipe(run: Path, config: TrainingConfig, made_with: str) -> None:
    """Reject a resume with another recipe; only the run's length and what it keeps may change.

    The model's path may change too, if its files are the same.  `made_with` is the text of the recipe in the
    checkpoint; if it is missing, config.yaml is used.
    """
    if made_with:
        sections = parse_yaml(made_with)
        assert isinstance(sections, dict), "a saved recipe is a mapping of sections"
        layer = RecipeLayer(
            where=f"the checkpoint's {RECIPE}", sections=sections, run_digest=run_inputs.sha256_of(made_with)
        )
    else:
        layer = run_recipe(run)
    began = build(type(config), [layer], to_run=False)
    if isinstance(began.model, ModelOptions) and isinstance(config.model, ModelOptions):
        first, now = (
            run_inputs.began_with(run).files.get(run_inputs.MODEL),
            model_files(config.model, run_inputs.MODEL).get(run_inputs.MODEL),
        )
        if first is not None and now is not None and first.digest == now.digest != "":
            began = replace(began, model=replace(began.model, path=config.model.path))
    if found := option_differences(lasting_options(began), lasting_options(config)):
        says = f"resume {run}: the config differs from the run's own in {'; '.join(found)}"
        raise UserError(f"{says}.  {remedy(run)}, or start another run.")


def remedy(run: Path) -> str:
    copies = [path / RECIPE for path in saved_steps(run / "checkpoints").values() if (path / RECIPE).is_file()]
    if not copies:
        return f"Restore {run / RECIPE}"
    return f"Restore it: cp {shlex.quote(str(copies[-1]))} {shlex.quote(str(run / RECIPE))}"


def lasting_options(config: AnyConfig, may_change: frozenset[str] = MAY_CHANGE) -> dict[str, object]:
    """Every option that a resumed run must not change, by its dotted path."""
    return {
        path: value
        for path, value in option_values(config).items()
        if may_change.isdisjoint((path, path.partition("[")[0], path.partition(".")[0]))
    }


def option_values(config: AnyConfig) -> dict[str, object]:
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
    return [
        f"{path} = {now.get(path, 'missing')} (was {began.get(path, 'missing')})"
        for path in dict.fromkeys([*began, *now])
        if path not in began or path not in now or began[path] != now[path]
    ]


def changed_options(kept: Path, config: AnyConfig) -> list[str]:
    """Options of a run's config that differ from the recipe file with which the run started.

    The file is read with today's defaults, which apply to options that are newer than the file.  Paths next to the
    run's folder are compared relative to its parent, so all of them may have moved together.
    """
    try:
        earlier: Any = build(type(config), [read_recipe(str(kept), of_run=True)], to_run=False)
    except UserError as error:
        return [f"{error}"]
    return option_differences(placeless(earlier), placeless(config))


def placeless(config: Any) -> Mapping[str, object]:
    """Every option, with the parent of the run's folder written as `…`."""
    parent = f"{Path(config.run.folder).parent}/"
    return {
        option: f"…/{value.removeprefix(parent)}" if isinstance(value, str) and value.startswith(parent) else value
        for option, value in option_values(config).items()
    }


def first_changes(changed: list[str]) -> str:
    return "; ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
