"""Errors about our options, told with the fields of TRL's that a script sets them by."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from posttrain.errors import UserError
from posttrain.trl.fields.field_rules import CheckedFields, Rules, default_values, same


@contextmanager
def told_in_fields(config: CheckedFields, rules: Rules) -> Iterator[None]:
    """Put before a message that speaks of options of ours the fields that set them."""
    try:
        yield
    except UserError as error:
        names = fields_named(str(error), config, rules)
        if not names:
            raise
        raise type(error)(f"{type(config).__name__}: {', '.join(names)}: {error}") from error


def fields_named(message: str, config: CheckedFields, rules: Rules) -> list[str]:
    """The fields that set the options which a message names; none where it begins with a field's own name already."""
    if message.startswith(f"{type(config).__name__}: "):
        return []
    by_option: dict[str, list[str]] = {}
    for name, rule in rules.items():
        for option in rule.ours.split(","):
            by_option.setdefault(option.strip(), []).append(name)
    defaults = default_values(type(config))
    found: dict[str, None] = {}
    for option, names in by_option.items():
        if names_option(message, option):
            set_here = [name for name in names if not same(vars(config)[name], defaults[name])]
            found |= dict.fromkeys(set_here or names[:1])
    return [*found]


def names_option(message: str, option: str) -> bool:
    """Whether a message names an option by its path, or begins with "name = ", as what a section's own rules say."""
    section, _, name = option.rpartition(".")
    if not section or name == "*":
        return False
    return re.search(rf"(?<![\w.]){re.escape(option)}(?![\w.]*\w)", message) is not None or message.startswith(
        f"{name} = "
    )
