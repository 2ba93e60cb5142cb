"""What `mutants.py` changes: one operator, number, term or name of the maths at a time.

Three rules say what is not changed, or not in the usual way:

- Annotations, docstrings, f-strings (what an error says), `strict=True`, the -1 of a `reshape` and what a decorator
  `dataclass` is told compute nothing.
- A number below a thousandth or from a thousand on is a tolerance or a limit, and where exactly it lies is a choice: it
  is turned into the opposite of one.  A comparison with one is reversed; no number falls on its edge.
- What computes the same in spite of a change is listed in data/equivalent_mutants.yaml, with the reason.
"""

import ast
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import yaml

PACKAGE = Path(__file__).parents[1] / "src" / "posttrain"
BECAUSE: dict[str, dict[str, list[str]]] = yaml.safe_load(
    (Path(__file__).parent / "data" / "equivalent_mutants.yaml").read_text(encoding="utf-8")
)
"""Reason -> file -> lines as `ast.unparse` writes them, of mutants that compute the same."""
EQUIVALENT = {(file, line) for files in BECAUSE.values() for file, lines in files.items() for line in lines}

SWAPS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mod, ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.And: ast.Or, ast.Or: ast.And, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
REVERSED = {ast.Lt: ast.Gt, ast.LtE: ast.Gt, ast.Gt: ast.Lt, ast.GtE: ast.Lt}
NAMES = {
    "minimum": "maximum", "maximum": "minimum", "amin": "amax", "amax": "amin", "min": "max", "max": "min",
    "argmin": "argmax", "argmax": "argmin", "any": "all", "all": "any", "mean": "sum", "sum": "mean",
    "nansum": "nanmean", "nanmean": "nansum", "exp": "expm1", "expm1": "exp", "log": "log1p", "square": "abs",
    "abs": "positive", "logaddexp": "maximum", "clamp_min": "clamp_max", "clamp_max": "clamp_min",
    "zeros": "ones", "ones": "zeros", "zeros_like": "ones_like", "ones_like": "zeros_like", "repeat": "tile",
}  # fmt: skip
BUILTINS = {"min": "max", "max": "min", "any": "all", "all": "any"}
WRAPPERS = {"abs", "reversed", "sorted"}
WORDS = {"T": "N", "left": "right", "right": "left"}
"""Options given as a string: which way a system is solved, on which side of equal numbers to insert."""


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    before: str
    after: str
    source: str
    """The whole file, mutated."""
    in_function: bool
    """Whether the body of a function is mutated, and not what is computed on import."""


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Every one-place change of a node that should alter what it computes."""
    match node:
        case ast.BinOp(op=ast.Add() | ast.Sub() as op, left=left):
            yield from (with_field(node, "op", SWAPS[type(op)]()), left)
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in SWAPS:
            yield with_field(node, "op", SWAPS[type(op)]())
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            swaps = REVERSED if type(op) in REVERSED and names_a_tolerance(node) else SWAPS
            yield with_field(node, "ops", [swaps[type(op)]()])
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert(), operand=operand):
            if not isinstance(operand, ast.Constant):  # of -1 the 1 is changed: 1 and -1 can be the same dimension
                yield operand
        case ast.keyword(arg="axis" | "dim", value=ast.Constant(value=int(axis))):
            yield with_field(node, "value", ast.Constant(0 if axis else 1))
        case ast.Constant(value=value):
            yield from (ast.Constant(other) for other in other_values(value))
        case ast.If(test=test) | ast.IfExp(test=test):
            yield with_field(node, "test", ast.UnaryOp(ast.Not(), test))
        case ast.Attribute() | ast.Name() | ast.Call():
            yield from other_names(node)
    match node:  # a statement that changes something in place, left out
        case ast.AugAssign() | ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Subscript()]):
            yield ast.Pass()


def other_names(node: ast.Attribute | ast.Name | ast.Call) -> Iterator[ast.AST]:
    """A call of something else, or of nothing."""
    match node:
        case ast.Attribute(attr=name) if name in NAMES:
            yield with_field(node, "attr", NAMES[name])
        case ast.Attribute(value=inner, attr="detach"):
            yield ast.Attribute(inner, "clone", ast.Load())
        case ast.Attribute(value=inner, attr="T") | ast.Call(func=ast.Attribute(value=inner, attr="copy"), args=[]):
            yield inner
        case ast.Name(id=name) if name in BUILTINS:
            yield with_field(node, "id", BUILTINS[name])
        case ast.Call(func=ast.Name(id=name), args=[inner]) if name in WRAPPERS:
            yield inner
        case ast.Call(func=ast.Attribute(attr="where"), args=[condition, yes, no]):
            yield with_field(node, "args", [condition, no, yes])


def other_values(value: object) -> Iterator[object]:
    """What stands in a constant's place."""
    match value:
        case bool():
            yield not value
        case int() | float() if is_extreme(value):
            yield 1 / value if isinstance(value, float) else 1
        case int() | float():
            yield value + 1 if abs(value) <= 4 else 2 * value
        case str() if value in WORDS:
            yield WORDS[value]


