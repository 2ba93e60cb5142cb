"""From the arguments of a command to its config: positional arguments, recipes, flags and switches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from posttrain.commands.flags import COMMAND_LINE, CommandSpec, asks_help, given_flags, read_flags, yaml_value
from posttrain.config import Config, SftConfig, build
from posttrain.config.reading import checked_sections, recipe_kind
from posttrain.config.recipes import VARIANTS, RecipeLayer, merge, read_recipe
from posttrain.config.run_trust import trusted
from posttrain.config.schema import section_names
from posttrain.config.sections import require_complete
from posttrain.errors import UserError
from posttrain.options.adapter import is_adapter_folder, is_run_folder, run_model
from posttrain.options.model import ModelOptions
from posttrain.runs.same_recipe import run_recipe

Built = TypeVar("Built")

INTERRUPTED = 130
"""The exit code of a run that was asked to stop, as shells know it."""

BY_PATH = ("model",)
"""Sections of supervised runs whose `path` decides which other options they have."""
TEMPLATE = ("model.chat_template", "model.template_options")
"""How a model is spoken to: options of the commands that ask one."""
PICTURES = (".png", ".svg", ".pdf")
"""What the name of a picture may end in."""
MAY_CHANGE_ON_RESUME = (
    "run.num_steps",
    "run.time_limit_minutes",
    "run.token_limit",
    "run.early_stop_evaluations",
    "run.report_to",
    "run.keep_token_columns",
    "rollout.keep_alternatives",
    "checkpoint",
    "tracker",
    "model.path",
)
"""How long a run goes on, what it keeps, and where its model is; all else is what made it the run that it is."""


RESUME_ONLY = ("from_step", "accept_changes")
"""Switches that say how a run is resumed."""
LOADING = tuple(
    f"model.{name}"
    for name in (
        *("revision", "trust_remote_code", "dtype", "weights", "device", "attn_implementation", "context"),
        "stop_tokens",
    )
)
"""Options by which a model is loaded that is asked and not trained."""


@dataclass(frozen=True, kw_only=True)
class TrustSwitch:
    """Of commands that do what the recipe in a run folder says."""

    trust_code: bool = False
    """Import the code that the recipe in a run folder names, and let the recipe act on this machine, though nobody has
    run it here before; it is remembered."""


@dataclass(frozen=True, kw_only=True)
class SplitArguments:
    """The arguments of a command, told apart."""

    positional: Sequence[str]
    """Those before the first flag, and recipe files wherever they stand."""
    flags: Sequence[str]

    def first(self, name: str, program: CommandSpec) -> "tuple[str, SplitArguments]":
        """The first positional argument, which the command cannot do without, and the rest."""
        if self.positional:
            return self.positional[0], replace(self, positional=self.positional[1:])
        if asks_help(self.flags):
            return name, self  # for the help any value does
        raise UserError(f"{COMMAND_LINE}: {name} is missing: {program.name} [--FLAGS ...]")

    def model(self, program: CommandSpec) -> "tuple[str, SplitArguments]":
        """The model that the command is about, and the rest."""
        return self.first("MODEL", program)

    @property
    def trusts_code(self) -> bool:
        """Whether `--trust-code` is given: it decides how recipes are read."""
        return any(flag.path == "trust_code" and flag.word != "false" for flag in given_flags(self.flags))

    def require_no_more(self, program: CommandSpec) -> None:
        """Refuse positional arguments that the command has no use for."""
        if self.positional:
            raise UserError(f"{COMMAND_LINE}: no use for {' '.join(self.positional)}: {program.name} [--FLAGS ...]")


OF_FILES = ("--judge.principles", "--behaviours.file")
"""Flags whose value may be a .yaml file that is no recipe."""


def split_arguments(arguments: Sequence[str]) -> SplitArguments:
    """Positional arguments come first; a `.yaml` file is a recipe wherever it stands, but behind one of `OF_FILES`."""
    first_flag = next((i for i, each in enumerate(arguments) if each.startswith("-")), len(arguments))
    late: list[str] = []
    flags: list[str] = []
    for before, each in pairwise(["", *arguments[first_flag:]]):
        (late if is_recipe_file(each) and before not in OF_FILES else flags).append(each)
    return SplitArguments(positional=[*arguments[:first_flag], *late], flags=flags)


def is_recipe_file(argument: str) -> bool:
    """Whether an argument can only be a recipe."""
    return argument.endswith((".yaml", ".yml")) and not argument.startswith("-")


def configured(
    kind: type[Built],
    layers: Sequence[RecipeLayer],
    flags: Sequence[str],
    program: CommandSpec,
    *,
    to_run: bool = True,
) -> tuple[Built, Any]:
    """The config of some layers under the flags, and the command's own switches."""
    layers, switches = with_flags(kind, layers, flags, program)
    for name in RESUME_ONLY:  # of a command that resumes runs, when it begins a new one
        if name in vars(switches) and vars(switches)[name]:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{COMMAND_LINE}: {flag} is for a run that is resumed; give --resume RUN, or leave it out.")
    return build(kind, layers, require=require_complete, to_run=to_run), switches


def with_flags(
    kind: type, layers: Sequence[RecipeLayer], flags: Sequence[str], program: CommandSpec
) -> tuple[list[RecipeLayer], Any]:
    """Some layers with that of the flags above them, and the command's own switches."""
    read = [name for name in section_names(kind) if program.reads(f"{name}.path")]
    layers = [*layers, variants(flags, read, BY_PATH if kind is SftConfig else ())]
    content = checked_sections(kind, merge(layers))
    given, switches = read_flags(flags, program, content)
    return [*layers, given], switches


