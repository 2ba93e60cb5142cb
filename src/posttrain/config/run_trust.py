"""A recipe in a run folder may only use what this user has run on this machine, or trusts.

Run folders are shared as results, and include their author's recipe.  Code that it names (FILE.py:NAME,
package.module:NAME) is only imported if the same code has been run here.  Other actions on this machine, and sending
data elsewhere, require a recipe that was written here.  Recipes outside run folders are trusted.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from enum import StrEnum

from posttrain.binding import is_name_in_file, is_own, known_code
from posttrain.config.recipes import MergedRecipe, RecipeLayer
from posttrain.errors import UserError
from posttrain.known_code import KnownCode, is_known, remember

WALLED = ("sealed", "bubblewrap")
"""Sandboxes that name neither a command nor an address."""
READ_BY_IMPORT = ("task", "algorithm", "engine")
"""Sections that may name a user's class or function, which is imported to read its options."""


class RecipeOf(StrEnum):
    """Where the recipe comes from: a run begun here, or a run that was trusted."""

    USER = "run-begun-here"
    TRUSTED = "run-trusted"


def keep_recipe(digest: str, before: str | None, where: str) -> None:
    """Remember the recipe of a run that begins here, or that replaces the recipe `before` of a known run."""
    known = [RecipeOf.USER] if before is None else [each for each in RecipeOf if is_known(KnownCode(before, each))]
    remember(KnownCode(digest, each, where) for each in known)


def trusted(layer: RecipeLayer) -> RecipeLayer:
    """Mark a run's recipe as trusted by the user, and remember it.

    Its code is remembered by content: the same recipe with other code is not trusted.
    """
    if layer.run_digest is not None:
        remember([KnownCode(layer.run_digest, RecipeOf.TRUSTED, layer.where)])
    return replace(layer, run_digest=None)


def require_trusted(merged: MergedRecipe) -> None:
    """Reject unknown code and actions in a run folder's recipe, and show their digests; remember what a user names."""
    require_trusted_files(merged)
    remember(code for option, code in named_code(merged) if merged.source(option) not in merged.of_runs)


def require_trusted_files(merged: MergedRecipe, sections: tuple[str, ...] = ("",)) -> None:
    """The same for some sections.  The recipe of a run that began here is the user's, even if its code has changed."""
    others = {
        where: is_known(KnownCode(digest, RecipeOf.TRUSTED))
        for where, digest in merged.of_runs.items()
        if not is_known(KnownCode(digest, RecipeOf.USER))
    }
    asked = ((option, each) for option, each in named_code(merged) if merged.source(option) in others)
    code = {option: each for option, each in asked if not is_known(each)}
    acts = {option: value for option, value in named_acts(merged).items() if others.get(merged.source(option)) is False}
    unknown = [*code, *acts]
    if not any(option.startswith(sections) for option in unknown):
        return
    lines = [f"{option} = {each.where}  (sha256 {each.digest or 'unknown'})" for option, each in code.items()]
    lines += [f"{option} = {value}" for option, value in acts.items()]
    says = (
        f"{merged.source(unknown[0])}: this run's recipe names code or actions that you have not run on this machine:"
        + "".join(f"\n  {line}" for line in lines)
        + "\nRead it.  If you trust it, "
    )
    raise UserError(f"{says}load_recipe(..., trust_code=True).", command=f"{says}add --trust-code.")


def named_code(merged: MergedRecipe) -> Iterator[tuple[str, KnownCode]]:
    """The functions and classes outside this package that a recipe names, by option.

    A missing file is reported when it is imported.
    """
    paths: dict[str, object] = {}
    for section in READ_BY_IMPORT:
        content = merged.sections.get(section)
        if is_own(section, content) and is_name_in_file(path := value_in(content, "path")):
            paths[f"{section}.path"] = path
    paths |= {f"rewards[{index}].path": value_in(reward, "path") for index, reward in items_of(merged, "rewards")}
    paths["environment.path"] = value_in(merged.sections.get("environment"), "path")
    paths |= {f"tools[{index}]": tool for index, tool in items_of(merged, "tools")}
    for option, path in paths.items():
        if isinstance(path, str) and ":" in path:
            code = known_code(path)
            if code.digest or not path.rpartition(":")[0].endswith(".py"):
                yield option, code


def named_acts(merged: MergedRecipe) -> dict[str, object]:
    """Other options that may run code, send data away or write to a file."""
    found: dict[str, object] = {
        "model.trust_remote_code": value_in(merged.sections.get("model"), "trust_remote_code"),
        "grading.cache_file": value_in(merged.sections.get("grading"), "cache_file"),
        "engine.urls": value_in(merged.sections.get("engine"), "urls"),
        "engine.evaluation": value_in(merged.sections.get("engine"), "evaluation"),
        "engine.transfer_folder": value_in(merged.sections.get("engine"), "transfer_folder"),
        "judge.endpoint": value_in(merged.sections.get("judge"), "endpoint"),
        "environment.url": value_in(merged.sections.get("environment"), "url"),
    }
    sandbox = value_in(merged.sections.get("sandbox"), "kind")
    found["sandbox.kind"] = None if sandbox in WALLED else sandbox
    for index, reward in items_of(merged, "rewards"):
        found[f"rewards[{index}].trust_remote_code"] = value_in(reward, "trust_remote_code")
        found[f"rewards[{index}].options.endpoint"] = value_in(value_in(reward, "options"), "endpoint")
    return {option: value for option, value in found.items() if value not in (None, False, "")}


def items_of(merged: MergedRecipe, section: str) -> Iterable[tuple[int, object]]:
    content = merged.sections.get(section)
    return enumerate(content if isinstance(content, list | tuple) else ())


def value_in(section: object, option: str) -> object:
    return section.get(option) if isinstance(section, Mapping) else None
