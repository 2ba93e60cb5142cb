"""The phases of a recipe: each is a recipe that can name results of earlier phases; all are checked before the start.

`phase:NAME` is the model that a phase trained (a whole model or an adapter), `run:NAME` the folder of its run, and
`run:NAME/FILE` a file in that folder.  Nothing else is carried over.  docs/guides/phases.md has an example.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.algorithms.table import build_algorithm
from posttrain.commands.collection.collection import CollectionFolder
from posttrain.config import Config
from posttrain.config.reading import COMMAND_OF, build, recipe_kind
from posttrain.config.recipes import RecipeLayer, find_recipe, merge, read_recipe
from posttrain.config.run_trust import trusted
from posttrain.errors import UserError
from posttrain.options.model import ModelOptions, run_model
from posttrain.rewards.reward_registry import load_reward
from posttrain.runs.named_inputs import NamedInput, named_options
from posttrain.runs.run_folder import CONTENTS
from posttrain.tasks.row_files.rows import files_of, is_on_hub, near_file

EARLIER = re.compile(r"^(phase|run):([\w.+-]+)(/.*)?$")
NAME = re.compile(r"[\w.+-]+")
NO_MODEL = ("collect", "irl")
"""Commands that do not save a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase, as its recipe describes it."""

    name: str
    number: int
    """From 1."""
    layers: Sequence[RecipeLayer]
    folder: Path

    @property
    def recipe_file(self) -> Path:
        """The recipe that it started with, next to its folder."""
        return self.folder.with_name(f"{self.folder.name}.yaml")

    @property
    def command(self) -> str:
        return COMMAND_OF[recipe_kind(self.layers)]

    def config(self, earlier: "Mapping[str, Phase]") -> Any:
        """The config of its run, with names of earlier results replaced by folders."""
        where = f"phase {self.name}"
        merged = merge(self.layers)
        sections = replaced(merged.sections, lambda found: phase_folder(found, earlier, where))
        assert isinstance(sections, dict)
        of_run = next(iter(merged.of_runs.values()), None)
        place = RecipeLayer(where=where, sections={"run": {"folder": str(self.folder), "overwrite": False}})
        return build(recipe_kind(self.layers), [RecipeLayer(where=where, sections=sections, run_digest=of_run), place])

    def takes_over(self) -> dict[str, str]:
        """Earlier results that it names, as written -> the names of their phases."""
        named: list[re.Match[str]] = []
        replaced(merge(self.layers).sections, named.append)
        return {found.group(): found[2] for found in named}


def read_phases(recipe: str, folder: Path, *, trust_code: bool = False) -> list[Phase]:
    """The phases of a recipe file; their runs are saved in a folder.

    Raises UserError if there are none, if a config is invalid, or if one names a phase that is not before it.
    """
    path = find_recipe(recipe)
    shared = dict(read_recipe(str(path)).sections)
    listed = shared.pop("phases", None)
    if not isinstance(listed, list) or not listed:
        raise UserError(f"{path}: phases = {listed!r:.60}: give a list of phases, each with a name and a recipe.")
    under = RecipeLayer(where=str(path), sections=shared)
    earlier: dict[str, Phase] = {}
    for number, item in enumerate(listed, start=1):
        where = f"{path}: phases[{number - 1}]"
        name, layers = read_phase(item, path, where)
        layers = [trusted(layer) for layer in layers] if trust_code else layers
        if name in earlier:
            raise UserError(f"{where}: an earlier phase is called {name} too.  Give each its own name.")
        place = folder / "phases" / f"{number}-{name}"
        phase = Phase(name=name, number=number, layers=[*layers[:-1], under, layers[-1]], folder=place)
        phase.config(earlier)
        earlier[name] = phase
    return list(earlier.values())


def read_phase(item: object, path: Path, where: str) -> tuple[str, list[RecipeLayer]]:
    """The name of a phase and the layers of its recipe, with its own sections last."""
    known = isinstance(item, Mapping) and set(item) <= {"name", "recipe", "sections"}
    if not isinstance(item, Mapping) or not known or not isinstance(item.get("name"), str):
        raise UserError(f"{where}: {item!r:.80} is not a phase; use {{name: NAME, recipe: RECIPE, sections: {{...}}}}.")
    name, recipe, sections = item["name"], item.get("recipe", []), item.get("sections") or {}
    if not NAME.fullmatch(name):
        raise UserError(f"{where}: name = {name!r}: use letters, digits, dots, dashes and underscores.")
    if not isinstance(sections, Mapping):
        raise UserError(f"{where}: sections = {sections!r:.60}: give a mapping of sections, as a recipe has them.")
    recipes = [recipe] if isinstance(recipe, str) else recipe
    if not isinstance(recipes, list) or not all(isinstance(each, str) for each in recipes):
        raise UserError(f"{where}: recipe = {recipe!r:.60}: give the name or file of a recipe, or a list of them.")
    files = [path.parent / each if (path.parent / each).is_file() else each for each in recipes]
    return name, [*(read_recipe(str(each)) for each in files), RecipeLayer(where=where, sections=dict(sections))]


def replaced(value: object, change: Callable[[re.Match[str]], object]) -> object:
    """Sections with each `phase:NAME` and `run:NAME` replaced."""
    match value:
        case dict():
            return {key: replaced(item, change) for key, item in value.items()}
        case list():
            return [replaced(item, change) for item in value]
        case str() if found := EARLIER.match(value):
            return change(found)
    return value


def phase_folder(found: re.Match[str], earlier: Mapping[str, Phase], where: str) -> str:
    """The folder that `phase:NAME` or `run:NAME` means."""
    kind, name, below = found.groups(default="")
    given = f"{where}: {found.group()}"
    if name not in earlier:
        before = f"The earlier ones are {', '.join(earlier)}." if earlier else "It is the first one."
        raise UserError(f"{given}: there is no earlier phase of that name.  {before}")
    run = earlier[name].folder
    if kind == "run":
        return f"{run}{below}"
    if below:
        raise UserError(f"{given}: phase: names a model.  For a file of the phase's run, use run:{name}{below}.")
    if earlier[name].command in NO_MODEL:
        raise UserError(f"{given}: a phase of `posttrain {earlier[name].command}` does not train a model.")
    return str(run_model(run) if run.is_dir() else run / "model")


def require_startable(phases: Sequence[Phase]) -> None:
    """Reject a phase that would fail later because a file, model or reward is missing.

    For inputs from an earlier phase, only checks that this phase makes such an output; finished phases are not checked.
    Raises UserError naming the phase.
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
    """Reject missing inputs of a config, and inputs from an earlier phase that never makes them."""
    critic = config.algorithm.get("critic") if isinstance(config, Config) else None
    warm_start = str(critic.get("warm_start", "")) if isinstance(critic, Mapping) else ""
    head = NamedInput("algorithm.critic.warm_start", "model", warm_start)  # which need not be that of a whole model
    for named in (*named_options(config), *([head] if warm_start else ())):
        if not is_made_by(earlier, named):
            require_there(named)
    for reward in getattr(config, "rewards", ()):
        if not (reward.model or reward.ensemble):
            load_reward(reward)
    if isinstance(config, Config):
        if config.update.optimizer_from:
            require_run(config.update.optimizer_from, earlier)
        config.require_suits(build_algorithm(config.algorithm))


