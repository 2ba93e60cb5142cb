"""Recipe files: where they are found, how their YAML is read, and how several of them become one.

The YAML version is 1.2: `1e-4` is a number, `no` and `on` are words.  Each value remembers its file, for messages.
"""

import hashlib
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import yaml

from posttrain.binding import is_name_in_file, is_own
from posttrain.errors import UserError
from posttrain.options.dataset import DatasetOptions
from posttrain.options.task import TASK_OPTIONS

DEEPEST = 50
"""Maximum nesting of lists and mappings."""
MOST_VALUES = 10_000
"""Maximum number of values in a recipe; an alias counts its values each time."""
MOST_CHARACTERS = 1_000_000


class RecipeLoader(yaml.SafeLoader):
    """Safe YAML with the scalars of version 1.2; a repeated key is an error."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.depth = 0
        self.sizes: dict[int, int] = {}
        """Number of values of each complete node, by its id."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node.  Raises MarkedYAMLError if it is too deep, too large or contains itself."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        named = self.anchors.get(event.anchor) if isinstance(event, yaml.AliasEvent) else None
        if named is not None and id(named) not in self.sizes:
            raise yaml_error(event, f"*{event.anchor} contains itself")
        self.depth += 1
        if self.depth > DEEPEST:
            raise yaml_error(event, f"lists and mappings are nested more than {DEEPEST} deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        if node is not None and id(node) not in self.sizes:
            parts = list(chain.from_iterable(node.value)) if isinstance(node, yaml.MappingNode) else node.value
            parts = [] if isinstance(node, yaml.ScalarNode) else parts
            size = self.sizes[id(node)] = 1 + sum(self.sizes[id(part)] for part in parts)
            if max(size, len(self.sizes)) > MOST_VALUES:
                raise yaml_error(event, f"more than {MOST_VALUES} values, those of aliases counted")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        """A mapping; a repeated key is an error with its line."""
        seen: set[object] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml_error(key, f"`{key.value}` is given twice")
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def yaml_error(place: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)


def integer(loader: RecipeLoader, node: yaml.ScalarNode) -> int:
    try:
        return int(str(node.value))
    except ValueError as error:
        raise yaml_error(node, f"an integer of {len(node.value)} digits") from error


class RecipeDumper(yaml.SafeDumper):
    """Safe YAML that quotes text which `RecipeLoader` would read as something else."""


FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
for dialect in (RecipeLoader, RecipeDumper):
    dialect.yaml_implicit_resolvers = {}  # PyYAML's own read `no` as False, `1e-4` as text, `010` as 8, `12:30` as 750
    for tag, pattern, first in (
        ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
        ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
        ("int", r"[-+]?[0-9]+", list("-+0123456789")),
        ("float", FLOAT, list("-+.0123456789")),
        ("merge", r"<<", ["<"]),
    ):
        dialect.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), first)
RecipeLoader.add_constructor("tag:yaml.org,2002:int", integer)


def parse_yaml(text: str) -> object:
    if len(text) > MOST_CHARACTERS:
        raise yaml.YAMLError(f"{len(text)} characters, and a recipe has at most {MOST_CHARACTERS}")
    return yaml.load(text, RecipeLoader)


def given_yaml(text: str, where: str) -> object:
    """The YAML of a flag, say.  Raises UserError."""
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(f"{where} is not YAML ({problem(error)[:200]})") from None


def problem(error: yaml.YAMLError) -> str:
    return " ".join(str(getattr(error, "problem", None) or error).split())


def to_yaml(content: Mapping[str, object]) -> str:
    """The text of a recipe file, which `parse_yaml` reads back as the same content."""
    return yaml.dump(content, Dumper=RecipeDumper, sort_keys=False, allow_unicode=True, width=120)


RUN_RECIPE = "config.yaml"
BESIDE_RUN_RECIPE = (".posttrain.lock", "inputs.json", "metrics.jsonl", "summary.json", "manifest.json")
"""Files next to a run's recipe, at least one."""
VARIANTS = ("task", "algorithm", "engine", "world", "demonstrations", "features", "method", "judge")
"""Sections whose `name` decides their other options."""
LISTS = ("rewards", "tools")
"""Sections that are lists."""
TASKS_OF_ROWS = tuple(name for name, options in TASK_OPTIONS.items() if issubclass(options, DatasetOptions))
"""Tasks whose `path` is a file of rows."""


