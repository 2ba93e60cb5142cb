"""Writes the page of all options, docs/reference/options.md, from the classes that recipes are checked against.

conf.py calls it whenever the documentation is built; `python docs/options_reference.py` writes it by hand.
"""

import json
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from posttrain.config.reading import COMMAND_OF
from posttrain.config.sections import PLAIN, plain, section_names, section_schema, variants_of
from posttrain.options.reward import RewardOptions
from posttrain.schemas import REQUIRED, Option, Schema, field_docs, is_instance, unwrapped

PAGE = Path(__file__).parent / "reference" / "options.md"

HEAD = """# Options

Every option of every section of a recipe; `posttrain COMMAND --help` shows those of one command.  In a recipe they are
`section: {option: value}`, on the command line `--section.option value`, with `-` or `_` between words.  An option
that has no default has to be given where its section or variant is used.

This page is generated: the meanings are the docstrings under the fields of the options classes.
"""
OWN = {
    "algorithm": "Of a function of your own the section has `path: FILE.py:FUNCTION` and the parameters of its"
    " signature.",
    "task": "Of a class of your own the section has `path: FILE.py:CLASS` and the parameters of its signature:"
    " `Class(renderer, *, seed, **options)`.",
    "engine": "Of a class of your own the section has `path: FILE.py:CLASS` and the parameters of its signature:"
    " `Class(policy, **options)`.",
    "tools": "A list of texts.  {meaning}",
    "tools_at": "A mapping of texts.  {meaning}",
    "model": "`posttrain sft` makes a new model unless `model.path` names one that exists, and then takes the same"
    " options as `posttrain rl`.",
}


def sections() -> dict[str, list[tuple[type, str]]]:
    """The sections by name, each with the kinds of recipe that have it and the command that reads them."""
    found: dict[str, list[tuple[type, str]]] = {}
    for kind, command in COMMAND_OF.items():
        for name in section_names(kind):
            found.setdefault(name, []).append((kind, command))
    return found


def schemas(section: str) -> Iterator[tuple[str, Schema]]:
    """What a section may be, under headings: one for each variant, or for each command that has a class of its own."""
    if section == "rewards":
        yield "`rewards`, each item", Schema(RewardOptions)
        return
    kinds = sections()[section]
    variants = variants_of(section)[1]
    if variants:
        for name in variants:
            yield f"`{section}: {{name: {name}}}`", section_schema(kinds[0][0], section, {"name": name})
        return
    by_schema: dict[Schema, list[str]] = {}
    for kind, command in kinds:
        by_schema.setdefault(section_schema(kind, section, {}), []).append(command)
    for schema, commands in by_schema.items():
        yield f"`{section}`" + (f" of `posttrain {commands[0]}`" if len(by_schema) > 1 else ""), schema


def page() -> str:
    """The whole page."""
    parts = [HEAD.rstrip()]
    for section, kinds in sections().items():
        commands = ", ".join(f"`posttrain {command}`" for _, command in kinds)
        about = OWN.get(section, "").replace("{meaning}", field_docs(kinds[0][0]).get(section, ""))
        parts += [f"## {section}", f"Read by {commands}.  {about}".strip()]
        if section in PLAIN:
            continue
        for heading, schema in schemas(section):
            parts += [f"### {heading}", first_paragraph(schema.target), table(schema, f"{section}.")]
            if section == "algorithm":
                name = schema.target.__name__
                parts.append(f"What they do to it is on the page of [{name}](../algorithms/{name}.md).")
    return "\n\n".join(parts) + "\n"


def first_paragraph(target: Any) -> str:
    """What a class or function is for."""
    return " ".join((target.__doc__ or "").partition("\n\n")[0].split())


def table(schema: Schema, before: str) -> str:
    """The options of a schema, those of a section within it too."""
    rows = "\n".join(row(name, option) for name, option in paths(schema, before))
    return f"| option | type | default | meaning |\n|---|---|---|---|\n{rows}"


def paths(schema: Schema, before: str) -> Iterator[tuple[str, Option]]:
    """Every option with its dotted path."""
    for option in schema.options:
        yield before + option.name, option
        inner = unwrapped(option.annotation)
        if is_dataclass(inner):
            yield from paths(Schema(inner), f"{before}{option.name}.")


def row(path: str, option: Option) -> str:
    """One line of a table."""
    inner = unwrapped(option.annotation)
    meaning = option.meaning or (first_paragraph(inner) if is_dataclass(inner) else "")
    cells = (f"`{path}`", type_name(option.annotation), default(option), meaning.replace("|", "\\|"))
    return f"| {' | '.join(cells)} |"


def type_name(annotation: Any) -> str:
    """A type in the words of a recipe's author."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if get_origin(annotation) in (Union, UnionType):
        names = [type_name(each) for each in arguments if each is not NoneType]
        return " or ".join([*names, "null"] if NoneType in arguments else names)
    if get_origin(annotation) is tuple:
        return "list of " + type_name(arguments[0]) if Ellipsis in arguments else f"list of {len(arguments)} numbers"
    if is_dataclass(annotation):
        return "mapping"
    names = {int: "whole number", float: "number", str: "text", bool: "true or false"}
    return names.get(annotation, "mapping")


def default(option: Option) -> str:
    """The default as YAML says it."""
    if option.default is REQUIRED:
        return "none"
    if is_instance(option.default):
        return "as below"
    value = plain(option.default)
    on_one_line = isinstance(value, str) and value and "\n" not in value
    return f"`{value}`" if on_one_line else f"`{json.dumps(value)}`"


def write_page(place: Path, text: str) -> None:
    """Write a page, unless it has this text."""
    place.parent.mkdir(exist_ok=True)
    if not place.is_file() or place.read_text(encoding="utf-8") != text:
        place.write_text(text, encoding="utf-8")


def write() -> None:
    write_page(PAGE, page())


if __name__ == "__main__":
    write()
