"""What can be known of phases before the first one runs: that all which is no earlier phase's is there and fits."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.algorithms.table import build_algorithm
from posttrain.commands.collection.collection_folder import CollectionFolder
from posttrain.commands.phase_list import NO_MODEL, Phase
from posttrain.config import Config
from posttrain.errors import UserError
from posttrain.options.model import ModelOptions
from posttrain.rewards.grading.function import load_reward
from posttrain.runs.named_inputs import NamedInput, named_model, named_options
from posttrain.runs.run_folder import CONTENTS
from posttrain.tasks.row_files.rows import files_of, is_on_hub, near_file


def require_startable(phases: Sequence[Phase]) -> None:
    """Refuse a phase that would fail when its turn comes: for a file, a model, a reward or a group that is not there.

    What an earlier phase makes is not looked for, only whether it is one that makes such a thing; a finished phase is
    not looked at.  Raises UserError naming the phase.
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
    """Refuse what is not there of a config; of what lies in the folders of earlier phases, what they never make."""
    for named in (*named_options(config), *warm_start_inputs(config)):
        if not is_made_by(earlier, named):
            require_there(named)
    require_rewards(config)
    if not isinstance(config, Config):
        return
    if config.update.optimizer_from:
        require_run(config.update.optimizer_from, earlier)
    config.require_suits(build_algorithm(config.algorithm))


def require_rewards(config: Any) -> None:
    """Refuse a reward that cannot be loaded."""
    for reward in getattr(config, "rewards", ()):
        if not (reward.model or reward.ensemble):
            load_reward(reward)


def warm_start_inputs(config: Any) -> Iterator[NamedInput]:
    """The folder that a critic's head starts from, which need not be that of a whole model."""
    critic = config.algorithm.get("critic") if isinstance(config, Config) else None
    if isinstance(critic, Mapping):
        yield from named_model("algorithm.critic.warm_start", str(critic.get("warm_start", "")))


def require_there(named: NamedInput) -> None:
    """Refuse a model, rows or a chat template that are not there; rewards and algorithms are loaded elsewhere."""
    if named.kind == "model":
        require_folder(named)
    elif named.kind == "rows":
        require_rows(named)
    elif named.option.endswith("chat_template"):
        ModelOptions(chat_template=named.path).require_files()


def is_made_by(earlier: Mapping[Path, Phase], named: NamedInput) -> bool:
    """Whether a path is in the folder of an earlier phase.  Raises UserError where that phase never makes it."""
    path = Path(named.path)
    run = next((folder for folder in earlier if folder == path or folder in path.parents), None)
    if run is None:
        return False
    if path == run:  # which phase:NAME is while that phase is begun and has no model yet
        return True
    phase, here = earlier[run], f"{named.option} = {named.path}"
    below = path.relative_to(run)
    makes = {"collect": CollectionFolder.contents, "irl": (below.parts[0],)}.get(phase.command, CONTENTS)
    if below.parts[0] not in makes and not path.exists():
        raise UserError(
            f"{here}: phase {phase.name} makes no {below}.  `posttrain {phase.command}` leaves {', '.join(makes)}."
        )
    return True


def require_rows(named: NamedInput) -> None:
    """Refuse rows that are neither here nor, by their name, on the hub."""
    if files_of(named.path) or Path(named.path).is_dir() or is_on_hub(named.path):
        return
    raise UserError(
        f"{named.option} = {named.path}: no such file of rows{near_file(Path(named.path))}.  Put it there before the"
        " first phase runs (a bundled recipe says at its top which program writes its rows); paths are relative to the"
        " folder you run in.  Rows that an earlier phase writes are run:NAME/FILE."
    )


def require_folder(named: NamedInput) -> None:
    """Refuse a path that is no folder of a model, as the option calls it; of a critic one that is no folder."""
    if named.option.startswith("algorithm.critic.") and Path(named.path).is_dir():
        return
    try:
        ModelOptions(path=named.path).require_folder()
    except UserError as error:
        raise UserError(str(error).replace("model.path = ", f"{named.option} = ")) from error


def require_run(path: str, earlier: Mapping[Path, Phase]) -> None:
    """Refuse what is no run's folder to take an optimiser from."""
    option, place = f"update.optimizer_from = {path}", Path(path)
    if place in earlier:
        if earlier[place].command in NO_MODEL:
            raise UserError(f"{option}: a phase of `posttrain {earlier[place].command}` has no optimiser.")
    elif any(folder in place.parents for folder in earlier):
        raise UserError(f"{option}: is no folder of a run.  `run:NAME` is that of an earlier phase.")
    elif not Path(path, "config.yaml").is_file():
        raise UserError(
            f"{option}: no folder of a run is there.  Give that of a finished run, or run:NAME of an earlier phase."
        )
