"""The schema of each section of a recipe.

A section is a frozen dataclass.  Some have variants, chosen by their `name`, as `task` does; the options of `algorithm`
are the signature of that function.  A user's algorithm, task or engine has `path: FILE.py:NAME` instead of a name, and
its signature is the schema.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from posttrain.binding import OWN, is_name_in_file, is_own, own_schema
from posttrain.config.recipes import TASKS_OF_ROWS
from posttrain.errors import UserError
from posttrain.options.collect import JUDGE_OPTIONS
from posttrain.options.engine import ENGINE_OPTIONS
from posttrain.options.irl import DEMONSTRATION_OPTIONS, FEATURE_OPTIONS, METHOD_OPTIONS, WORLD_OPTIONS
from posttrain.options.reward import RewardOptions
from posttrain.options.task import TASK_OPTIONS
from posttrain.schemas import Option, Schema, did_you_mean, record_class

CLASSES: dict[str, tuple[str, Mapping[str, type]]] = {
    "task": ("countdown", TASK_OPTIONS),
    "engine": ("in_process", ENGINE_OPTIONS),
    "world": ("icy_grid", WORLD_OPTIONS),
    "demonstrations": ("sampled", DEMONSTRATION_OPTIONS),
    "features": ("states", FEATURE_OPTIONS),
    "method": ("causal", METHOD_OPTIONS),
    "judge": ("reward", JUDGE_OPTIONS),
}
"""Sections whose class is chosen by `name`: the default name, and every class by name."""


ORDER = (
    "world demonstrations features method model task rewards algorithm demonstrator grading sandbox engine rollout"
    " sampling collect judge update sft reward_model dpo reference evaluation behaviours checkpoint tracker run"
)
"""Sections as a written recipe and `--help` order them."""


def section_names(kind: type) -> list[str]:
    return sorted((each.name for each in fields(kind)), key=ORDER.split().index)


def section_record(kind: type, section: str, content: object) -> Any:
    """The record class of a section, which may depend on the `name` in it; of `rewards`, a tuple of them."""
    if section == "rewards":
        return tuple[record_class(Schema(RewardOptions)), ...]  # type: ignore[misc]
    return record_class(section_schema(kind, section, content))


def section_schema(kind: type, section: str, content: object) -> Schema:
    """The schema of a section, which may depend on the `name` in it."""
    default, variants = variants_of(section)
    given = content if isinstance(content, Mapping) else {}
    if not variants:
        new, *existing = get_args(get_type_hints(kind)[section]) or [get_type_hints(kind)[section]]
        # Only `model` of a supervised run has two: an existing model has a path.
        return Schema(existing[0] if existing and "path" in given else new)
    if is_own(section, content):
        hint = get_type_hints(kind)[section]
        if not any(get_origin(each) is Mapping for each in (hint, *get_args(hint))):
            says = f"{section}.path = {given['path']}: your own {OWN[section]} is not supported here"
            raise UserError(f"{says}.  Name a file of rows, such as rows.jsonl.")
        return own_schema(section, given["path"])
    name = given.get("name", default)
    if section in OWN and "name" in given and is_name_in_file(given.get("path")):
        raise UserError(f"{section}: name = {name} and path = {given['path']} are both given.  Leave one out.")
    if section == "task" and "path" in given and name in variants and name not in TASKS_OF_ROWS:
        raise UserError(
            f"task.path = {given['path']}: the task {name} reads no file.  For rows leave out task.name, or use"
            f" {' or '.join(TASKS_OF_ROWS)}; for your class use FILE.py:NAME."
        )
    if not isinstance(name, str) or name not in variants:
        raise UserError(f"{section}.name = {name}: no such {section}.  {did_you_mean(name, variants)}")
    return Schema(variants[name], (Option("name", Literal[tuple(variants)], name, f"Which {section} this is."),))


def variants_of(section: str) -> tuple[str, Mapping[str, Any]]:
    if section == "algorithm":
        from posttrain.algorithms.table import ALGORITHMS

        return "grpo", ALGORITHMS
    return CLASSES.get(section, ("", {}))
