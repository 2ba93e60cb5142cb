"""The YAML of recipes: scalars of version 1.2, no key twice, and bounded depth, values and length.

A few lines of YAML can stand for more values than any memory holds, or for lists within themselves.  Each bound is
checked while the text is read, by an error with its line.
"""

import re
from collections.abc import Hashable, Mapping
from itertools import chain
from typing import Any

import yaml

DEEPEST = 50
"""Most lists and mappings within each other."""
MOST_VALUES = 10_000
"""Most values of a recipe, those of an alias counted each time."""
MOST_CHARACTERS = 1_000_000


class RecipeLoader(yaml.SafeLoader):
    """Safe YAML with the scalars of version 1.2, refusing a repeated key."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.depth = 0
        self.sizes: dict[int, int] = {}
        """Number of values of each complete node, by its id."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node.  Raises MarkedYAMLError if it is too deep, too large or within itself."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        named = self.anchors.get(event.anchor) if isinstance(event, yaml.AliasEvent) else None
        if named is not None and id(named) not in self.sizes:
            raise yaml_error(event, f"*{event.anchor} contains itself")
        self.depth += 1
        if self.depth > DEEPEST:
            raise yaml_error(event, f"lists and mappings lie more than {DEEPEST} deep within each other")
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


def to_yaml(content: Mapping[str, object]) -> str:
    """The text of a recipe file, which `parse_yaml` reads back as the same content."""
    return yaml.dump(content, Dumper=RecipeDumper, sort_keys=False, allow_unicode=True, width=120)
