"""What can be known of phases before the first one runs: that all which is no earlier phase's is there and fits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.algorithms.table import build_algorithm
from posttrain.config import Config
from posttrain.errors import UserError
from posttrain.options.dataset import DatasetOptions
from posttrain.options.model import ModelOptions
from posttrain.rewards.reward_registry import load_reward
from posttrain.training.phases.phase_list import Phase

ROW_FILES = {".jsonl", ".json", ".csv", ".tsv", ".parquet"}


@dataclass(frozen=True, slots=True)
class Named:
    """A path that an option of a phase names."""

    option: str
    path: str


def require_startable(phases: Sequence[Phase]) -> None:
    """Refuse a phase that would fail when its turn comes: for a file, a model, a reward or a group that is not there.

    What an earlier phase makes is not looked for, and a finished phase is not looked at.  Raises UserError naming the
    phase.
    """
    earlier: dict[str, Phase] = {}
    for phase in phases:
        config = phase.config(earlier)
        if not (phase.folder / "summary.json").is_file():
            try:
                require_its_own(config, phase.folder.parent)
            except UserError as error:
                raise UserError(f"phase {phase.name}: {error}") from error
        earlier[phase.name] = phase


def require_its_own(config: Any, made: Path) -> None:
    """Refuse what is not there of a config, but for what lies in `made`, the folder of all phases."""
    for named in named_models(config):
        if not is_below(named.path, made):
            require_model_folder(named)
    for named in named_rows(getattr(config, "task", None)):
        if not is_below(named.path, made) and Path(named.path).suffix in ROW_FILES and not rows_are_there(named.path):
            raise UserError(f"{named.option} = {named.path}: no such file of rows.")
    if not isinstance(config, Config):
        return
    if config.update.optimizer_from:
        require_run(config.update.optimizer_from, made)
    for reward in config.rewards:
        if not (reward.model or reward.ensemble):
            load_reward(reward)
    config.require_suits(build_algorithm(config.algorithm))


def named_models(config: Any) -> Iterator[Named]:
    """The folders of models that a config names, and where it does so."""
    if isinstance(model := getattr(config, "model", None), ModelOptions):
        yield Named("model.path", model.path)
    if not isinstance(config, Config):
        return
    if config.reference.path:
        yield Named("reference.path", config.reference.path)
    teacher = config.algorithm.get("teacher")
    if isinstance(teacher, dict) and teacher.get("model"):
        yield Named("algorithm.teacher.model", str(teacher["model"]))
    for place, reward in enumerate(config.rewards):
        for path in (reward.model, *reward.ensemble):
            if path:
                yield Named(f"rewards[{place}].model", path)


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
        if path
    )


def is_below(path: str, folder: Path) -> bool:
    """Whether a path lies in a folder, as both are written."""
    return folder in Path(path).parents


def rows_are_there(path: str) -> bool:
    """Whether a file is there, or one that a pattern such as data/*.jsonl means."""
    return Path(path).exists() or any(Path(path).parent.glob(Path(path).name))


def require_model_folder(named: Named) -> None:
    """Refuse a path that is no folder of a model, as the option calls it."""
    try:
        ModelOptions(path=named.path).require_folder()
    except UserError as error:
        raise UserError(str(error).replace("model.path = ", f"{named.option} = ")) from error


def require_run(path: str, made: Path) -> None:
    """Refuse what is no run's folder to take an optimiser from."""
    option = f"update.optimizer_from = {path}"
    if is_below(path, made):
        if Path(path).parent != made:
            raise UserError(f"{option}: is no folder of a run.  `run:NAME` is that of an earlier phase.")
    elif not Path(path, "config.yaml").is_file():
        raise UserError(f"{option}: no folder of a run is there.")