def is_made_by(earlier: Mapping[Path, Phase], named: NamedInput) -> bool:
    """Whether a path is in the folder of an earlier phase.  Raises UserError if that phase never makes it."""
    path = Path(named.path)
    run = next((folder for folder in earlier if folder == path or folder in path.parents), None)
    if run is None or path == run:  # phase:NAME is the folder while that phase has no model yet
        return run is not None
    phase, below = earlier[run], path.relative_to(run)
    makes = {"collect": CollectionFolder.contents, "irl": (below.parts[0],)}.get(phase.command, CONTENTS)
    if below.parts[0] not in makes and not path.exists():
        rule = f"phase {phase.name} does not make {below}.  `posttrain {phase.command}` writes {', '.join(makes)}"
        raise UserError(f"{named.option} = {named.path}: {rule}.")
    return True


def require_there(named: NamedInput) -> None:
    """Reject a missing model, chat template or file of rows; rewards and algorithms are loaded elsewhere."""
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
            raise UserError(f"{option}: a phase of `posttrain {earlier[place].command}` does not have an optimiser.")
    elif any(folder in place.parents for folder in earlier):
        raise UserError(f"{option}: is not the folder of a run.  For an earlier phase, use `run:NAME`.")
    elif not Path(path, "config.yaml").is_file():
        raise UserError(f"{option}: does not contain a run.  Give the folder of a finished run, or run:NAME.")