@dataclass(frozen=True, kw_only=True)
class RecipeLayer:
    """The content of one source; later sources override earlier ones, option by option."""

    where: str
    """For messages: a file, "command line", "load_recipe"."""
    sections: Mapping[str, object]
    run_digest: str | None = None
    """SHA-256 of a run's recipe, which may only use known code; see run_trust.py."""


@dataclass(frozen=True, kw_only=True)
class MergedRecipe:
    """The layers together, left to right."""

    sections: dict[str, object] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """Dotted path of an option -> the source of its value."""
    of_runs: dict[str, str] = field(default_factory=dict)
    """Sources that are recipes of runs -> SHA-256 of their text."""

    def where(self, path: str) -> str:
        while path and path not in self.origins:
            path = path.rpartition(".")[0]
        return self.origins.get(path, "defaults")

    def source(self, option: str) -> str:
        """The source of an option, also of one in a list item, such as `rewards[0].path`."""
        return self.where(option.partition("[")[0])


def merge(layers: Iterable[RecipeLayer]) -> MergedRecipe:
    """Later layers override earlier ones, option by option; a section with a different `name` starts from scratch."""
    merged = MergedRecipe()
    for layer in layers:
        if layer.run_digest is not None:
            merged.of_runs[layer.where] = layer.run_digest
        for section, given in layer.sections.items():
            # `update:` with every line below it commented out is an empty section.
            before = merged.sections.get(section)
            empty: object = [] if section in LISTS else {}
            value = empty if given is None else with_task_of_rows(section, before, full_form(section, given))
            if section in VARIANTS and isinstance(before, dict) and isinstance(value, dict):
                named = variant(section, value)
                if named not in (None, variant(section, before)):
                    forget_below(merged.origins, section)
                    before = None
            merged.sections[section] = overlay(merged.origins, section, before, value, layer.where)
    return merged


def with_task_of_rows(section: str, before: object, value: object) -> object:
    """The task of a layer that names rows by `path` or `sources`: `dataset`, unless it names another task of rows."""
    if section != "task" or not isinstance(value, dict) or "name" in value:
        return value
    earlier = before if isinstance(before, dict) else {}
    mixture = "sources" in value and "path" not in {**earlier, **value}
    path = value.get("path")
    if not mixture and not (isinstance(path, str) and path and ".py" not in path):  # not FILE.py:NAME
        return value
    named = earlier.get("name")
    return value if named in TASKS_OF_ROWS else {"name": DatasetOptions.name, **value}


def overlay(origins: dict[str, str], path: str, before: object, value: object, where: str) -> object:
    """One layer's value at a dotted path, over the value of earlier layers."""
    if isinstance(before, dict) and not isinstance(value, dict):
        forget_below(origins, path)
    origins[path] = where
    if not isinstance(value, dict):
        return value
    before = before if isinstance(before, dict) else {}
    return before | {key: overlay(origins, f"{path}.{key}", before.get(key), value[key], where) for key in value}


def forget_below(origins: dict[str, str], path: str) -> None:
    for below in [known for known in origins if known.startswith(f"{path}.")]:
        del origins[below]


def variant(section: str, content: Mapping[str, object]) -> object:
    own = is_own(section, content) and (section == "algorithm" or is_name_in_file(content["path"]))
    return content["path"] if own else content.get("name")


def full_form(section: str, value: object) -> object:
    """The full form of short values: `algorithm: dapo`, `task: mine.py:Mine`, `rewards: [mine.py:ok, judge=0.2]`."""
    if section in VARIANTS and isinstance(value, str):
        return {"path" if is_name_in_file(value) else "name": value}
    if section == "tools" and isinstance(value, str):
        return [value]
    if section == "rewards":
        listed = [value] if isinstance(value, str | Mapping) else value
        if isinstance(listed, list | tuple):
            return [short_reward(item) if isinstance(item, str) else item for item in listed]
    return value


