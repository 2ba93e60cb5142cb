"""What can be known of phases before the first one runs: that all which is no earlier phase's is there and fits."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.algorithms.table import build_algorithm
from posttrain.config import Config
from posttrain.errors import UserError
from posttrain.options.dataset import BUNDLED_PROGRAMS, DatasetOptions
from posttrain.options.model import ModelOptions
from posttrain.rewards.reward_registry import load_reward
from posttrain.runs.run_folder import CONTENTS
from posttrain.tasks.row_files.rows import files_of, is_on_hub, near_file
from posttrain.training.collection.collection_folder import CollectionFolder
from posttrain.training.phases.phase_list import NO_MODEL, Phase

OF_TRAINING = (*CONTENTS, "tokenizer", "evaluations")
"""What lies in the folder of a run that trains a model."""


@dataclass(frozen=True, slots=True)
class Named:
    """A path that an option of a phase names."""

    option: str
    path: str


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
    for named in (*named_models(config), *named_folders(config)):
        if not is_made_by(earlier, named):
            require_folder(named)
    for named in named_rows(getattr(config, "task", None)):
        if not is_made_by(earlier, named):
            require_rows(named)
    require_code(config, earlier)
    if not isinstance(config, Config):
        return
    if config.update.optimizer_from:
        require_run(config.update.optimizer_from, earlier)
    config.require_suits(build_algorithm(config.algorithm))


def require_code(config: Any, earlier: Mapping[Path, Phase]) -> None:
    """Refuse a chat template or a reward that is not there."""
    template = getattr(getattr(config, "model", None), "chat_template", "")
    if template and not is_made_by(earlier, Named("model.chat_template", template)):
        ModelOptions(chat_template=template).require_files()
    for reward in getattr(config, "rewards", ()):
        if not (reward.model or reward.ensemble):
            load_reward(reward)


def named_models(config: Any) -> Iterator[Named]:
    """The folders of models that a config names, and where it does so."""
    if isinstance(model := getattr(config, "model", None), ModelOptions):
        yield Named("model.path", model.path)
    for place, reward in enumerate(getattr(config, "rewards", ())):
        for path in (reward.model, *reward.ensemble):
            if path:
                yield Named(f"rewards[{place}].model", path)
    if not isinstance(config, Config):
        return
    if config.reference.path:
        yield Named("reference.path", config.reference.path)
    teacher = config.algorithm.get("teacher")
    if isinstance(teacher, Mapping) and teacher.get("model"):
        yield Named("algorithm.teacher.model", str(teacher["model"]))


def named_folders(config: Any) -> Iterator[Named]:
    """The folders that a critic starts from, which need not be those of whole models."""
    critic = config.algorithm.get("critic") if isinstance(config, Config) else None
    for option in ("path", "warm_start"):
        if isinstance(critic, Mapping) and critic.get(option):
            yield Named(f"algorithm.critic.{option}", str(critic[option]))


def named_rows(task: object) -> Iterator[Named]:
    """The rows that a task names, and where it does so."""
    if not isinstance(task, DatasetOptions):
        return
    yield from (
        Named(option, path)
        for option, path in [
            ("task.path", task.path),
            ("task.held_out_path", task.held_out_path),
            *((f"task.sources[{place}].path", source.path) for place, source in enumerate(task.sources)),
        ]
        if path not in ("", BUNDLED_PROGRAMS)
    )


def is_made_by(earlier: Mapping[Path, Phase], named: Named) -> bool:
    """Whether a path is in the folder of an earlier phase.  Raises UserError where that phase never makes it."""
    path = Path(named.path)
    run = next((folder for folder in earlier if folder == path or folder in path.parents), None)
    if run is None:
        return False
    if path == run:  # which phase:NAME is while that phase is begun and has no model yet
        return True
    phase, here = earlier[run], f"{named.option} = {named.path}"
    below = path.relative_to(run)
    makes = {"collect": CollectionFolder.contents, "irl": (below.parts[0],)}.get(phase.command, OF_TRAINING)
    if below.parts[0] not in makes and not path.exists():
        raise UserError(
            f"{here}: phase {phase.name} makes no {below}.  `posttrain {phase.command}` leaves {', '.join(makes)}."
        )
    return True


def require_rows(named: Named) -> None:
    """Refuse rows that are neither here nor, by their name, on the hub."""
    if files_of(named.path) or Path(named.path).is_dir() or is_on_hub(named.path):
        return
    raise UserError(
        f"{named.option} = {named.path}: no such file of rows{near_file(Path(named.path))}.  Put it there before the"
        " first phase runs (a bundled recipe says at its top which program writes its rows); paths are relative to the"
        " folder you run in.  Rows that an earlier phase writes are run:NAME/FILE."
    )


def require_folder(named: Named) -> None:
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
