"""From recipe files, flags and Python overrides to one Config, or to one message that says what to mend and where."""

from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from posttrain.config.recipes import Merged, RecipeLayer, merge, read_recipe
from posttrain.config.schema import Mistake, checked, names_at, required, section_names, section_type
from posttrain.config.sections import COMMAND_OF, AnyConfig, Config
from posttrain.errors import UserError

Built = TypeVar("Built")


def load_recipe(*recipes: str | Path, **sections: object) -> AnyConfig:
    """The config of one or more recipes, given by file or by the name of a bundled one, later ones overriding earlier.

    Sections override what the recipes say, option by option:

        load_recipe("countdown-tiny", run={"num_steps": 20}, algorithm={"name": "dapo"})
    """
    layers = [read_recipe(str(recipe)) for recipe in recipes]
    layers.append(RecipeLayer(where="load_recipe", sections={name: given(value) for name, value in sections.items()}))
    return build(kind_of(layers), layers)


def given(section: object) -> object:
    """A section as Python code gives it: a mapping, or an options object."""
    return asdict(section) if is_dataclass(section) and not isinstance(section, type) else section


def kind_of(layers: Sequence[RecipeLayer]) -> type[AnyConfig]:
    """What the sources speak of: training by reward, unless one has a section that only another kind has."""
    for kind in COMMAND_OF:
        own = set(section_names(kind)) - set(section_names(Config))
        if any(own & layer.sections.keys() for layer in layers):
            return kind
    return Config


def build(kind: type[Built], layers: Sequence[RecipeLayer]) -> Built:
    """The config that the layers, later ones overriding earlier, add up to."""
    merged = merge(layers)
    sections = {name: strictly(merged, name, value) for name, value in structure(kind, merged).items()}
    try:
        return kind(**sections)
    except UserError as error:
        raise UserError(f"{blamed(merged, str(error))}: {error}") from None


def structure(kind: type, merged: Merged) -> dict[str, Any]:
    """Every section, its names and types checked and the rules between its fields not yet."""
    known = section_names(kind)
    complaints = [unknown_section(kind, merged, name) for name in merged.sections if name not in known]
    values: dict[str, Any] = {}
    for name in known:
        content = merged.sections.get(name, [] if name == "rewards" else {})
        try:
            options = section_type(kind, name, content)
        except UserError as error:
            complaints.append(f"{merged.where(f'{name}.name')}: {error}")
            continue
        values[name], mistakes = checked(name, options, content)
        complaints += [complaint(kind, merged, options, mistake) for mistake in mistakes]
    if complaints:
        raise UserError("\n".join(complaints))
    return values


def strictly(merged: Merged, name: str, value: Any) -> Any:
    """A section as an object of its own class, which holds its fields to the rules between them."""
    try:
        if name == "algorithm":
            return asdict(value)
        if name == "rewards":
            return tuple(own_class(reward) for reward in value)
        return own_class(value)
    except UserError as error:
        message = f"{name}: {error}" if name == "rewards" else f"{name}.{error}"
        raise UserError(f"{blamed(merged, message)}: {message}") from None


def own_class(value: Any) -> Any:
    """The same fields in the class that the lenient one was made from."""
    original = type(value).__mro__[1]
    for name in required(original):
        if getattr(value, name) is None:
            raise UserError(f"{name} is missing; it has no default")
    return original(**{each.name: getattr(value, each.name) for each in fields(value)})


def complaint(kind: type, merged: Merged, options: Any, mistake: Mistake) -> str:
    """One mistake as one line: where, what, the rule, the remedy."""
    path = ".".join(mistake.path)
    line = f"{merged.where(path)}: {path}{mistake.says}"
    if not mistake.unknown:
        return line
    *above, name = mistake.path
    return f"{line}.  {remedy(kind, name, names_at(options, tuple(above[1:])))}"


def remedy(kind: type, name: str, names: Sequence[str]) -> str:
    """The nearest valid name, the section that has a field of this name, or all the names there are."""
    near = get_close_matches(name, names, n=1)
    if near:
        return f"Did you mean `{near[0]}`?"
    elsewhere = [section for section in section_names(kind) if name in names_at(section_type(kind, section, {}), ())]
    if elsewhere:
        return f"Did you mean `{elsewhere[0]}.{name}`?"
    return f"There are: {', '.join(names)}."


def unknown_section(kind: type, merged: Merged, name: str) -> str:
    """A line about a section that this kind of recipe does not have."""
    known = section_names(kind)
    where = f"{merged.where(name)}: {name}: no such section"
    near = get_close_matches(name, known, n=1)
    if near:
        return f"{where}.  Did you mean `{near[0]}`?"
    for other, command in COMMAND_OF.items():
        if name in section_names(other):
            return f"{where} in `posttrain {COMMAND_OF[kind]}`; it belongs to `posttrain {command}`."
    inside = [section for section in known if name in names_at(section_type(kind, section, {}), ())]
    return f"{where}.  Did you mean `{inside[0]}.{name}`?" if inside else f"{where}.  There are: {', '.join(known)}."


def blamed(merged: Merged, message: str) -> str:
    """The source to look at first: the one that set the first option, or else section, that the message names."""
    words = [word.strip(".,:`()") for word in message.split()]
    named = [word for word in words if "." in word and word in merged.origins]
    named += [section for word in words if (section := word.partition(".")[0]) in merged.origins]
    return merged.origins[named[0]] if named else "defaults"
