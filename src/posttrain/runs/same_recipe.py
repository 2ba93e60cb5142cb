"""A run that goes on keeps its recipe: what config.yaml, a flag or Python may not change of it.  Torch-free."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from posttrain.config import TrainingConfig, build
from posttrain.config.kinds import AnyConfig, resolved_config
from posttrain.config.recipe_yaml import parse_yaml
from posttrain.config.recipes import RecipeLayer, read_recipe
from posttrain.config.sections import plain
from posttrain.errors import RunError, UserError
from posttrain.options.model import ModelOptions
from posttrain.runs.folder import require_known_format
from posttrain.runs.manifest import RECIPE, saved_steps
from posttrain.runs.named_inputs import model_files
from posttrain.runs.run_inputs import MODEL, began_with, sha256_of

MAY_CHANGE = frozenset(
    [
        *("checkpoint", "tracker", "rollout.keep_alternatives", "run.folder", "run.overwrite", "run.num_steps"),
        *("run.time_limit_minutes", "run.token_limit", "run.early_stop_evaluations", "run.report_to", "run.curves"),
        "run.keep_token_columns",
    ]
)
"""Sections and options that a resumed run may change: how long it goes on and what is kept of it."""


def run_recipe(run: Path) -> RecipeLayer:
    """The recipe in a run folder.  Raises UserError where there is none, RunError where it is empty."""
    require_known_format(run)
    file = run / RECIPE
    if not file.is_file():
        rule = f"not a run folder, for it has no {RECIPE}.  Name the folder of a run."
        raise UserError(f"run.folder = {run}: {rule}", command=f"--resume {run}: {rule}")
    layer = read_recipe(str(file), of_run=True)
    if not layer.sections:
        raise RunError(f"{file}: empty, so nobody can tell what this run is.  {remedy(run)}.")
    return layer


def require_same_recipe(run: Path, config: TrainingConfig, made_with: str) -> None:
    """Refuse to continue a run under another recipe; how long it goes on and what is kept may change.

    So may the place of the model, whose files must be those that the run began with.  `made_with` is the text of the
    recipe in the checkpoint; without one config.yaml tells what the run is.
    """
    own = build(type(config), [recipe_of_checkpoint(made_with) if made_with else run_recipe(run)], to_run=False)
    if isinstance(own.model, ModelOptions) and isinstance(config.model, ModelOptions) and same_model(run, config.model):
        own = replace(own, model=replace(own.model, path=config.model.path))
    found = list(option_differences(lasting_options(own), lasting_options(config)))
    if found:
        raise UserError(
            f"resume {run}: the config differs from the run's own in {'; '.join(found)}."
            f"  A resumed run keeps its recipe.  {remedy(run)}, or start another run."
        )


def recipe_of_checkpoint(text: str) -> RecipeLayer:
    """The recipe that a checkpoint keeps."""
    return RecipeLayer(where=f"the checkpoint's {RECIPE}", sections=sections(text), run_digest=sha256_of(text))


def same_model(run: Path, model: ModelOptions) -> bool:
    """Whether the files that `model.path` names are known to be those that the run began with, wherever they are."""
    began, now = began_with(run).files.get(MODEL), model_files(model, MODEL).get(MODEL)
    return began is not None and now is not None and began.digest == now.digest != ""


def sections(text: str) -> Mapping[str, object]:
    """The sections of a recipe that a run has saved."""
    read = parse_yaml(text)
    assert isinstance(read, dict), "a saved recipe is a mapping of sections"
    return read


def remedy(run: Path) -> str:
    """Where config.yaml can be had as it was."""
    copies = [path / RECIPE for path in saved_steps(run / "checkpoints").values() if (path / RECIPE).is_file()]
    if not copies:
        return f"Put {run / RECIPE} back as it was"
    return f"Put it back as it was: cp {shlex.quote(str(copies[-1]))} {shlex.quote(str(run / RECIPE))}"


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
    """Every value in nested mappings and lists, with the path that leads to it; what is empty is a value too."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(f"{path}.{name}" if path else name, inner)
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from leaves(f"{path}[{index}]", inner)
    else:
        yield path, value


def option_differences(own: Mapping[str, object], now: Mapping[str, object]) -> Iterator[str]:
    """What to tell of options that are not the run's own."""
    for path in [*own, *(path for path in now if path not in own)]:
        if path not in now:
            yield f"{path}, which is gone and was {own[path]}"
        elif path not in own:
            yield f"{path} = {now[path]}, which was not there"
        elif own[path] != now[path]:
            yield f"{path} = {now[path]}, which was {own[path]}"


def changed_options(kept: Path, config: AnyConfig) -> list[str]:
    """What a run's config has otherwise than the recipe file that an earlier one was begun by, option by option.

    The file is read with the defaults of now: an option that is newer than the file has its default there.  Places
    beside the run's own folder are told from there, so that all of them may have been moved together.
    """
    try:
        earlier: Any = build(type(config), [read_recipe(str(kept), of_run=True)], to_run=False)
    except UserError as error:
        return [f"{error}"]
    return list(option_differences(placeless(earlier), placeless(config)))


def placeless(config: Any) -> Mapping[str, object]:
    """Every option, with the folder that the run's own lies in as `…`."""
    beside = f"{Path(config.run.folder).parent}/"
    return {
        option: f"…/{value.removeprefix(beside)}" if isinstance(value, str) and value.startswith(beside) else value
        for option, value in option_values(config).items()
    }


def first_changes(changed: list[str]) -> str:
    """The first few of them, for a message."""
    return "; ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
