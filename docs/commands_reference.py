"""Writes the page of all commands, docs/reference/commands.md, from what `posttrain COMMAND --help` is made of.

conf.py calls it whenever the documentation is built; `python docs/commands_reference.py` writes it by hand.
"""

from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path

from options_reference import row, write_page

from posttrain.cli import COMMANDS
from posttrain.commands.flags import CommandSpec
from posttrain.schemas import Schema

PAGE = Path(__file__).parent / "reference" / "commands.md"

HEAD = """# Commands

`posttrain COMMAND --help` prints the same, and the options of the recipe that a command reads.  [Options](options.md)
lists all of those.

This page is generated.
"""


def specs() -> Iterator[tuple[str, CommandSpec]]:
    """Every command that has flags, with what its help is made of."""
    for name, (place, _) in COMMANDS.items():
        module = vars(import_module(f"posttrain.commands.{place.partition('.')[0]}"))
        spec = module["PROGRAMS"][name] if "PROGRAMS" in module else module.get("PROGRAM")
        if isinstance(spec, CommandSpec):
            yield name, spec


def page() -> str:
    """The whole page."""
    parts = [HEAD.rstrip()]
    for name, spec in specs():
        parts += [f"## {name}", f"`{spec.name}`", spec.description]
        if fields(spec.switches):
            rows = [row(f"--{each.name.replace('_', '-')}", each) for each in Schema(type(spec.switches)).options]
            parts.append("\n".join(["| flag | type | default | meaning |", "|---|---|---|---|", *rows]))
        if spec.only:
            parts.append("Reads of a recipe: " + ", ".join(f"`{each}`" for each in spec.only) + ".")
    return "\n\n".join(parts) + "\n"


def write() -> None:
    write_page(PAGE, page())


if __name__ == "__main__":
    write()
