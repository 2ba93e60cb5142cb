"""Objects whose public methods are tools, one object for each completion: TRL's `environment_factory`.

class Counter:
    def reset(self, **row):
        self.value = 0

    def increase(self, step: int) -> int:
        \"\"\"Increase the counter.

        Args:
            step: By how much.
        \"\"\"
        self.value += step
        return self.value
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from posttrain.environments.protocol import Environments, Said, close_now, nothing, on_own_thread
from posttrain.environments.tool_environments import CalledTools
from posttrain.errors import UserError

NOT_TOOLS = frozenset({"reset", "close", "get_reward"})
"""Public methods that the policy may not call."""


@dataclass(frozen=True, slots=True)
class MethodTools:
    """A factory of such objects, called without arguments."""

    factory: Callable[[], Any]

    def __post_init__(self) -> None:
        factory: object = self.factory
        if not callable(factory):
            kind = type(factory).__name__
            raise UserError(f"environment_factory: a {kind} cannot be called.  Give a class, or a function.")

    @property
    def name(self) -> str:
        return str(getattr(self.factory, "__name__", type(self.factory).__name__))

    def example(self, seconds: float) -> Any:
        """An object whose methods describe the tools.  Raises UserError if it cannot be an environment."""
        example = on_own_thread(self.factory, seconds)
        if not callable(getattr(example, "reset", None)):
            raise UserError(f"environment_factory: a {type(example).__name__} has no method `reset`.  Add it.")
        if not method_names(example):
            raise UserError(f"environment_factory: a {type(example).__name__} has no public method.  Add one to call.")
        return example

    @staticmethod
    def close(example: object, seconds: float) -> None:
        """Close an object that was only made for inspection."""
        close_now(getattr(example, "close", nothing), seconds)

    def environments(self, of_tools: Environments, example: Any) -> Environments:
        """Environments in which each completion calls the methods of its own object."""
        return replace(
            of_tools,
            name=f"{self.name} with {of_tools.name}",
            make=partial(CalledMethods, of_tools.make, self.factory, method_names(example)),
            reproducible=of_tools.reproducible and bool(getattr(example, "reproducible", True)),
        )


def method_names(candidate: object) -> tuple[str, ...]:
    names = (name for name in dir(candidate) if not name.startswith("_") and name not in NOT_TOOLS)
    # of the class: reading attributes of an object would run its properties
    return tuple(name for name in names if callable(getattr(type(candidate), name, None)))


class CalledMethods:
    """The environment of a completion; `object` is what the factory made for it."""

    def __init__(self, make: Callable[[], Any], factory: Callable[[], Any], names: tuple[str, ...]) -> None:
        self.object, called = factory(), cast(CalledTools, make())
        tools = {name: replace(called.tools[name], call=getattr(self.object, name)) for name in names}
        self.called = CalledTools({**called.tools, **tools}, called.reader)

    def reset(self, row: Mapping[str, object], seed: int) -> Said | None:
        """What `reset` returns is added to the last message of the user."""
        added: Said | None = self.object.reset(**row)
        return added

    def reply(self, said: str) -> Any:
        """The answers of the methods that were called; None without a call."""
        return self.called.reply(said)

    def close(self) -> Any:
        """Close the object; what its `close` returns may be awaitable."""
        return getattr(self.object, "close", nothing)()
