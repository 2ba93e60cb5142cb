"""Checks of phases before the first one runs: whatever no earlier phase makes must be there and fit."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.algorithms.table import build_algorithm
from posttrain.commands.collection.collection_folder import CollectionFolder
from posttrain.commands.phase_list import NO_MODEL, Phase
from posttrain.config import Config
from posttrain.errors import UserError
from posttrain.options.model import ModelOptions
from posttrain.rewards.reward_registry import load_reward
from posttrain.runs.named_inputs import NamedInput, named_model, named_options
from posttrain.runs.run_folder import CONTENTS
from posttrain.tasks.row_files.rows import files_of, is_on_hub, near_file


def require_startable(phases: Sequence[Phase]) -> None:
    """Refuse a phase that would fail when its turn comes: for a missing file, model or reward.

    For what an earlier phase makes, only whether that phase makes such a thing is checked; a finished phase is not
    checked.  Raises UserError naming the phase.
    """
    earlier: dict[str, Phase] = {}
    for phase in phases:
        config = phase.config(earlier)
        if not (phase.folder / "summary.json").is_file():
            try:
                require_its_own(config, {each.folder: each for each in earlier.values()})
            except UserError as error:
                raise UserError(f"phase {phase.name}: {error}") from error
        earlier[phase.name] = phase


def require_its_own(config: Any, earlier: Mapping[Path, Phase]) -> None:
    """Refuse missing inputs of a config, and those in the folder of an earlier phase which it never makes."""
    for named in (*named_options(config), *warm_start_inputs(config)):
        if not is_made_by(earlier, named):
            require_there(named)
    for reward in getattr(config, "rewards", ()):
        if not (reward.model or reward.ensemble):
            load_reward(reward)
    if isinstance(config, Config):
        if config.update.optimizer_from:
            require_run(config.update.optimizer_from, earlier)
        config.require_suits(build_algorithm(config.algorithm))


def warm_start_inputs(config: Any) -> Iterator[NamedInput]:
    """The folder that a critic's head starts from, which need not be that of a whole model."""
    critic = config.algorithm.get("critic") if isinstance(config, Config) else None
    if isinstance(critic, Mapping):
        yield from named_model("algorithm.critic.warm_start", str(critic.get("warm_start", "")))


def is_made_by(earlier: Mapping[Path, Phase], named: NamedInput) -> bool:
    """Whether a path is in the folder of an earlier phase.  Raises UserError if that phase never makes it."""
    path = Path(named.path)
    run = next((folder for folder in earlier if folder == path or folder in path.parents), None)
    if run is None or path == run:  # phase:NAME is the folder while that phase has no model yet
        return run is not None
    phase, below = earlier[run], path.relative_to(run)
    makes = {"collect": CollectionFolder.contents, "irl": (below.parts[0],)}.get(phase.command, CONTENTS)
    if below.parts[0] not in makes and not path.exists():
        rule = f"phase {phase.name} makes no {below}.  `posttrain {phase.command}` writes {', '.join(makes)}"
        raise UserError(f"{named.option} = {named.path}: {rule}.")
    return True


def require_there(named: NamedInput) -> None:
    """Refuse a missing model, chat template or file of rows; rewards and algorithms are loaded elsewhere."""
    given, path = f"{named.option} = {named.path}", Path(named.path)
    if named.option.endswith("chat_template"):
        ModelOptions(chat_template=named.path).require_files()
    elif named.kind == "rows" and not (files_of(named.path) or path.is_dir() or is_on_hub(named.path)):
        remedy = "Create it first (a bundled recipe says how at its top); rows of an earlier phase are run:NAME/FILE."
        raise UserError(f"{given}: no such file of rows{near_file(path)}.  {remedy}")
    elif named.kind == "model" and not (named.option.startswith("algorithm.critic.") and path.is_dir()):
        try:
            ModelOptions(path=named.path).require_folder()
        except UserError as error:
            raise UserError(str(error).replace("model.path = ", f"{named.option} = ")) from error


def require_run(path: str, earlier: Mapping[Path, Phase]) -> None:
    option, place = f"update.optimizer_from = {path}", Path(path)
    if place in earlier:
        if earlier[place].command in NO_MODEL:
            raise UserError(f"{option}: a phase of `posttrain {earlier[place].command}` has no optimiser.")
    elif any(folder in place.parents for folder in earlier):
        raise UserError(f"{option}: is not the folder of a run.  `run:NAME` is that of an earlier phase.")
    elif not Path(path, "config.yaml").is_file():
        raise UserError(f"{option}: no run is there.  Give the folder of a finished run, or run:NAME.")