def short_reward(text: str) -> dict[str, object]:
    """`NAME`, `FILE.py:FUNCTION`, `package.module:FUNCTION`, a reward model's `FOLDER/` or `org/name`; with `=WEIGHT`.

    With braces, it is the whole item as a recipe writes it: `{model: FOLDER, label: helpful, weight: 0.5}`.
    """
    if text.lstrip().startswith("{"):
        item = given_yaml(text, f"rewards: {text[:80]!r}")
        if not isinstance(item, dict):
            raise UserError(f"rewards: {text[:80]!r} is not a reward; write one as {{name: maths, weight: 0.5}}")
        return item
    source, _, weight = text.partition("=")
    reward: dict[str, object] = {kind_of_reward(source): source}
    if weight:
        try:
            reward["weight"] = float(weight)
        except ValueError:
            raise UserError(f"rewards: {text!r}: the weight {weight!r} is not a number; use NAME=0.5") from None
    return reward


def kind_of_reward(source: str) -> str:
    if ":" in source:
        return "path"
    return "model" if "/" in source or Path(source).is_dir() else "name"


DURATION = re.compile(r"\d[\d.]*( to \d[\d.]*)? (minutes|seconds|min \d+ s)\b")
"""8 to 10 minutes, 25 seconds, 5 min 20 s."""
STEPS = re.compile(r"^  num_steps: (\d+)", re.MULTILINE)


def bundled_recipes() -> dict[str, Path]:
    """The recipes of the package by name, with the folder if there is one: compare/rloo."""
    here = Path(__file__).parents[1]
    installed = here / "recipes"  # in a wheel; in a checkout they are at its top
    folder = installed if installed.is_dir() else here.parents[1] / "recipes"
    found = [*sorted(folder.glob("*.yaml")), *sorted(folder.glob("*/*.yaml"))]
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in found}


def recorded_time(recipe: str) -> str:
    """How long a bundled recipe took, and for how many steps; empty if its header does not say."""
    known = {name: path.resolve() for name, path in bundled_recipes().items()}
    path = known.get(recipe) or Path(recipe).resolve()
    if not recipe or path not in known.values():
        return ""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    found = DURATION.search(" ".join(line.removeprefix("#").strip() for line in lines))
    if found is None:
        return ""
    steps = STEPS.search(path.read_text(encoding="utf-8"))
    return f"{found[0]} for at most {steps[1]} steps" if steps else found[0]


def find_recipe(name: str) -> Path:
    """The file of a recipe given by path, or by the name of a bundled one."""
    path, bundled = Path(name), bundled_recipes()
    if path.is_file():
        return path
    if name in bundled:
        return bundled[name]
    near = get_close_matches(path.stem, bundled, n=1, cutoff=0.6)
    names = ", ".join(bundled)
    hint = f"Did you mean the bundled recipe `{near[0]}`?" if near else f"Bundled recipes, by name: {names}."
    what = "is a folder, not a recipe file" if path.is_dir() else "no such recipe file"
    raise UserError(f"{name}: {what}.  {hint}")


def read_recipe(name: str, *, of_run: bool = False) -> RecipeLayer:
    """A recipe file as a layer; in a run folder, or with `of_run`, as a run's recipe."""
    path = find_recipe(name)
    try:
        text = path.read_text(encoding="utf-8")
        content = parse_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: not YAML: {problem(error)}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not text in UTF-8, so it is not a recipe") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    content = {} if content is None else content
    if not isinstance(content, dict):
        kind = "list" if isinstance(content, list) else "single value"
        raise UserError(f"{path}: a recipe is a mapping of sections (`rollout:`, `update:` ...); this is a {kind}")
    sections = {str(key): value for key, value in content.items()}
    folders = [each.parent for each in (path, path.resolve()) if each.name == RUN_RECIPE]
    of_run |= any((folder / name).is_file() for folder in folders for name in BESIDE_RUN_RECIPE)
    run_digest = hashlib.sha256(text.encode()).hexdigest() if of_run else None
    return RecipeLayer(where=str(path), sections=sections, run_digest=run_digest)
