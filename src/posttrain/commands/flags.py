"""Flags with the dotted names of the recipe: `--rollout.group-size 16` is `rollout: {group_size: 16}`.

A flag's value is written as in a recipe, and becomes a layer over the recipes, so all values are checked in the same
way.  tyro prints the help from the same records and the docstrings of their fields.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass, replace
from difflib import get_close_matches
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from posttrain.binding import OWN
from posttrain.config.recipes import VARIANTS, RecipeLayer, given_yaml
from posttrain.config.sections import PLAIN, variants_of
from posttrain.errors import FlagsListed, HelpShown, UserError
from posttrain.schemas import Option, Schema, as_record, checked, is_record, record_class, unwrapped

COMMAND_LINE = "command line"
FLAG_NAMES = "--flag-names"
"""Raised in place of printing help, with the names of a command's flags, for shell completion."""
TOOLS_HELP = (
    "Tools that the policy can call, each FILE.py:FUNCTION, package.module:FUNCTION, `calculator` or `python`, which"
    " runs programs in the sandbox."
)
TOOLS_AT_HELP = (
    "Tools in plain text, each with the text that calls it, '{calculator: \"=\"}'; the result is inserted after it."
)
NULL = ("null", "none", "None")
REWARDS_HELP = (
    "Rewards, each NAME, FILE.py:FUNCTION or package.module:FUNCTION, or a reward model's FOLDER or org/name,"
    " with =WEIGHT if that is not 1, or in braces as in a recipe, '{model: FOLDER, label: helpful}'.  Empty:"
    " the task's own rewards."
)
OR_ROWS = {
    "task": "  Or a file of rows, which selects the task `dataset`; --help then shows the options for reading prompts."
}
"""What else `path` can name, in sections that can name the user's own code."""
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
"""Option names of other libraries -> ours, for messages about such a flag."""
NO_SWITCHES = make_dataclass("NoSwitches", [], frozen=True)()


@dataclass(frozen=True, kw_only=True)
class CommandSpec:
    """A command's usage, its switches, and the parts of a recipe that it reads."""

    name: str
    """With its positional arguments: `posttrain rl [RECIPE.yaml ...]`."""
    description: str
    switches: Any = NO_SWITCHES
    """A dataclass of flags that are not part of the recipe."""
    only: tuple[str, ...] = ()
    """Sections and dotted paths that this command reads; empty means all of them."""

    @property
    def command(self) -> str:
        return " ".join(self.name.split()[:2])

    def reads(self, path: str) -> bool:
        """Whether a flag would have an effect here."""
        return not self.only or any(f"{path}.".startswith(f"{each}.") for each in self.only)


@dataclass(frozen=True, slots=True)
class GivenFlag:
    """A flag as it was typed, and the words before the next flag."""

    spelled: str
    words: tuple[str, ...]

    @property
    def path(self) -> str:
        """The dotted path that it sets: `--rollout.group-size` sets `rollout.group_size`."""
        return self.spelled[2:].replace("-", "_")

    @property
    def word(self) -> str:
        return self.words[0] if self.words else ""


def given_flags(arguments: Sequence[str]) -> list[GivenFlag]:
    """The flags among some arguments; `--x=value` is `--x value`.  Raises UserError for words before the first flag."""
    given: list[tuple[str, list[str]]] = []
    for each in arguments:
        if each == "-h" or (each.startswith("--") and len(each) > 2):
            spelled, equals, value = each.partition("=")
            given.append((spelled, [value] if equals else []))
        elif given:
            given[-1][1].append(each)
        else:
            raise UserError(f"{COMMAND_LINE}: {each}: no such flag.  Flags begin with --.")
    return [GivenFlag(spelled, tuple(words)) for spelled, words in given]


