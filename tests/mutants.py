"""Change the maths by one operator or one number at a time: some test must notice each change.

`make mutants` runs it; a mutant that survives names a line that no test pins down.  Name files to try those alone:
`.venv/bin/python tests/mutants.py losses.py`.
"""

import ast
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import hypothesis  # noqa: F401  the slow imports are made once, each mutant is tried in a fork
import jaxtyping  # noqa: F401
import pytest
import torch

ROOT = Path(__file__).parents[1]
FILES = ["advantages.py", "token_weights.py", "losses.py", "kl.py"]
SUITES = ["closed_form", "laws", "reference"]
TIME_LIMIT_SECONDS = 120
NUM_WORKERS = 2

# A mutant that computes the same: the mutated line as `ast.unparse` writes it -> why no test can tell.
EQUIVALENT: dict[str, str] = {}

SWAPS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.And: ast.Or, ast.Or: ast.And, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
NAMES = {
    "minimum": "maximum", "maximum": "minimum", "amin": "amax", "amax": "amin", "mean": "sum", "sum": "mean",
    "nansum": "nanmean", "nanmean": "nansum", "exp": "expm1", "expm1": "exp", "log": "log1p", "square": "abs",
    "clamp_min": "clamp_max", "clamp_max": "clamp_min", "zeros_like": "ones_like", "ones_like": "zeros_like",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    before: str
    after: str
    source: str
    """The whole file, mutated."""


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Every one-place change of a node that should alter what it computes."""
    match node:
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPS:
            yield with_field(node, "op", SWAPS[type(op)]())
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            yield with_field(node, "ops", [SWAPS[type(op)]()])
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert(), operand=operand):
            if not isinstance(operand, ast.Constant):  # of -1 the 1 is changed: 1 and -1 can be the same dimension
                yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Attribute(attr=name) if name in NAMES:
            yield with_field(node, "attr", NAMES[name])
        case ast.Attribute(value=inner, attr="detach"):
            yield ast.Attribute(inner, "clone", ast.Load())
        case ast.Call(func=ast.Attribute(attr="where"), args=[condition, yes, no]):
            yield with_field(node, "args", [condition, no, yes])
        case ast.If(test=test) | ast.IfExp(test=test):
            yield with_field(node, "test", ast.UnaryOp(ast.Not(), test))


def with_field(node: ast.AST, name: str, value: object) -> ast.AST:
    changed = deepcopy(node)
    setattr(changed, name, value)
    return changed


def computing(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that compute: annotations and docstrings are left out."""
    for name, value in ast.iter_fields(tree):
        if name in {"annotation", "returns"}:
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST):
                yield node
                yield from computing(node)


def mutants(file: str) -> Iterator[Mutant]:
    text = (ROOT / "src" / "posttrain" / file).read_text(encoding="utf-8")
    tree = ast.parse(text)
    for index, node in enumerate(computing(tree)):
        for changed in changes(node):
            mutated = deepcopy(tree)
            target = list(computing(mutated))[index]
            replace(mutated, target, changed)
            before, after = shortest_difference(ast.unparse(tree), ast.unparse(ast.fix_missing_locations(mutated)))
            yield Mutant(file, node.lineno, before, after, ast.unparse(mutated))


def replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new)
            elif isinstance(value, list):
                setattr(parent, name, [new if item is old else item for item in value])


def shortest_difference(before: str, after: str) -> tuple[str, str]:
    """The one line that differs, before and after."""
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    return next((old.strip(), new.strip()) for old, new in pairs if old != new)


def try_out(mutant: Mutant) -> tuple[Mutant, bool]:
    """Whether the tests notice the mutant, in a process of its own."""
    package = ROOT / "src" / "posttrain"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "posttrain"
        shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__", "assets"))
        (copy / "assets").symlink_to(package / "assets")
        (copy / mutant.file).write_text(mutant.source, encoding="utf-8")
        child = os.fork()
        if child == 0:
            os._exit(run_tests(folder, tests_of(mutant.file)))
        _, status = os.waitpid(child, 0)
    return mutant, status != 0


def tests_of(file: str) -> list[str]:
    """The test files that import the mutated module, or the table that composes it."""
    modules = {f"posttrain.{Path(file).stem}", "posttrain.algorithms"}
    paths = [path for suite in SUITES for path in sorted((ROOT / "tests" / suite).rglob("test_*.py"))]
    return [str(path) for path in paths if any(module in path.read_text(encoding="utf-8") for module in modules)]


def run_tests(source: str, tests: list[str]) -> int:
    signal.alarm(TIME_LIMIT_SECONDS)  # an endless loop is noticed too
    sys.dont_write_bytecode = True
    sys.path.insert(0, source)
    os.chdir(ROOT)
    with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))


def main(files: list[str]) -> int:
    torch.set_num_threads(1)
    for file in files:
        unchanged = (ROOT / "src" / "posttrain" / file).read_text(encoding="utf-8")
        if try_out(Mutant(file, 0, "", "", unchanged))[1]:
            print(f"The tests of {file} fail on the code as it is, or there are none: mend that first.")
            return 1
    candidates = [mutant for file in files for mutant in mutants(file) if mutant.after not in EQUIVALENT]
    survivors = []
    with get_context("fork").Pool(NUM_WORKERS) as pool:
        for mutant, noticed in pool.imap(try_out, candidates):
            if not noticed:
                survivors.append(mutant)
                print(f"SURVIVED {mutant.file}:{mutant.line}\n    {mutant.before}\n    {mutant.after}", flush=True)
    print(f"{len(candidates)} mutants, {len(survivors)} survived; {len(EQUIVALENT)} known to compute the same")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or FILES))
