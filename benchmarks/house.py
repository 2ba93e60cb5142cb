"""Figures of the source tree: its size, what repeats, and how far `train` walks to use its config.

    python benchmarks/house.py [FOLDER] [--walk] [--names]

FOLDER is a checkout (default: this one); `--walk` prints each stop of the walk, and `--names` what
the counts of names and circles are made of.

Size
    lines       physical lines of `src/posttrain/**/*.py`; without IRL: without `irl`, `irl_runs`, `neural_irl` and
                `options/irl*.py`
    imports     lines of import statements
    refusing    lines that only refuse something: `raise` of an error, calls of `require…(…)` or `refuse…(…)`, an `if`
                or `except` around nothing else, and functions of such names
    circles     pairs of a package and a sub-folder of it that import from each other
    names       public functions of modules whose name stands in several files
    wordings    `match=` in the tests; a message that is compared in another way is not counted

The walk is that of `house_walk.py`.
"""

import argparse
import ast
from collections import defaultdict
from pathlib import Path

from house_walk import Function, Tree, imports_in, walk

REFUSING = ("require", "refuse")
IRL = ("irl/", "irl_runs/", "neural_irl", "options/irl")


def size(tree: Tree) -> dict[str, int]:
    lines = {name: len(path.read_text().splitlines()) for name, path in tree.files.items()}
    place = {name: path.relative_to(tree.root / "src/posttrain").as_posix() for name, path in tree.files.items()}
    tests = list((tree.root / "tests").rglob("*.py"))
    return {
        "lines": sum(lines.values()),
        "lines without IRL": sum(count for name, count in lines.items() if not place[name].startswith(IRL)),
        "files": len(lines),
        "import lines": sum(extent(node) for module in tree.syntax.values() for node in imports_in(module)),
        "refusing lines": sum(refusing(module.body) for module in tree.syntax.values()),
        "circles of a package and a sub-folder": len(circles(tree)),
        "public function names in several files": len(repeated_names(tree)),
        "lines of tests": sum(len(path.read_text().splitlines()) for path in tests),
        "pinned wordings": sum(pinned(ast.parse(path.read_bytes())) for path in tests),
    }


def extent(node: ast.stmt | ast.expr) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def refuses(statement: ast.stmt) -> bool:
    if isinstance(statement, Function):
        return statement.name.lstrip("_").startswith(REFUSING)
    if isinstance(statement, ast.Raise):
        return statement.exc is not None
    if isinstance(statement, ast.If):
        return not statement.orelse and all(refuses(each) for each in statement.body)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        called = ast.unparse(statement.value.func).rsplit(".", 1)[-1]
        return called.lstrip("_").startswith(REFUSING)
    return False


def refusing(statements: list[ast.stmt]) -> int:
    """Lines of the statements, and of those within, that only refuse something."""
    count = 0
    for statement in statements:
        if refuses(statement):
            count += extent(statement)
            continue
        for blocks in (getattr(statement, name, []) for name in ("body", "orelse", "finalbody")):
            count += refusing(blocks)
        for handler in getattr(statement, "handlers", []):
            whole = all(refuses(each) for each in handler.body)
            count += (handler.end_lineno - handler.lineno + 1) if whole else refusing(handler.body)
        for case in getattr(statement, "cases", []):
            count += refusing(case.body)
    return count


def circles(tree: Tree) -> list[str]:
    """Packages and a sub-folder of theirs that import each other."""
    edges: dict[str, set[str]] = defaultdict(set)
    for name in tree.files:
        home = name if tree.is_package(name) else name.rpartition(".")[0]
        for imported in imported_modules(tree, name):
            there = imported if tree.is_package(imported) else imported.rpartition(".")[0]
            edges[home].add(there)
    return sorted(
        f"{home} ~ {there}"
        for home, ends in list(edges.items())
        for there in ends
        if there.startswith(f"{home}.") and home != "posttrain" and home in edges.get(there, ())
    )


def imported_modules(tree: Tree, module: str) -> set[str]:
    found = set()
    for node in imports_in(tree.syntax[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in tree.files}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found |= {whole if whole in tree.files else node.module} & set(tree.files)
    return found


def repeated_names(tree: Tree) -> dict[str, list[str]]:
    homes: dict[str, list[str]] = defaultdict(list)
    for name, module in tree.syntax.items():
        own = {node.name for node in module.body if isinstance(node, Function)}
        for function in sorted(own):
            if not function.startswith("_"):
                homes[function].append(name)
    return {name: places for name, places in homes.items() if len(places) > 1}


def pinned(module: ast.Module) -> int:
    """Calls that pin a message by `match=`."""
    calls = (node for node in ast.walk(module) if isinstance(node, ast.Call))
    return sum(word.arg == "match" for call in calls for word in call.keywords)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parents[1])
    parser.add_argument("--walk", action="store_true", help="print each stop of the walk")
    parser.add_argument("--names", action="store_true", help="print what the counts of names and circles are made of")
    arguments = parser.parse_args()
    tree = Tree(arguments.folder.resolve())
    done = walk(tree)
    figures = size(tree) | done.figures()
    for name, count in figures.items():
        print(f"{name:<40} {count:>8,}")
    if arguments.walk:
        print(*(stop.name for stop in done.stops), sep="\n")
    if arguments.names:
        print(
            *circles(tree), *(f"{name}: {', '.join(homes)}" for name, homes in repeated_names(tree).items()), sep="\n"
        )


if __name__ == "__main__":
    main()