def variants(flags: Sequence[str], read: Sequence[str], by_path: Sequence[str] = ()) -> RecipeLayer:
    """The task, the algorithm and, where it may be new, the model that flags name: they decide which others exist.

    Only of sections that are `read`: nothing else is imported.
    """
    sections: dict[str, dict[str, object]] = {}
    for flag in given_flags(flags):
        section, _, option = flag.path.partition(".")
        value = flag.word
        if section not in read:
            continue
        if (section in VARIANTS and option in ("name", "path")) or (section in by_path and option == "path"):
            sections.setdefault(section, {})[option] = value
        elif (section, option) == ("dpo", "rounds") and value.isdecimal():  # without any, no task is imported
            sections.setdefault(section, {})[option] = int(value)
        elif (section, option) == ("task", "sources"):  # several data sets, and so the task that reads them
            sections.setdefault(section, {})[option] = yaml_value(flag.spelled, value)
    return RecipeLayer(where=COMMAND_LINE, sections=sections)


def recipe_layers(given: SplitArguments) -> list[RecipeLayer]:
    """Recipe files, left to right; where code is trusted, that of a run like any other."""
    layers = [read_recipe(recipe) for recipe in given.positional]
    return [trusted(layer) for layer in layers] if given.trusts_code else layers


def model_layer(given: str) -> RecipeLayer:
    """A model that is named by position, by its folder or by that of the run that trained it.

    Of a run the options of its chat template too: the model is asked as it was trained.
    """
    folder = run_model(Path(given))
    section: dict[str, object] = {"path": given if folder == Path(given) else str(folder)}
    section |= section_of_run(given, "model", ("template_options",))
    if is_run_folder(Path(given)):
        section |= {"chat_template": "", "frozen": []}  # the template is in what the run has saved
        if not (folder / "config.json").is_file() and not is_adapter_folder(folder):
            raise UserError(
                f"{given}: the folder of a run that has saved no model; it does so when it ends.  Go on with it by"
                f" --resume {given}, or name the folder of a model."
            )
        if is_adapter_folder(folder):  # over the base as it was trained
            section |= section_of_run(given, "model", ("quantization",))
        else:
            section |= {"adapter": None, "quantization": None}
    return RecipeLayer(where=COMMAND_LINE, sections={"model": section})


def section_of_run(given: str, section: str, options: Sequence[str]) -> dict[str, Any]:
    """What the recipe of a run says of some options of a section, those that it has; nothing where it is no run."""
    if not is_run_folder(Path(given)):
        return {}
    content = run_recipe(Path(given)).sections.get(section)
    return {name: content[name] for name in options if name in content} if isinstance(content, dict) else {}


def layers_for_model(model: str, given: SplitArguments) -> list[RecipeLayer]:
    """What a model is to be measured by: recipes that are named, or else, for the folder of a run, the run's own.

    Of a run of another kind its task alone.
    """
    layers = recipe_layers(given)
    if is_run_folder(Path(model)) and not given.positional:
        own = run_recipe(Path(model))
        own = trusted(own) if given.trusts_code else own
        task = {name: section for name, section in own.sections.items() if name == "task"}
        layers = [own if recipe_kind([own]) is Config else replace(own, sections=task)]
    return [*layers, model_layer(model)]


def require_model(options: ModelOptions) -> None:
    """Refuse a folder that is no model, a missing file, or a device that is not there, before anything is loaded."""
    options.require_files()
    if options.device == "cuda":
        from posttrain.models.loading.devices import chosen_device

        chosen_device(options.device)


def resumed(
    kind: type[Built],
    folder: str,
    arguments: SplitArguments,
    program: CommandSpec,
    *,
    may_change: tuple[str, ...] = MAY_CHANGE_ON_RESUME,
) -> tuple[Built, Any]:
    """The config of the run in a folder; it may go on for longer than it was meant to, and changes in nothing else."""
    if arguments.positional:
        raise UserError(
            f"{COMMAND_LINE}: --resume {folder} continues with the recipe of that run; leave out"
            f" {' '.join(arguments.positional)}"
        )
    recipe = run_recipe(Path(folder))
    recipe = trusted(recipe) if arguments.trusts_code else recipe
    for flag in given_flags(arguments.flags):
        if "." in flag.path and not flag.path.startswith(may_change):
            allowed = ", ".join(may_change)
            raise UserError(
                f"{COMMAND_LINE}: {flag.spelled}: a resumed run keeps its recipe; only {allowed} may change."
                "  For another recipe start another run."
            )
    here = RecipeLayer(where=COMMAND_LINE, sections={"run": {"folder": folder, "overwrite": False}})
    layers, switches = with_flags(kind, [recipe, here], arguments.flags, program)
    return build(kind, layers), switches  # whether it is complete depends on what the run was given in Python


def switch_value(flag: str, arguments: SplitArguments) -> str:
    """The value of a switch that decides how the rest is read; empty where it is not given."""
    path = flag.replace("-", "_")
    return next((each.word for each in given_flags(arguments.flags) if each.path == path), "")


def picture_file(given: str) -> Path:
    """The file that `--picture` names.  Raises UserError, before anything is computed, where none can be drawn."""
    file = Path(given)
    if not file.parent.is_dir() or file.suffix.lower() not in PICTURES:
        raise UserError(
            f"{COMMAND_LINE}: --picture {given}: name a file in a folder that exists, whose name ends in"
            f" {', '.join(PICTURES)}."
        )
    return file