def read_flags(arguments: Sequence[str], program: CommandSpec, sections: Mapping[str, Any]) -> tuple[RecipeLayer, Any]:
    """The flags that were given, as a layer over the recipes, and the command's own switches."""
    if FLAG_NAMES in arguments:
        raise FlagsListed(program.name, listed_flags(sections, program))
    if asks_help(arguments):
        import tyro

        with suppress(SystemExit):
            record = help_record(sections, program)
            tyro.cli(record, prog=program.name, description=program.description, args=["--help"])
        raise HelpShown
    types, kind = flag_types(sections, program), type(program.switches)
    switches = {each.name for each in fields(kind)}
    of_command: dict[str, Any] = {}
    content: dict[str, Any] = {}
    for flag in given_flags(arguments):
        path = known_path(flag, types, program)
        value = not flag_value(flag, bool, program) if path != flag.path else flag_value(flag, types[path], program)
        *above, name = path.split(".")
        place = of_command if path in switches else content
        for part in above:
            if not isinstance(place.get(part), dict):
                place[part] = {}
            place = place[part]
        place[name] = value
    record, mistakes = checked(record_class(Schema(kind)), of_command)
    with named_as_flags():
        if mistakes:
            raise UserError(f"{mistakes[0].path[0]}{mistakes[0].says}")
        of_kind = kind(**{each.name: getattr(record, each.name) for each in fields(record)})
    return RecipeLayer(where=COMMAND_LINE, sections=content), of_kind


@contextmanager
def named_as_flags() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        name, _, rule = str(error).partition(" ")
        raise UserError(f"{COMMAND_LINE}: --{name.replace('_', '-')} {rule}") from None


def asks_help(arguments: Sequence[str]) -> bool:
    return "-h" in arguments or "--help" in arguments or FLAG_NAMES in arguments


def flag_value(flag: GivenFlag, annotation: Any, program: CommandSpec) -> object:
    """The words of a flag as a recipe would hold them: text unchanged, other values as YAML.  Raises UserError."""
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    if (NoneType in kinds or is_dataclass(annotation)) and flag.word in NULL:
        return None
    kinds = tuple(each for each in kinds if each is not NoneType)
    items = next((get_args(each) for each in kinds if get_origin(each) is tuple), None)
    if items is not None and not flag.word.startswith("["):  # its items as words; of lists one after another
        values = [word if unwrapped(items[0]) is str else yaml_value(flag.spelled, word) for word in flag.words]
        size = len(get_args(items[0]))
        is_nested = get_origin(items[0]) is tuple
        return [values[i : i + size] for i in range(0, len(values), size)] if is_nested else values
    value: object = True
    stray = flag.words
    if kinds != (bool,) or flag.word in ("true", "false"):
        if not flag.words:
            raise UserError(f"{COMMAND_LINE}: {flag.spelled}: its value is missing.")
        is_text = str in kinds or get_origin(kinds[0]) is Literal
        value, stray = flag.word if is_text else yaml_value(flag.spelled, flag.word), flag.words[1:]
    if stray:
        raise UserError(f"{COMMAND_LINE}: unexpected argument {' '.join(stray)}.  Usage: {program.name} [--FLAGS ...]")
    return value


def yaml_value(flag: str, text: str) -> object:
    return given_yaml(f".{text}" if text in ("inf", "nan") else text, f"{COMMAND_LINE}: {flag}: {text[:80]!r}")


def known_path(flag: GivenFlag, types: Mapping[str, Any], program: CommandSpec) -> str:
    """The path that a flag sets: `--rollout.no-allow-cut-sampling` sets `rollout.allow_cut_sampling`."""
    path = flag.path
    *above, name = path.split(".")
    positive = ".".join([*above, name.removeprefix("no_")])
    if path in types or types.get(positive) is bool:
        return path if path in types else positive
    section = path.partition(".")[0]
    if section in VARIANTS and not any(known.startswith(f"{section}.") for known in types):
        remedy = f"`{program.command}` does not read the section {section}."
    else:
        elsewhere = [known for known, names in ALIASES.items() if known in types and name in names]
        same = [known for known in types if known.endswith(f".{name}")]
        near = elsewhere or get_close_matches(path, types, n=1) or same
        remedy = f"Did you mean `--{near[0].replace('_', '-')}`?" if near else f"`{program.command} --help` lists them."
    raise UserError(f"{COMMAND_LINE}: {flag.spelled}: no such flag.  {remedy}")


def flag_types(sections: Mapping[str, Any], program: CommandSpec) -> dict[str, Any]:
    """The type of each flag's value, by the path that it sets."""
    hints = get_type_hints(type(program.switches))
    types = {each.name: hints[each.name] for each in fields(program.switches)}
    for name, record in sections.items():
        if name in ("rewards", "tools") and program.reads(name):
            types[name] = tuple[str, ...]
        elif name in PLAIN and program.reads(name):
            types[name] = PLAIN[name]
        elif is_record(record):
            types |= dict(option_types(name, type(read_part(record, program, name))))
    return types


