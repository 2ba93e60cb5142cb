"""Flags with the dotted names of the recipe: `--rollout.group-size 16` is `rollout: {group_size: 16}`.

tyro reads them and prints the help, both from the records that recipes are checked against, which have the values of
the recipe as defaults and the docstring under each field as help.  Only the flags that were given become a layer over
the recipes, so that every value goes through the same checks wherever it came from.
"""

import contextlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass, replace
from difflib import get_close_matches
from functools import partial
from itertools import dropwhile, pairwise, takewhile
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro
from yaml import YAMLError

from posttrain.binding import OWN
from posttrain.config.recipe_yaml import parse_yaml
from posttrain.config.recipes import VARIANTS, RecipeLayer, short_form
from posttrain.errors import HelpShown, UserError
from posttrain.schemas import Option, Schema, as_record, is_record, record_class, unwrapped

COMMAND_LINE = "command line"
ANYTHING = Annotated[
    Any,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="VALUE",
        instance_from_str=lambda words: parse_yaml(words[0]),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    ),
]
"""Whatever a recipe could say in this place."""
REWARDS_HELP = (
    "Reward functions, each NAME, FILE.py:FUNCTION or package.module:FUNCTION, or a reward model's FOLDER or org/name,"
    " with =WEIGHT where that is not 1, or in braces as a recipe writes it, '{model: FOLDER, label: helpful}'; none"
    " means the task's own."
)
OR_ROWS = {
    "task": "  Or a file of rows, which makes the task `dataset`: with it --help shows how its prompts are read.",
    "algorithm": "",
    "engine": "",
}
"""What else a `path` may name in a section that may be of one's own."""
ALIASES = {
    "update.learning_rate": ("lr",),
    "sft.learning_rate": ("lr",),
    "reward_model.learning_rate": ("lr",),
    "run.num_steps": ("steps", "max_steps", "num_iterations", "num_train_steps"),
    "run.folder": ("output_dir", "out", "output"),
    "run.overwrite": ("overwrite_output_dir", "force"),
    "algorithm.kl.coefficient": ("beta", "kl_coef", "kl_coefficient", "init_kl_coef"),
    "algorithm.clip_low": ("epsilon", "eps", "cliprange", "clip_range", "clip_epsilon"),
    "algorithm.clip_high": ("epsilon_high",),
    "rollout.group_size": ("num_generations", "num_samples", "n"),
    "rollout.prompts_per_step": ("batch_size", "train_batch_size"),
    "rollout.max_completion_tokens": ("max_completion_length", "max_new_tokens", "max_tokens"),
    "update.max_grad_norm": ("grad_clip", "gradient_clipping", "max_norm"),
    "task.prompt_format": ("chat",),
    "task.system": ("system_prompt",),
    "model.chat_template": ("chat_template_path",),
    "model.template_options": ("chat_template_kwargs",),
    "model.path": ("model", "model_name", "model_name_or_path"),
    "task.path": ("dataset", "dataset_name", "data", "train_file"),
    "rewards": ("reward", "reward_funcs", "reward_functions"),
}
"""Options by the names that other libraries have for them: a message about such a flag says ours."""


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
            set_path(content, path, None)
            del rest[at : at + 2]
    given = [known_path(each, flags.paths, program) for each in rest if path_of(each)]
    for at, (flag, value) in enumerate(pairwise(rest), start=1):
        if value == "null" and NoneType in get_args(flags.paths.get(path_of(flag))):
            rest[at] = "None"  # a recipe says null, tyro None
    parsed = parse(flags.parser, as_tyro_reads(rest, flags.paths), program)
    switches = {each.name for each in fields(program.switches)}  # one may have the name of a section
    for path in given:
        if path in flags.paths and path not in switches and path.partition(".")[0] in sections:
            set_path(content, path, value_at(parsed, path))
    return RecipeLayer(where=COMMAND_LINE, sections=content), parsed.command


def as_tyro_reads(arguments: Sequence[str], paths: Mapping[str, Any]) -> list[str]:
    """Values written as in a recipe, as tyro reads them: `--x true`, `--x '[a, b]'`, `--x '[[1, .5], [2, .5]]'`."""
    read: list[str] = []
    for argument in split_lists(arguments, paths):
        flag = read[-1] if read else ""
        annotation = paths.get(path_of(flag)) if "=" not in flag else None
        if annotation is bool and argument in ("true", "false"):
            above, _, name = flag.removeprefix("--").rpartition(".")
            read[-1] = flag if argument == "true" else f"--{above}.no-{name}" if above else f"--no-{name}"
        elif get_origin(annotation) is tuple and argument.startswith("["):
            items = yaml_value(flag, argument)
            read += flat_words(items) if isinstance(items, list) else [argument]
        else:
            read.append(argument)
    return read


