"""The `engine` section of a recipe: what samples completions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from posttrain.options.bounds import Bounded


@dataclass(frozen=True, kw_only=True)
class InProcessOptions(Bounded):
    """Completions are sampled in this process, from the trainer's own weights."""

    name: Literal["in_process"] = "in_process"


EngineOptions = InProcessOptions | Mapping[str, object]
"""For your class, a mapping of its path and options."""

ENGINE_OPTIONS = {"in_process": InProcessOptions}
"""The option class of each engine, by the name it has in recipes."""
