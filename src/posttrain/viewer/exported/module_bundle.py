"""The modules of the page as one classic script, ordered by their imports.

Each module becomes a function that returns what it exports, so that no two modules share a name.  Modules import by
`import { a, b } from "./file.js";` and export declared functions and constants: tests/test_viewer_page.py says so.
"""

import re
from collections.abc import Mapping

IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./(\w+)\.js";\n', re.MULTILINE)
EXPORT = re.compile(r"^export ((?:async )?(?:function|const) (\w+))", re.MULTILINE)


def bundled_script(modules: Mapping[str, str], entry: str) -> str:
    """The script of a module and all that it imports; `modules` are texts by name, without `.js`.

    Raises ValueError for a cycle or a missing module.
    """
    parts = [scoped(name, modules[name]) for name in in_order(modules, entry)]
    return '"use strict";\n(() => {\n' + "".join(parts) + "})();\n"


def in_order(modules: Mapping[str, str], entry: str) -> list[str]:
    """The modules that an entry needs, each after those that it imports."""
    placed: list[str] = []
    open_ones: list[str] = []

    def place(name: str) -> None:
        if name in placed:
            return
        if name in open_ones:
            raise ValueError(f"modules import one another: {' > '.join([*open_ones, name])}")
        if name not in modules:
            raise ValueError(f"{open_ones[-1]}.js imports {name}.js, which does not exist")
        open_ones.append(name)
        for imported in IMPORT.finditer(modules[name]):
            place(imported[2])
        open_ones.remove(name)
        placed.append(name)

    place(entry)
    return placed


def scoped(name: str, text: str) -> str:
    """A module as a constant with what it exports."""
    exported = [found[2] for found in EXPORT.finditer(text)]
    text = IMPORT.sub(lambda found: f"const {{ {found[1]} }} = module_{found[2]};\n", text)
    text = EXPORT.sub(r"\1", text)
    return f"const module_{name} = (() => {{\n{text}return {{ {', '.join(exported)} }};\n}})();\n"
