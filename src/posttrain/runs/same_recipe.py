"""What config.yaml, a flag or Python may change of a resumed run's recipe.  Torch-free."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from posttrain.config import TrainingConfig, build
from posttrain.config.reading import AnyConfig, resolved_config
from posttrain.config.recipes import RecipeLayer, parse_yaml, read_recipe
from posttrain.config.sections import plain
from posttrain.errors import RunError, UserError
from posttrain.options.model import ModelOptions
from posttrain.runs.folder import require_run_folder
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