def split_lists(arguments: Sequence[str], paths: Mapping[str, Any]) -> Iterator[str]:
    """The arguments, with a list behind `=` as an argument of its own: `--x=[a, b]` is `--x '[a, b]'`."""
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if equals and value.startswith("[") and get_origin(paths.get(path_of(argument))) is tuple:
            yield from (flag, value)
        else:
            yield argument


def flat_words(items: list[Any]) -> list[str]:
    """The items of a list one after the other, those of lists in it as well."""
    return [word for item in items for word in (flat_words(item) if isinstance(item, list) else [str(item)])]


def yaml_value(flag: str, text: str) -> object:
    """What a flag is given, as a recipe writes it.  Raises UserError where it is not YAML."""
    try:
        return parse_yaml(text)
    except YAMLError as error:
        said = " ".join(str(error).split())
        raise UserError(f"{COMMAND_LINE}: {flag}: {text[:80]!r} is not YAML ({said[:200]})") from None


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
    section = path.partition(".")[0]
    if section in VARIANTS and not any(known.startswith(f"{section}.") for known in paths):
        given = argument.partition("=")[0]
        raise UserError(
            f"{COMMAND_LINE}: {given}: no such flag.  `{short(program)}` does not read the section {section}."
        )
    elsewhere = [known for known, names in ALIASES.items() if known in paths and name in names]
    same = [known for known in paths if known.endswith(f".{name}")]
    near = elsewhere or get_close_matches(path, paths, n=1) or same
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
        raise HelpShown from None


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
    own = as_record(record_class(Schema(type(program.switches))), program.switches)
    tree: list[Any] = [("command", tyro.conf.OmitArgPrefixes[type(own)], own)]  # type: ignore[misc]
    paths: dict[str, Any] = dict(get_type_hints(type(own)))
    nullable: list[str] = []
    for name, record in sections.items():
        if name == "rewards" and program.reads(name):
            rewards = tuple[str, ...]
            tree.append((name, Annotated[rewards, tyro.conf.arg(help=REWARDS_HELP)], short_forms(record)))
            paths[name] = rewards
        elif is_record(record):
            trimmed = read_part(record, program, name)
            if fields(trimmed):
                tree.append((name, type(trimmed), trimmed))
            for path, annotation in option_paths(name, type(trimmed)):
                if is_dataclass(annotation):
                    nullable.append(path)
                else:
                    paths[path] = annotation
    made = [
        (name, annotation, field(default_factory=partial(lambda value: value, value)))
        for name, annotation, value in tree
    ]
    return Flags(make_dataclass("Flags", made, frozen=True), paths, nullable)


def short_forms(rewards: Sequence[Any]) -> tuple[str, ...]:
    """Rewards as flags give them."""
    return tuple(short_form(reward.path or reward.model or reward.name, reward.weight) for reward in rewards)


def read_part(record: Any, program: CommandSpec, path: str) -> Any:
    """A record without the options that a command does not read; what may be null has its options all the same.

    Where something of the user's own may be named, there is a `path` to do it by; its options may be of any type.
    """
    schema = type(record).schema
    unread = {option.name for option in schema.options if not program.reads(f"{path}.{option.name}")}
    # With a default that a schema can hold: the record's own value takes its place below.
    leading = [
        replace(option, annotation=ANYTHING, default=None) for option in schema.options if is_written_as_yaml(option)
    ]
    if path in OWN and not hasattr(record, "path") and program.reads(f"{path}.path"):
        leading.append(
            Option("path", str, "", f"A {OWN[path]} of your own in its place, as FILE.py:NAME.{OR_ROWS[path]}")
        )
    made = record_class(replace(schema, leading=(*schema.leading, *leading), left_out=schema.left_out | unread))
    hints = get_type_hints(made)
    values = {each.name: getattr(record, each.name) for each in fields(made) if hasattr(record, each.name)}
    null = [name for name, value in values.items() if value is None and is_dataclass(hints[name])]
    return made(**values | {name: hints[name]() for name in null})


def is_written_as_yaml(option: Option) -> bool:
    """Whether a flag gives an option as a recipe writes it: `--task.columns '{prompt: question}'`."""
    listed = get_origin(option.annotation) is tuple and is_dataclass(unwrapped(option.annotation))
    return option.annotation is Any or get_origin(option.annotation) is Mapping or listed


def option_paths(path: str, record: Any) -> Iterator[tuple[str, Any]]:
    """Every dotted path below a record class with its annotation, records within it too."""
    for name, annotation in get_type_hints(record).items():
        yield f"{path}.{name}", annotation
        if is_dataclass(annotation):
            yield from option_paths(f"{path}.{name}", annotation)


def value_at(parsed: Any, path: str) -> Any:
    """The value of a dotted path."""
    for name in path.split("."):
        parsed = getattr(parsed, name)
    return parsed


def set_path(content: dict[str, Any], path: str, value: Any) -> None:
    """Set a dotted path in nested mappings."""
    *above, name = path.split(".")
    for part in above:
        content = content.setdefault(part, {})
    content[name] = value
