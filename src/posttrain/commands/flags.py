"""Flags with the dotted names of the recipe: `--rollout.group-size 16` is `rollout: {group_size: 16}`.

tyro reads them and prints the help.  The classes it reads are made here from the option classes: the same fields, the
values of the recipe as defaults, and the docstring under each field as help.  Only the flags that were given become a
layer over the recipes, so that every value goes through the same checks wherever it came from.
"""

import ast
import contextlib
import inspect
import io
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, make_dataclass
from difflib import get_close_matches
from functools import partial
from itertools import dropwhile, pairwise, takewhile
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_type_hints

import tyro

from posttrain.config.recipes import RecipeLayer
from posttrain.config.schema import CLASSES, unwrapped
from posttrain.errors import UserError
from posttrain.options.reward import RewardOptions

COMMAND_LINE = "command line"
REWARDS_HELP = """Reward functions, each NAME or FILE.py:FUNCTION, with =WEIGHT where that is not 1; none means the
task's own."""


@dataclass(frozen=True)
class NoSwitches:
    """A command without flags of its own."""


@dataclass(frozen=True, kw_only=True)
class CommandSpec:
    """What the help of a command says above its flags."""

    name: str
    """With its positional arguments: `posttrain rl [RECIPE.yaml ...]`."""
    description: str
    switches: Any = NoSwitches()
    """A dataclass of flags of its own, not part of the recipe."""
    only: tuple[str, ...] = ()
    """Sections and dotted paths that this command reads; empty means all of them."""

    def reads(self, path: str) -> bool:
        """Whether a flag would have an effect here."""
        return not self.only or any(f"{path}.".startswith(f"{each}.") for each in self.only)


@dataclass(frozen=True)
class Flags:
    """The flags of a command: what tyro parses, and the dotted paths it knows."""

    parser: Any
    """A dataclass with a field per section, and `command` for the command's own switches."""
    paths: Mapping[str, Any]
    """Dotted path -> its annotation."""
    nullable: Sequence[str]
    """Paths of sections within a section that may be null."""


def read_flags(arguments: Sequence[str], program: CommandSpec, sections: Mapping[str, Any]) -> tuple[RecipeLayer, Any]:
    """The flags that were given, as a layer over the recipes, and the command's own switches."""
    flags = make_flags(sections, program)
    content: dict[str, Any] = {}
    rest = list(arguments)
    for path in flags.nullable:
        at = next((i for i, each in enumerate(rest) if path_of(each) == path), None)
        if at is not None and rest[at + 1 : at + 2] in (["null"], ["none"], ["None"]):
            place(content, path, None)
            del rest[at : at + 2]
    given = [known_path(each, flags.paths, program) for each in rest if path_of(each)]
    for at, (flag, value) in enumerate(pairwise(rest), start=1):
        if value == "null" and NoneType in get_args(flags.paths.get(path_of(flag))):
            rest[at] = "None"  # a recipe says null, tyro None
    parsed = parse(flags.parser, rest, program)
    for path in given:
        if path in flags.paths and path.partition(".")[0] in sections:
            place(content, path, value_at(parsed, path))
    return RecipeLayer(where=COMMAND_LINE, sections=content), parsed.command


def path_of(argument: str) -> str:
    """The dotted path that an argument spells as a flag; empty where it is no flag."""
    spelled = argument.startswith("--") and len(argument) > 2
    return argument[2:].partition("=")[0].replace("-", "_") if spelled else ""


def known_path(argument: str, paths: Mapping[str, Any], program: CommandSpec) -> str:
    """The path that a flag sets: `--rollout.no-allow-cut-sampling` sets `rollout.allow_cut_sampling`."""
    path = path_of(argument)
    *above, name = path.split(".")
    positive = ".".join([*above, name.removeprefix("no_")])
    if path in paths or path == "help":
        return path
    if paths.get(positive) is bool:
        return positive
    near = get_close_matches(path, paths, n=1) or [known for known in paths if known.endswith(f".{name}")]
    remedy = f"Did you mean `--{near[0].replace('_', '-')}`?" if near else f"`{short(program)} --help` lists them."
    raise UserError(f"{COMMAND_LINE}: {argument.partition('=')[0]}: no such flag.  {remedy}")


def short(program: CommandSpec) -> str:
    """The program's name without its positional arguments."""
    return " ".join(program.name.split()[:2])


