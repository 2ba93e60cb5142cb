"""Turns recipe files, flags and Python overrides into one config, or into one message with the mistakes; and back."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, overload

from posttrain.binding import is_own
from posttrain.config.fit_configs import ROWS_NEEDED, DpoConfig, RewardModelConfig, SftConfig
from posttrain.config.recipes import LISTS, MergedRecipe, RecipeLayer, merge, read_recipe, to_yaml
from posttrain.config.run_trust import READ_BY_IMPORT, require_trusted, require_trusted_files, trusted
from posttrain.config.sections import CollectConfig, Config, IrlConfig, plain, section_names, section_of, section_record
from posttrain.errors import UserError
from posttrain.options.pairs import DpoOptions
from posttrain.options.reward import OF_ENSEMBLES, OF_MODELS
from posttrain.options.training import rated
from posttrain.schemas import Mistake, checked, is_instance, names_at, spoken

TrainingConfig = Config | SftConfig | RewardModelConfig | DpoConfig
"""Runs that train a model."""
AnyConfig = TrainingConfig | CollectConfig | IrlConfig

COMMAND_OF: dict[type[AnyConfig], str] = {
    Config: "rl",
    SftConfig: "sft",
    RewardModelConfig: "reward-model",
    DpoConfig: "dpo",
    CollectConfig: "collect",
    IrlConfig: "irl",
}
AnyKind = TypeVar("AnyKind", bound=AnyConfig)


def resolved_config(config: AnyKind, *, adapter: bool | None = None) -> AnyKind:
    """The config with its remaining defaults filled in, such as the learning rate.

    `adapter` says whether a caller's policy trains an adapter; with None the config's model decides.
    """
    if isinstance(config, CollectConfig | IrlConfig):
        return config
    if adapter is None:
        adapter = config.trains_adapter
    options = rated(config.optimizer, adapter=adapter)
    changed: Any = {config.optimizer_section: options.resolved() if isinstance(options, DpoOptions) else options}
    return replace(config, **changed)


def as_recipe(config: AnyConfig) -> str:
    """The config as a recipe file with every option; running it gives the same run."""
    return to_yaml(recipe_sections(config))


def recipe_sections(config: AnyConfig) -> dict[str, object]:
    """The content of a recipe with every option."""
    resolved = asdict(resolved_config(config))
    content: dict[str, Any] = {name: plain(resolved[name]) for name in section_names(type(config))}
    for i, reward in enumerate(content.get("rewards", ())):  # first which one it is, and only options that it reads
        left_out = [] if reward["model"] else OF_MODELS.split()
        left_out += [] if reward["ensemble"] else OF_ENSEMBLES.split()
        ordered = {"name": "", "path": "", "model": "", **reward}
        given = {key: value for key, value in ordered.items() if value not in ("", {}, None)}
        content["rewards"][i] = {key: value for key, value in given.items() if key not in left_out}
    return content


Built = TypeVar("Built")

MOST_LISTED = 20
"""Maximum number of mistakes of a section, and of unknown sections, in a message."""


@overload
def load_recipe(*recipes: str | Path, kind: None = None, trust_code: bool = False, **sections: object) -> Config: ...
@overload
def load_recipe(*recipes: str | Path, kind: type[Built], trust_code: bool = False, **sections: object) -> Built: ...
def load_recipe(
    *recipes: str | Path, kind: type[Any] | None = None, trust_code: bool = False, **sections: object
) -> Any:
    """The config of one or more recipes, by file or bundled name; later ones override earlier ones.

    Sections override the recipes, option by option:

        load_recipe("countdown-tiny", run={"num_steps": 20}, algorithm={"name": "dapo"})

    The recipes decide the kind of config.  Type checkers expect `Config` without `kind`, as in
    `load_recipe("irl-course", kind=IrlConfig)`, which refuses recipes of other kinds.

    Code named in the recipe of a run folder is only imported if it has been run here before, or with `trust_code`.
    """
    layers = [trusted(read_recipe(str(recipe))) if trust_code else read_recipe(str(recipe)) for recipe in recipes]
    given: dict[str, object] = {name: spoken(each) if is_instance(each) else each for name, each in sections.items()}
    layers.append(RecipeLayer(where="load_recipe", sections=given))
    return build(kind or recipe_kind(layers), layers)


def recipe_kind(layers: Sequence[RecipeLayer]) -> type[AnyConfig]:
    for kind in COMMAND_OF:
        own = set(section_names(kind)) - set(section_names(Config))
        if any(own & layer.sections.keys() for layer in layers):
            return kind
    return Config


def build(kind: type[Built], layers: Sequence[RecipeLayer], *, final: bool = False, to_run: bool = True) -> Built:
    """The config of the layers; later layers override earlier ones.

    A `final` config does not get an algorithm from Python, so the recipe's must fit it.  Unless the config is `to_run`,
    only code that is imported to read it must be trusted.
    """
    merged = merge(layers)
    if to_run:
        require_trusted(merged)
    sections = checked_sections(kind, merged)
    try:
        config = kind(**{name: section_of(name, record) for name, record in sections.items()})
        if final and isinstance(config, Config):
            from posttrain.algorithms.table import build_algorithm  # with torch, which other runs do not need

            config.require_suits(build_algorithm(config.algorithm))
        return config
    except UserError as error:
        # The source of the first option, or else section, that the message names.
        words = [word.strip(".,:`()") for word in str(error).split()]
        named = [word for word in words if "." in word and word in merged.origins]
        named += [section for word in words if (section := word.partition(".")[0]) in merged.origins]
        raise UserError(f"{merged.origins[named[0]] if named else 'defaults'}: {error}") from None


def checked_sections(kind: type, merged: MergedRecipe) -> dict[str, Any]:
    """Every section as a record; names and types are checked, rules between options are not yet."""
    options = merged.sections.get("dpo")
    if kind is DpoConfig and (not isinstance(options, Mapping) or options.get("rounds") in (None, 0)):
        if is_own("task", merged.sections.get("task")):  # by the text of the recipe: the class is not imported
            raise UserError(f"task with dpo.rounds = 0 {ROWS_NEEDED}")
        if is_own("engine", merged.sections.get("engine")):
            raise UserError("engine is only for dpo.rounds, and dpo.rounds = 0.  Leave it out.")
    require_trusted_files(merged, READ_BY_IMPORT)
    known = section_names(kind)
    unknown = (name for name in merged.sections if name not in known)
    complaints = [unknown_section(kind, merged, name) for name in islice(unknown, MOST_LISTED)]
    records: dict[str, Any] = {}
    for name in known:
        content = merged.sections.get(name, [] if name in LISTS else {})
        try:
            records[name], mistakes = checked(section_record(kind, name, content), content)
        except UserError as error:
            complaints.append(f"{merged.where(f'{name}.name')}: {error}")
            continue
        complaints += [complaint(kind, merged, name, mistake) for mistake in mistakes[:MOST_LISTED]]
    if complaints:
        raise UserError("\n".join(complaints))
    return records


def complaint(kind: type, merged: MergedRecipe, section: str, mistake: Mistake) -> str:
    """One mistake as one line: where, what, the rule, the remedy."""
    where, line = merged.where(".".join((section, *mistake.path))), mistake.line(section)
    known_near = not mistake.names or get_close_matches(mistake.path[-1], mistake.names, n=1)
    if not known_near and (elsewhere := sections_with(kind, mistake.path[-1])):
        line = f"{replace(mistake, names=()).line(section)}.  Did you mean `{elsewhere[0]}.{mistake.path[-1]}`?"
    return f"{where}: {line}"


def sections_with(kind: type, name: str) -> list[str]:
    return [section for section in section_names(kind) if name in names_at(section_record(kind, section, {}), ())]


def unknown_section(kind: type, merged: MergedRecipe, name: str) -> str:
    """A line about a section that this kind of recipe does not have."""
    known = section_names(kind)
    if name == "phases":
        return f"{merged.where(name)}: lists phases; run them with `posttrain phases`."
    where = f"{merged.where(name)}: {name}: no such section"
    near = get_close_matches(name, known, n=1)
    if near:
        return f"{where}.  Did you mean `{near[0]}`?"
    for other, command in COMMAND_OF.items():
        if name in section_names(other):
            here = f"in `posttrain {COMMAND_OF[kind]}`" if kind in COMMAND_OF else "here"
            return f"{where} {here}; it belongs to `posttrain {command}`."
    inside = sections_with(kind, name)
    return f"{where}.  Did you mean `{inside[0]}.{name}`?" if inside else f"{where}.  There are: {', '.join(known)}."
