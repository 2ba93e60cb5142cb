"""Which options of a config a command reads while it runs: an option that nothing reads has no effect."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from importlib import import_module
from pkgutil import iter_modules
from types import FrameType
from typing import Any

import posttrain.config
import posttrain.options
from posttrain.commands.chat import ChatConfig

SETTINGS = ("posttrain.options.", "posttrain.config.")
"""Where options check themselves and each other, which is not yet an effect."""
COPIES = ("dataclasses", "copy", "posttrain.schemas", "posttrain.binding", "posttrain.commands.flags")
"""What only copies, prints or compares them."""
NOTES = ("posttrain.runs.run_inputs", "posttrain.runs.named_inputs")
"""What only notes them for a resume, as `session.inputs_of` does."""


@contextmanager
def recorded_reads() -> Iterator[set[tuple[str, str]]]:
    """(class, field) of everything that code of ours reads to act on it, from here to the end."""
    read: set[tuple[str, str]] = set()
    classes = {kind for kind in option_classes() if "__getattribute__" not in vars(kind)}

    def reading(self: Any, name: str) -> Any:
        if not name.startswith("_") and (type(self).__name__, name) not in read and has_effect(sys._getframe(1)):
            read.add((type(self).__name__, name))
        return object.__getattribute__(self, name)

    for kind in classes:
        kind.__getattribute__ = reading  # type: ignore[method-assign, assignment]
    try:
        yield read
    finally:
        for kind in classes:
            del kind.__getattribute__


def option_classes() -> Iterator[type]:
    """The dataclasses of posttrain.options and posttrain.config, and the config of `chat`."""
    yield ChatConfig
    for package in (posttrain.options, posttrain.config):
        for module in iter_modules(package.__path__, f"{package.__name__}."):
            for found in vars(import_module(module.name)).values():
                if isinstance(found, type) and is_dataclass(found) and found.__module__ == module.name:
                    yield found


def has_effect(frame: FrameType | None) -> bool:
    """Whether an option is read by code of ours that is not about options themselves."""
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        notes = module.startswith(COPIES + NOTES) or frame.f_code.co_qualname.startswith("inputs_of")
        if notes or function in ("__eq__", "__repr__", "__hash__"):
            return False
        if not module.startswith((*SETTINGS, __name__)):
            return bool(module.startswith("posttrain."))
        if function in ("__post_init__", "build") or function.startswith(("require", "_require")):
            return False
        frame = frame.f_back
    return False


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, tuple[str, str]]]:
    """Each option of a config by its dotted path, with its class and field."""
    for each in fields(config):
        value = vars(config)[each.name]
        path = f"{prefix}{each.name}"
        if is_dataclass(value):
            yield from leaves(value, f"{path}.")
        else:
            yield path, (type(config).__name__, each.name)
