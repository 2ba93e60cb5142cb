"""The pages of all options and commands, made when the documentation is built: every field with its meaning."""

import importlib
import re
from dataclasses import fields, is_dataclass
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

import pytest

from posttrain.algorithms.table import ALGORITHMS
from posttrain.cli import COMMANDS
from posttrain.config.reading import COMMAND_OF
from posttrain.config.sections import CLASSES, PLAIN
from posttrain.options.reward import RewardOptions
from posttrain.schemas import unwrapped
from tests.support.commands import program_of

DOCS = Path(__file__).parents[1] / "docs"


def reference(name: str = "options_reference") -> ModuleType:
    """A module of docs/, where its siblings can be imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        return importlib.import_module(name)


PAGE = reference().page()
# Path, type, default, meaning; a | within a cell is escaped.
ROWS = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in PAGE.splitlines() if "| `" in line]


def dotted(options: Any, before: str) -> list[str]:
    """The dotted path of every field of a class, read without the code that makes the page."""
    paths = []
    for each in fields(options):
        inner = unwrapped(get_type_hints(options)[each.name])
        paths += [f"{before}.{each.name}", *(dotted(inner, f"{before}.{each.name}") if is_dataclass(inner) else [])]
    return paths


def classes() -> list[tuple[str, Any]]:
    """Every section of every kind of recipe, with each class that it may be."""
    kinds = {(each.name, kind) for kind in COMMAND_OF for each in fields(kind)}
    found: list[tuple[str, Any]] = [("rewards", RewardOptions)]
    for section, kind in sorted(kinds, key=str):
        if section in CLASSES:
            found += [(section, made) for made in CLASSES[section][1].values()]
        elif section not in ("rewards", "algorithm", *PLAIN):
            hint = get_type_hints(kind)[section]
            found += [(section, made) for made in get_args(hint) or [hint]]
    return found


@pytest.mark.parametrize(("section", "options"), classes(), ids=lambda each: getattr(each, "__name__", each))
def test_every_field_of_every_section_is_there_with_its_meaning(section: str, options: Any) -> None:
    meant = {path.strip("`") for path, _, _, meaning in ROWS if meaning}
    assert set(dotted(options, section)) <= meant


def test_no_field_is_without_meaning_but_the_parameters_of_algorithms() -> None:
    unmeant = {path.strip("`") for path, _, _, meaning in ROWS if not meaning}
    parameters = {f"algorithm.{name}" for function in ALGORITHMS.values() for name in signature(function).parameters}
    assert unmeant <= parameters


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_s_signature_is_there_with_its_defaults(name: str) -> None:
    part = PAGE.partition(f"### `algorithm: {{name: {name}}}`")[2].partition("###")[0]
    for parameter in signature(ALGORITHMS[name]).parameters.values():
        (line,) = [line for line in part.splitlines() if line.startswith(f"| `algorithm.{parameter.name}` |")]
        if isinstance(parameter.default, float):
            assert f"| `{parameter.default!r}` |" in line
    assert f"(../algorithms/{name}.md)" in part
    assert (DOCS / "algorithms" / f"{name}.md").is_file()


def test_types_and_defaults_are_said_as_a_recipe_has_them() -> None:
    by_path = {path.strip("`"): (kind, default) for path, kind, default, _ in ROWS}
    assert by_path["rollout.group_size"] == ("whole number", "`8`")
    assert by_path["task.min_number"] == ("whole number", "`1`")  # and not true, which Python takes for equal
    assert by_path["rewards.clip"] == ("list of 2 numbers or null", "`null`")
    assert by_path["rewards.path"] == ("text", '`""`')
    assert by_path["run.overwrite"] == ("true or false", "`false`")
    assert by_path["algorithm.kl.coefficient"] == ("number", "none")
    assert by_path["model.device"] == ("`auto`, `cpu`, `cuda`", "`auto`")


@pytest.mark.parametrize("name", ["options", "commands"])
def test_a_page_is_written_where_the_index_looks_for_it(name: str) -> None:
    assert DOCS / "reference" / f"{name}.md" == reference(f"{name}_reference").PAGE
    assert f"(reference/{name}.md)" in (DOCS / "index.md").read_text(encoding="utf-8")
    assert f"{name}_reference.write()" in (DOCS / "conf.py").read_text(encoding="utf-8")


def test_every_command_is_on_the_page_of_commands_with_its_flags() -> None:
    parts = dict(part.split("\n", 1) for part in reference("commands_reference").page().split("\n## ")[1:])
    assert set(parts) == set(COMMANDS)
    for name, part in parts.items():
        for each in fields(program_of(name).switches):
            (line,) = [line for line in part.splitlines() if line.startswith(f"| `--{each.name.replace('_', '-')}` |")]
            assert len(line.split(" | ")[-1]) > 10
