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
from posttrain.config.sections import section_names
from posttrain.errors import UserError
from posttrain.options.bounds import Bounded
from posttrain.options.model import ModelOptions, is_adapter_folder, is_run_folder, run_model
from posttrain.ranks.group import leads
from posttrain.runs.named_inputs import MAY_CHANGE, run_recipe

Built = TypeVar("Built")

INTERRUPTED = 130
"""The exit code of an interrupted run, as in shells."""
TEMPLATE = ("model.chat_template", "model.template_options")
"""Chat template options of the commands that ask a model."""
PICTURES = (".png", ".svg", ".pdf")
MAY_CHANGE_ON_RESUME = ("model.path", *sorted(MAY_CHANGE - {"run.folder", "run.overwrite"}))
"""Options of a run that flags may change; the model may have moved, and --resume itself names the folder."""
LOADING = (
    *("model.revision", "model.trust_remote_code", "model.dtype", "model.weights", "model.device"),
    *("model.attn_implementation", "model.context", "model.stop_tokens"),
)
"""Options that load a model without training it."""
OF_FILES = ("--judge.principles", "--behaviours.file")
"""Flags whose value may be a .yaml file that is not a recipe."""


@dataclass(frozen=True, kw_only=True)
class TrustSwitch(Bounded):
    """For commands that follow the recipe in a run folder."""

    trust_code: bool = False
    """Trust the recipe in a run folder: import the code that it names, and let it act on this machine, even if it was
    never run here.  The choice is remembered."""


@dataclass(frozen=True, kw_only=True)
class SplitArguments:
    """The positional arguments and the flags of a command."""

    program: CommandSpec
    positional: Sequence[str]
    """Those before the first flag, and recipe files anywhere."""
    flags: Sequence[str]

    def first(self, name: str) -> "tuple[str, SplitArguments]":
        """The required first positional argument, and the rest."""
        if self.positional:
            return self.positional[0], replace(self, positional=self.positional[1:])
        if asks_help(self.flags):
            return name, self  # for the help any value does
        raise UserError(f"{COMMAND_LINE}: {name} is missing.  Usage: {self.program.name} [--FLAGS ...]")

    def only(self, name: str) -> "tuple[str, SplitArguments]":
        first, rest = self.first(name)
        if rest.positional:
            stray = " ".join(rest.positional)
            raise UserError(f"{COMMAND_LINE}: unexpected argument {stray}.  Usage: {self.program.name} [--FLAGS ...]")
        return first, rest

    def switch(self, name: str) -> str:
        """The value of a switch that decides how the other arguments are read; empty if it is not given."""
        return next((flag.word for flag in given_flags(self.flags) if flag.path == name), "")

    def trust(self, layer: RecipeLayer) -> RecipeLayer:
        """A recipe, read as `--trust-code` says."""
        trusts = any(flag.path == "trust_code" and flag.word != "false" for flag in given_flags(self.flags))
        return trusted(layer) if trusts else layer

    def recipes(self) -> list[RecipeLayer]:
        return [self.trust(read_recipe(recipe)) for recipe in self.positional]

    def configured(
        self, kind: type[Built], layers: Sequence[RecipeLayer], *, to_run: bool = True, loads_model: bool = True
    ) -> tuple[Built, Any]:
        """The config from some layers, overridden by the flags, and the command's own switches.

        If the model will be loaded, a missing or invalid model folder, file or device is an error first.
        """
        layers, switches = self.with_flags(kind, layers)
        for name in ("from_step", "accept_changes"):
            if getattr(switches, name, None):
                flag = f"--{name.replace('_', '-')} is only for resuming a run"
                raise UserError(f"{COMMAND_LINE}: {flag}.  Add --resume RUN, or leave it out.")
        config = build(kind, layers, final=True, to_run=to_run)
        model = getattr(config, "model", None)
        if loads_model and leads() and isinstance(model, ModelOptions):  # other ranks may lack its files
            model.require_files()
            if model.device == "cuda":
                from posttrain.models.loading.devices import chosen_device

                chosen_device(model.device)
        return config, switches

    def resumed(
        self, kind: type[Built], folder: str, *, may_change: tuple[str, ...] = MAY_CHANGE_ON_RESUME
    ) -> tuple[Built, Any]:
        """The config of the run in a folder; flags may change its length and little else."""
        if self.positional:
            given = " ".join(self.positional)
            raise UserError(f"{COMMAND_LINE}: --resume {folder} uses the recipe of that run.  Leave out {given}.")
        for flag in given_flags(self.flags):
            if "." in flag.path and not flag.path.startswith(may_change):
                rule = f"a resumed run keeps its recipe; only {', '.join(may_change)} may change"
                raise UserError(f"{COMMAND_LINE}: {flag.spelled}: {rule}.  For other changes, start another run.")
        recipe = self.trust(run_recipe(Path(folder)))
        here = RecipeLayer(where=COMMAND_LINE, sections={"run": {"folder": folder, "overwrite": False}})
        layers, switches = self.with_flags(kind, [recipe, here])
        return build(kind, layers), switches  # whether it is complete depends on what the run was given in Python

    def with_flags(self, kind: type, layers: Sequence[RecipeLayer]) -> tuple[list[RecipeLayer], Any]:
        read = [name for name in section_names(kind) if self.program.reads(f"{name}.path")]
        layers = [*layers, variants(self.flags, read, ("model",) if kind is SftConfig else ())]
        given, switches = read_flags(self.flags, self.program, checked_sections(kind, merge(layers)))
        return [*layers, given], switches


