"""Rules between options: each class declares its own as rows of a table, `rules`, which one function walks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import reduce
from typing import Any

from posttrain.errors import UserError
from posttrain.schemas import default_of

GIVEN = object()
"""Stands for any value that is not empty, 0 or null."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that options must obey; `{o.NAME}` in its text is the value of an option."""

    option: str
    """The option that the message names; in a config by its path, such as `run.num_steps`."""
    holds: Callable[[Any], object]
    says: str
    """What is wrong, after the option and its value, and the remedy."""

    def complaint(self, options: Any) -> str | None:
        if self.holds(options):
            return None
        return f"{with_value(options, self.option)} " + self.says.format(o=options)


@dataclass(frozen=True, slots=True)
class Unused:
    """Options that are only read where others have certain values; elsewhere they would do nothing, and are refused."""

    options: str
    """Their names, with spaces between; in a config paths, also of whole sections."""
    unless: Mapping[str, object] | str
    """Other options and their values: one, one of a tuple, or GIVEN.  Or, in words, what else reads the options."""
    remedy: str = "Leave it out."

    def complaint(self, options: Any) -> str | None:
        given = (name for name in self.options.split() if value_at(options, name) != default_at(options, name))
        if (name := next(given, None)) is None or (used_by := self.used_by(options)) is None:
            return None
        return f"{with_value(options, name)} is only for {used_by}.  {self.remedy.format(o=options)}"

    def used_by(self, options: Any) -> str | None:
        """What reads the options, and why it does not apply; None where it does."""
        if isinstance(self.unless, str):
            return self.unless
        for other, wanted in self.unless.items():
            if not fits(value_at(options, other), wanted):
                choices = wanted if isinstance(wanted, tuple) else (wanted,)
                need = other if wanted is GIVEN else f"{other} = {' or '.join(map(value_shown, choices))}"
                return f"{need}, and {with_value(options, other)}"
        return None


Rules = tuple[Rule | Unused, ...]


def require_rules(options: Any, rules: Rules | None = None) -> None:
    """Refuse the first option that breaks a rule: of those given, or else of its class and the classes above it."""
    kinds = reversed(type(options).__mro__)
    for rule in rules or (each for kind in kinds for each in vars(kind).get("rules", ())):
        if (complaint := rule.complaint(options)) is not None:
            raise UserError(complaint)


def refuse_unread(used_by: str, given: Mapping[str, bool]) -> None:
    """Refuse the first argument of a function that is given although nothing would read it."""
    if (name := next((name for name, is_given in given.items() if is_given), None)) is not None:
        raise UserError(f"{name} is only for {used_by}.  Leave it out.")


def value_at(options: Any, path: str) -> Any:
    """The value of an option; None where a section does not have it."""
    return reduce(lambda section, name: getattr(section, name, None), path.split("."), options)


def default_at(options: Any, path: str) -> Any:
    section, _, name = path.rpartition(".")
    known = getattr(value_at(options, section) if section else options, "__dataclass_fields__", {})
    return default_of(known[name]) if name in known else None


def fits(value: object, wanted: object) -> bool:
    if wanted is GIVEN:
        return bool(value)
    return value in wanted if isinstance(wanted, tuple) else value == wanted


def with_value(options: Any, path: str) -> str:
    """`option = value`; of a section, or of a list of sections, its name."""
    value = value_at(options, path)
    items = value if isinstance(value, tuple) else [value]
    return path if any(map(is_dataclass, items)) else f"{path} = {value_shown(value)}"


def value_shown(value: object) -> str:
    """A value as a recipe has it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(value_shown, value))}]"
    words: dict[object, str] = {"": "''", "None": "null", "True": "true", "False": "false"}
    return words.get(str(value), f"{value!s:.80}")
