"""The way of `config` from `training.rl.train`, by the text alone.

call        a call of a function or class of posttrain, in source order, that is given `config` or what was made of
            it; what it calls comes first.  The walk ends after 400
stop        a function that is entered; each is entered once
room        the folder of a function's file
climb       a stop in a package that stands higher than that of the stop before, in the order of imports that
            tests/test_architecture.py declares
return      a stop in a room that was left before
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

MOST_CALLS = 400
START = "posttrain.training.rl.train"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Tree:
    """A checkout: its modules by dotted name."""

    root: Path

    @cached_property
    def files(self) -> dict[str, Path]:
        source = self.root / "src"
        return {
            ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): path
            for path in sorted((source / "posttrain").rglob("*.py"))
            if not {"assets", "recipes"} & set(path.parts)
        }

    @cached_property
    def syntax(self) -> dict[str, ast.Module]:
        return {name: ast.parse(path.read_bytes()) for name, path in self.files.items()}

    def is_package(self, module: str) -> bool:
        return self.files[module].name == "__init__.py"

    @cached_property
    def levels(self) -> dict[str, int]:
        """The order of imports by package, as the tests of architecture declare it: 0 is the highest."""
        rules = ast.parse((self.root / "tests/test_architecture.py").read_bytes())
        for node in rules.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
                return {name: level for level, names in enumerate(ast.literal_eval(node.value)) for name in names}
        raise SystemExit("tests/test_architecture.py declares no LAYERS")


def imports_in(module: ast.Module) -> Iterator[ast.stmt]:
    yield from (node for node in ast.walk(module) if isinstance(node, ast.Import | ast.ImportFrom))


@dataclass
class Place:
    """A function, method or class of posttrain: where it stands, and the class it belongs to."""

    module: str
    node: ast.AST
    owner: ast.ClassDef | None = None

    @property
    def name(self) -> str:
        return f"{self.module}.{f'{self.owner.name}.' if self.owner else ''}{self.node.name}"  # type: ignore[attr-defined]


@dataclass
class Walk:
    """The way of what a function is given, calls followed in source order."""

    tree: Tree
    calls: int = 0
    stops: list[Place] = field(default_factory=list)

    def enter(self, place: Place, given: set[str]) -> None:
        """Follow the calls of a function that are given one of these names, or what is made of them."""
        if any(place.name == stop.name for stop in self.stops):
            return
        self.stops.append(place)
        known = self.types_of_parameters(place)
        for node in in_source_order(place.node):
            self.learn(node, place, known)
            given |= made_of(node, given)
            if isinstance(node, ast.Call) and mentions(node, given):
                called = self.resolve(node.func, place, known)
                if called is not None and self.calls < MOST_CALLS:
                    self.calls += 1
                    self.follow(called, node, given)

    def follow(self, called: Place, call: ast.Call, given: set[str]) -> None:
        if not isinstance(called.node, ast.ClassDef):
            self.enter(called, parameters_given(called, call, given))
            return
        for name in ("__init__", "__post_init__"):
            method = method_of(called.node, name)
            if method is not None:
                place = Place(called.module, method, called.node)
                self.enter(place, {"self"} | parameters_given(place, call, given))

    def room(self, place: Place) -> str:
        return place.module if self.tree.is_package(place.module) else place.module.rpartition(".")[0]

    def level(self, place: Place) -> int:
        parts = place.module.split(".")
        return self.tree.levels.get(parts[1] if len(parts) > 1 else "", 0)

    def figures(self) -> dict[str, int]:
        rooms = [self.room(stop) for stop in self.stops]
        entered = [room for before, room in zip(["", *rooms], rooms, strict=False) if room != before]
        climbs = (self.level(after) < self.level(before) for before, after in pairwise(self.stops))
        return {
            "stops": len(self.stops),
            "rooms": len(set(rooms)),
            "climbs": sum(climbs),
            "returns": len(entered) - len(set(entered)),
        }

    # Names

    def types_of_parameters(self, place: Place) -> dict[str, Place]:
        known: dict[str, Place] = {}
        if isinstance(place.node, Function):
            arguments = place.node.args
            for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
                self.annotate(each.arg, each.annotation, place.module, known)
            if place.owner is not None and arguments.args:
                known[arguments.args[0].arg] = Place(place.module, place.owner)
        return known

    def annotate(self, name: str, annotation: ast.expr | None, module: str, known: dict[str, Place]) -> None:
        kind = self.class_of(annotation, module)
        if kind is not None:
            known[name] = kind

    def class_of(self, annotation: ast.expr | None, module: str) -> Place | None:
        """The class of posttrain that an annotation names; of `X | None` X."""
        if isinstance(annotation, ast.BinOp):
            return self.class_of(annotation.left, module) or self.class_of(annotation.right, module)
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            return self.class_of(ast.parse(annotation.value, mode="eval").body, module)
        if not isinstance(annotation, ast.Name | ast.Attribute):
            return None
        found = self.global_name(ast.unparse(annotation), module)
        return found if found is not None and isinstance(found.node, ast.ClassDef) else None

    def learn(self, node: ast.AST, place: Place, known: dict[str, Place]) -> None:
        """Take down the types of variables, where the text tells them."""
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            self.annotate(node.target.id, node.annotation, place.module, known)
        pairs = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.With):
            pairs = [(item.optional_vars, item.context_expr) for item in node.items]
        for target, value in pairs:
            if isinstance(target, ast.Name):
                kind = self.type_of(value, place, known)
                if kind is not None:
                    known[target.id] = kind

    def type_of(self, value: ast.expr, place: Place, known: dict[str, Place]) -> Place | None:
        if isinstance(value, ast.Name):
            return known.get(value.id)
        if isinstance(value, ast.Attribute):
            of = self.type_of(value.value, place, known)
            return self.attribute_type(of, value.attr) if of is not None else None
        if isinstance(value, ast.Call):
            called = self.resolve(value.func, place, known)
            if called is None or isinstance(called.node, ast.ClassDef):
                return called
            return self.returned(called)
        return None

    def returned(self, called: Place) -> Place | None:
        """The class that a function returns; of a context manager what it yields."""
        annotation = called.node.returns if isinstance(called.node, Function) else None
        if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in {"Iterator", "Generator"}:
            inner = annotation.slice
            annotation = inner.elts[0] if isinstance(inner, ast.Tuple) else inner
        return self.class_of(annotation, called.module)

    def attribute_type(self, of: Place, name: str) -> Place | None:
        if not isinstance(of.node, ast.ClassDef):
            return None
        for node in of.node.body:
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
                return self.class_of(node.annotation, of.module)
            if isinstance(node, Function) and node.name == name:
                return self.class_of(node.returns, of.module)
        return self.made_in_init(of, name)

    def made_in_init(self, of: Place, name: str) -> Place | None:
        """The type of `self.name`, by its assignment in `__init__`."""
        init = method_of(of.node, "__init__")
        if init is None:
            return None
        place = Place(of.module, init, of.node)  # type: ignore[arg-type]
        known = self.types_of_parameters(place)
        for node in in_source_order(init):
            self.learn(node, place, known)
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == f"self.{name}":
                return self.type_of(node.value, place, known)
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == f"self.{name}":
                return self.class_of(node.annotation, of.module)
        return None

    def resolve(self, called: ast.expr, place: Place, known: dict[str, Place]) -> Place | None:
        if isinstance(called, ast.Name):
            return self.global_name(called.id, place.module)
        if not isinstance(called, ast.Attribute):
            return None
        of = self.type_of(called.value, place, known)
        if of is not None and isinstance(of.node, ast.ClassDef):
            return self.method(of, called.attr)
        return self.global_name(ast.unparse(called), place.module)

    def method(self, of: Place, name: str) -> Place | None:
        found = method_of(of.node, name)
        if found is not None:
            return Place(of.module, found, of.node)  # type: ignore[arg-type]
        for base in of.node.bases:  # type: ignore[attr-defined]
            above = self.class_of(base, of.module)
            if above is not None:
                return self.method(above, name)
        return None

    def global_name(self, name: str, module: str) -> Place | None:
        """What a name means in a module: its own function or class, or one that it imports."""
        first, _, rest = name.partition(".")
        for node in self.tree.syntax[module].body:
            if isinstance(node, Function | ast.ClassDef) and node.name == first:
                place = Place(module, node)
                return self.method(place, rest) if rest and isinstance(node, ast.ClassDef) else place
        for node in imports_in(self.tree.syntax[module]):
            if not isinstance(node, ast.ImportFrom) or not node.module or node.module.split(".")[0] != "posttrain":
                continue
            for alias in node.names:
                if (alias.asname or alias.name) != first:
                    continue
                whole = f"{node.module}.{alias.name}"
                if whole in self.tree.files:
                    return self.global_name(rest, whole) if rest else None
                if node.module in self.tree.files and node.module != module:
                    return self.global_name(f"{alias.name}.{rest}" if rest else alias.name, node.module)
        return None


def method_of(owner: ast.AST, name: str) -> Function | None:
    body = getattr(owner, "body", [])
    return next((node for node in body if isinstance(node, Function) and node.name == name), None)


def in_source_order(node: ast.AST) -> Iterator[ast.AST]:
    """What is within a node, arguments of a call before the call, and nothing of nested definitions twice."""
    for child in ast.iter_child_nodes(node):
        yield from in_source_order(child)
        yield child


def mentions(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(node))


def made_of(node: ast.AST, given: set[str]) -> set[str]:
    """The variables that a statement makes of given names."""
    pairs: list[tuple[ast.expr | None, ast.expr | None]] = []
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
        pairs = [(node.target, node.value)]
    elif isinstance(node, ast.With):
        pairs = [(item.optional_vars, item.context_expr) for item in node.items]
    elif isinstance(node, ast.For | ast.comprehension):
        pairs = [(node.target, node.iter)]
    return {
        each.id
        for target, value in pairs
        if target is not None and value is not None and mentions(value, given)
        for each in ast.walk(target)
        if isinstance(each, ast.Name)
    }


def parameters_given(called: Place, call: ast.Call, given: set[str]) -> set[str]:
    """The parameters of a function that a call fills with given names."""
    if not isinstance(called.node, Function):
        return set()
    names = [each.arg for each in [*called.node.args.posonlyargs, *called.node.args.args]]
    filled = set()
    if called.owner is not None and names[:1] == ["self"]:
        names = names[1:]
        if isinstance(call.func, ast.Attribute) and mentions(call.func.value, given):
            filled.add("self")
    filled |= {name for name, value in zip(names, call.args, strict=False) if mentions(value, given)}
    return filled | {word.arg for word in call.keywords if word.arg and mentions(word.value, given)}


def walk(tree: Tree) -> Walk:
    module, _, name = START.rpartition(".")
    done = Walk(tree)
    start = done.global_name(name, module)
    if start is None:
        raise SystemExit(f"{START} is not in {tree.root}")
    done.enter(start, {"config"})
    return done