def split_arguments(arguments: Sequence[str], program: CommandSpec) -> SplitArguments:
    """Positional arguments come first; a `.yaml` file is a recipe everywhere except after one of `OF_FILES`."""
    first_flag = next((i for i, each in enumerate(arguments) if each.startswith("-")), len(arguments))
    late: list[str] = []
    flags: list[str] = []
    for before, each in pairwise(["", *arguments[first_flag:]]):
        is_recipe = each.endswith((".yaml", ".yml")) and not each.startswith("-") and before not in OF_FILES
        (late if is_recipe else flags).append(each)
    return SplitArguments(program=program, positional=[*arguments[:first_flag], *late], flags=flags)


def variants(flags: Sequence[str], read: Sequence[str], by_path: Sequence[str]) -> RecipeLayer:
    """The task, the algorithm and, for supervised runs, the model named by flags: they decide which options exist.

    Only for sections that are `read`; nothing else is imported.
    """
    sections: dict[str, dict[str, object]] = {}
    for flag in given_flags(flags):
        section, _, option = flag.path.partition(".")
        if section not in read:
            continue
        if (section in VARIANTS and option in ("name", "path")) or (section in by_path and option == "path"):
            sections.setdefault(section, {})[option] = flag.word
        elif (section, option) == ("dpo", "rounds") and flag.word.isdecimal():  # without any, no task is imported
            sections.setdefault(section, {})[option] = int(flag.word)
        elif (section, option) == ("task", "sources"):  # several data sets, and so the task that reads them
            sections.setdefault(section, {})[option] = yaml_value(flag.spelled, flag.word)
    return RecipeLayer(where=COMMAND_LINE, sections=sections)


def model_layer(given: str) -> RecipeLayer:
    """A model, named by its folder or by the folder of the run that trained it.

    A run's chat template options are kept: the model is asked as it was trained.
    """
    folder = run_model(Path(given))
    section: dict[str, object] = {"path": given if folder == Path(given) else str(folder)}
    section |= section_of_run(given, "model", ("template_options",))
    if is_run_folder(Path(given)):
        section |= {"chat_template": "", "frozen": []}  # the template is in what the run has saved
        if not (folder / "config.json").is_file() and not is_adapter_folder(folder):
            rule = f"this run saves its model at its end.  Continue it with --resume {given}, or name another folder"
            raise UserError(f"{given}: {rule}.")
        if is_adapter_folder(folder):  # over the base as it was trained
            section |= section_of_run(given, "model", ("quantization",))
        else:
            section |= {"adapter": None, "quantization": None}
    return RecipeLayer(where=COMMAND_LINE, sections={"model": section})


def section_of_run(given: str, section: str, options: Sequence[str]) -> dict[str, Any]:
    """Some options of a section of a run's recipe, if they are set; empty if the folder is not a run."""
    if not is_run_folder(Path(given)):
        return {}
    content = run_recipe(Path(given)).sections.get(section)
    return {name: content[name] for name in options if name in content} if isinstance(content, dict) else {}


def layers_for_model(model: str, given: SplitArguments) -> list[RecipeLayer]:
    layers = given.recipes()
    if is_run_folder(Path(model)) and not given.positional:
        own = given.trust(run_recipe(Path(model)))
        task = {name: section for name, section in own.sections.items() if name == "task"}
        layers = [own if recipe_kind([own]) is Config else replace(own, sections=task)]
    return [*layers, model_layer(model)]


def picture_file(given: str) -> Path:
    """The file of `--picture`.  Raises UserError if it cannot be written."""
    file = Path(given)
    if not file.parent.is_dir() or file.suffix.lower() not in PICTURES:
        rule = f"name a file in an existing folder, ending in {', '.join(PICTURES)}."
        raise UserError(f"{COMMAND_LINE}: --picture {given}: {rule}")
    return file