def parse(parser: Any, arguments: Sequence[str], program: CommandSpec) -> Any:
    """What tyro makes of the arguments; its complaint in a box becomes one message."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(parser, prog=program.name, description=program.description, args=arguments)
    except SystemExit as leave:
        if leave.code:
            raise UserError(f"{COMMAND_LINE}: {unboxed(complaint.getvalue())}") from None
        raise


def unboxed(text: str) -> str:
    """The first paragraph of a message that tyro framed, and how the flag is written."""
    _title, *lines = [line.strip("│ ") for line in text.splitlines()]
    ruled = [line for line in lines if line == "" or set(line) <= set("─-╰╯")]
    words = list(dropwhile(lambda line: line in ruled, lines))
    paragraph = takewhile(lambda line: line not in ruled, words)
    usage = next((line for line in words if re.match(r"--\w", line)), "")
    said = " ".join(" ".join(paragraph).split()).removeprefix("Error parsing ").rstrip(".")
    said = re.sub(r"invalid literal for int\(\) with base 10: (.*)", r"\1 is no whole number", said)
    said = re.sub(r"could not convert string to float: (.*)", r"\1 is no number", said)
    return f"{said}.  It is given as {usage}" if usage else said


# The classes that tyro reads


def make_flags(sections: Mapping[str, Any], program: CommandSpec) -> Flags:
    """The flags that a command reads, with the values that the sections have so far as defaults."""
    own = flag_class(program.switches, program, "")
    unprefixed: Any = tyro.conf.OmitArgPrefixes
    tree: list[Any] = [("command", unprefixed[own], field(default_factory=own))]
    paths: dict[str, Any] = dict(get_type_hints(type(program.switches)))
    nullable: list[str] = []
    for name, value in sections.items():
        if name == "rewards" and program.reads(name):
            tree.append(
                (name, Annotated[tuple[str, ...], tyro.conf.arg(help=REWARDS_HELP)], field(default=short_forms(value)))
            )
            paths[name] = tuple[str, ...]
        elif is_dataclass(value):
            made = flag_class(value, program, name)
            if fields(made):
                tree.append((name, made, field(default_factory=made)))
            for path, annotation in leaves(name, type(value)):
                if is_dataclass(unwrapped(annotation)):
                    nullable.append(path)
                elif program.reads(path):
                    paths[path] = annotation
    return Flags(make_dataclass("Flags", tree, frozen=True), paths, nullable)


def short_forms(rewards: Sequence[RewardOptions]) -> tuple[str, ...]:
    """Rewards as flags give them."""
    return tuple(reward.short for reward in rewards)


def flag_class(values: Any, program: CommandSpec, path: str) -> Any:
    """A class with the fields of some options, their values as defaults and their docstrings as help.

    `values` is an options object; a section within a section that is null comes as its class.
    """
    options = values if isinstance(values, type) else type(values)
    hints, docs = get_type_hints(options), field_docs(options)
    made: list[Any] = []
    for each in fields(options):
        current = default_of(each) if isinstance(values, type) else getattr(values, each.name)
        annotation, inner = hints[each.name], unwrapped(hints[each.name])
        if each.name == "name" and path in CLASSES:
            annotation = Literal[tuple(CLASSES[path][1])]  # all that there is to choose from, not only what was chosen
        if is_dataclass(inner):
            nested = flag_class(inner if current is None else current, program, f"{path}.{each.name}")
            made.append((each.name, nested, field(default_factory=nested)))
        elif path == "" or program.reads(f"{path}.{each.name}"):
            if current is None and NoneType not in get_args(annotation):
                annotation = annotation | None
            annotation = Annotated[annotation, tyro.conf.arg(help=docs.get(each.name))]
            # By a factory, for a mapping is no default that a dataclass takes.
            made.append((each.name, annotation, field(default_factory=partial(lambda value: value, current))))
    return make_dataclass(options.__name__, made, frozen=True, kw_only=True, namespace={"__doc__": options.__doc__})


def default_of(option: Field[Any]) -> Any:
    """A field's default; None where it has none."""
    if option.default_factory is not MISSING:
        return option.default_factory()
    return None if option.default is MISSING else option.default


def leaves(path: str, options: Any) -> Iterator[tuple[str, Any]]:
    """Every dotted path below a section with its annotation, sections within it too."""
    for name, annotation in get_type_hints(options).items():
        yield f"{path}.{name}", annotation
        if is_dataclass(unwrapped(annotation)):
            yield from leaves(f"{path}.{name}", unwrapped(annotation))


def field_docs(options: type) -> dict[str, str]:
    """The docstring under each field of a class, on one line."""
    docs: dict[str, str] = {}
    for each in reversed(options.__mro__[:-1]):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
        except OSError:  # made while running: it has no source, and no docstrings
            continue
        statements = body.body if isinstance(body, ast.ClassDef) else []
        for statement, after in pairwise(statements):
            match statement, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = " ".join(text.split())
    return docs


def value_at(parsed: Any, path: str) -> Any:
    """The value of a dotted path."""
    for name in path.split("."):
        parsed = getattr(parsed, name)
    return parsed


def place(content: dict[str, Any], path: str, value: Any) -> None:
    """Set a dotted path in nested mappings."""
    *above, name = path.split(".")
    for part in above:
        content = content.setdefault(part, {})
    content[name] = value
