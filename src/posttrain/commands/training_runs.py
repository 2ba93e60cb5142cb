"""The common part of the commands that train a model: `posttrain rl`, `sft`, `reward-model` and `dpo`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from posttrain.commands.arguments import (
    INTERRUPTED,
    TrustSwitch,
    configured,
    require_model,
    resumed,
    split_arguments,
)
from posttrain.commands.flags import CommandSpec
from posttrain.config import TrainingConfig
from posttrain.config.reading import COMMAND_OF
from posttrain.options.model import ModelOptions
from posttrain.runs.interruption import stopped_while_loading

Kind = TypeVar("Kind", bound=TrainingConfig)


@dataclass(frozen=True, kw_only=True)
class TrainingSwitches(TrustSwitch):
    """Switches of the commands that train."""

    dry_run: bool = False
    """Show the plan, with seconds per step from one timed step, and the first completions, rows or pairs; train
    nothing."""
    resume: str = ""
    """Continue the run in this folder from its last checkpoint."""
    from_step: int | None = None
    """With --resume: continue from the checkpoint of this step; later results are removed."""
    accept_changes: bool = False
    """With --resume: continue although model, rows, rewards or files have changed; inputs.json notes it."""


def run_training_command(
    kind: type[Kind], program: CommandSpec, act: Callable[[Kind, Any, str, bool], int], arguments: Sequence[str]
) -> int:
    """Read the recipe, or that of the resumed run, and call `act` with it, the switches, recipe names and `resume`."""
    command = next(name for each, name in COMMAND_OF.items() if each is kind)
    given = split_arguments(arguments)
    folder = given.switch("resume")
    with stopped_while_loading(folder, command):
        if folder:
            config, switches = resumed(kind, folder, given, program)
        else:
            config, switches = configured(kind, given.recipes(), given.flags, program)
            if isinstance(config.model, ModelOptions):
                require_model(config.model)
        return act(config, switches, " ".join(given.positional), bool(folder))


def fit_command(kind: type[Kind], program: CommandSpec, module: str, train: str, show: str) -> Callable[..., int]:
    """The `main` of a command on rows or pairs; its functions `train` and `show` are imported when needed."""

    def act(config: Kind, switches: TrainingSwitches, recipe: str, resume: bool) -> int:
        functions = import_module(module)
        if switches.dry_run:
            getattr(functions, show)(config)
            return 0
        start = {"from_step": switches.from_step, "accept_changes": switches.accept_changes}
        run = getattr(functions, train)(config, resume=resume, **start)
        return INTERRUPTED if run.interrupted else 0

    return partial(run_training_command, kind, program, act)