def listed_flags(sections: Mapping[str, Any], program: CommandSpec) -> dict[str, tuple[str, ...]]:
    """The flags of a command and their choices, including those of every task, algorithm and other variant."""
    choices: dict[str, set[str]] = {}
    for path, annotation in flag_types(sections, program).items():
        choices.setdefault(path, set()).update(fixed_choices(annotation))
    for name in filter(program.reads, sections):
        variants = variants_of(name)[1]
        for variant in variants.values():
            for path, annotation in option_types(name, record_class(Schema(variant))):
                if program.reads(path):
                    choices.setdefault(path, set()).update(fixed_choices(annotation))
        if f"{name}.name" in choices:
            choices[f"{name}.name"].update(variants)
    return {f"--{path.replace('_', '-')}": tuple(sorted(choices[path])) for path in sorted(choices)}


def fixed_choices(annotation: Any) -> tuple[str, ...]:
    """The texts that an annotation allows, if it allows only some."""
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    texts = [text for kind in kinds if get_origin(kind) is Literal for text in get_args(kind)]
    return tuple(text for text in texts if isinstance(text, str))


def option_types(path: str, record: Any) -> Iterator[tuple[str, Any]]:
    """Every dotted path below a record class, with its type; nested records too."""
    for name, annotation in get_type_hints(record).items():
        yield f"{path}.{name}", annotation
        if is_dataclass(annotation):
            yield from option_types(f"{path}.{name}", annotation)


def help_record(sections: Mapping[str, Any], program: CommandSpec) -> Any:
    """A dataclass from which tyro makes the help: the command's switches, and a field per section."""
    import tyro

    anything: Any = Annotated[
        Any,
        tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="VALUE",
            instance_from_str=lambda words: words[0],
            is_instance=lambda value: True,
            str_from_instance=lambda value: [str(value)],
        ),
    ]
    own = as_record(record_class(Schema(type(program.switches))), program.switches)
    tree: list[Any] = [("command", tyro.conf.OmitArgPrefixes[type(own)], own)]  # type: ignore[misc]
    for name, record in sections.items():
        if name == "rewards" and program.reads(name):
            rewards = Annotated[tuple[str, ...], tyro.conf.arg(help=REWARDS_HELP)]
            sources = [(each.path or each.model or each.name, each.weight) for each in record]
            shown = tuple(source if weight == 1 else f"{source}={weight}" for source, weight in sources)
            tree.append((name, rewards, shown))
        elif name == "tools" and program.reads(name):
            tree.append((name, Annotated[tuple[str, ...], tyro.conf.arg(help=TOOLS_HELP)], record))
        elif name == "tools_at" and program.reads(name):
            tree.append((name, Annotated[anything, tyro.conf.arg(help=TOOLS_AT_HELP)], record))
        elif is_record(record) and fields(part := read_part(record, program, name, anything)):
            tree.append((name, type(part), part))
    made = [(name, kind, field(default_factory=partial(lambda value: value, value))) for name, kind, value in tree]
    return make_dataclass("Flags", made, frozen=True)


def read_part(record: Any, program: CommandSpec, path: str, anything: Any = Any) -> Any:
    """A record without the options that a command does not read; a section that may be null keeps its options.

    If the section can name the user's own code, it has a `path`, and its options can have any type.
    """
    schema = type(record).schema
    unread = {option.name for option in schema.options if not program.reads(f"{path}.{option.name}")}
    # With a default that a schema can hold: the record's own value takes its place below.
    leading = []
    for option in schema.options:
        kind = option.annotation
        listed = get_origin(kind) is tuple and is_dataclass(unwrapped(kind))
        if kind is Any or get_origin(kind) is Mapping or listed:  # such as `--task.columns '{prompt: question}'`
            leading.append(replace(option, annotation=anything, default=None))
    if path in OWN and not hasattr(record, "path") and program.reads(f"{path}.path"):
        meaning = f"Your own {OWN[path]} instead, as FILE.py:NAME.{OR_ROWS.get(path, '')}"
        leading.append(Option("path", str, "", meaning))
    made = record_class(replace(schema, leading=(*schema.leading, *leading), left_out=schema.left_out | unread))
    hints = get_type_hints(made)
    values = {each.name: getattr(record, each.name) for each in fields(made) if hasattr(record, each.name)}
    null = [name for name, value in values.items() if value is None and is_dataclass(hints[name])]
    return made(**values | {name: hints[name]() for name in null})