def names_a_tolerance(comparison: ast.Compare) -> bool:
    """By a name in capitals, the word itself, or its size."""
    for node in ast.walk(comparison):
        name = getattr(node, "id", "") or getattr(node, "attr", "")
        if name.isupper() or name == "tolerance" or (isinstance(node, ast.Constant) and is_extreme(node.value)):
            return True
    return False


def is_extreme(value: object) -> bool:
    return isinstance(value, int | float) and value != 0 and not 1e-3 <= abs(value) < 1e3


def with_field(node: ast.AST, name: str, value: object) -> ast.AST:
    changed = deepcopy(node)
    setattr(changed, name, value)
    return changed


def computing(tree: ast.AST, *, inside: bool = False) -> Iterator[tuple[ast.AST, Callable[[ast.AST], None], bool]]:
    """The nodes that compute, each with what puts another in its place, and whether it is in a function's body."""
    for name, value in ast.iter_fields(tree):
        if name in {"annotation", "returns"}:
            continue
        within = inside or (isinstance(tree, ast.FunctionDef) and name == "body")
        for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(node, ast.AST) and not says_nothing(node, tree):
                yield node, lambda other, at=(tree, name, index): put(at, other), within
                yield from computing(node, inside=within)


def says_nothing(node: ast.AST, parent: ast.AST) -> bool:
    """Whether this is the text of a message, or an argument that any value would do for."""
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.keyword) and node.arg == "strict"):
        return True
    if not isinstance(parent, ast.Call):
        return False
    function = ast.unparse(parent.func)
    return function == "dataclass" or (function.endswith("reshape") and ast.unparse(node) == "-1")


def put(at: tuple[ast.AST, str, int | None], node: ast.AST) -> None:
    parent, name, index = at
    if index is None:
        setattr(parent, name, node)
    else:
        getattr(parent, name)[index] = node


def mutants(file: str) -> Iterator[Mutant]:
    """Every mutant of a file."""
    statements = ast.parse((PACKAGE / file).read_text(encoding="utf-8")).body
    texts = [ast.unparse(statement) for statement in statements]
    for place, statement in enumerate(statements):
        alone = ast.Module([statement], [])
        for node, replace, inside in computing(alone):
            for changed in changes(node):
                replace(changed)
                after = ast.unparse(alone)
                replace(node)
                old, new = shortest_difference(texts[place], after)
                new = f"no {old}" if new == "pass" else new
                source = "\n".join([*texts[:place], after, *texts[place + 1 :]])
                yield Mutant(file, getattr(node, "lineno", 0), old, new, source, inside)


def shortest_difference(before: str, after: str) -> tuple[str, str]:
    """The one line that differs, before and after; of a long one what is around the difference."""
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    old, new = next((old.strip(), new.strip()) for old, new in pairs if old != new)
    first = num_shared(old, new)
    last = num_shared(old[first:][::-1], new[first:][::-1])
    return excerpt(old, first, len(old) - last), excerpt(new, first, len(new) - last)


def num_shared(one: str, other: str) -> int:
    """How many characters are the same at the beginning."""
    return next((place for place, (a, b) in enumerate(zip_longest(one, other)) if a != b), len(one))


def excerpt(line: str, first: int, last: int) -> str:
    """A line, or the part of a long one from `first` to `last` and somewhat more."""
    around = line[max(0, first - 40) : last + 40]
    return line if len(line) <= 120 else f"… {around} …"
