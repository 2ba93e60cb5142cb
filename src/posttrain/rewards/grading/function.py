"""A reward function: its arguments, and its source (a file, a module, or the name in a recipe)."""

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from posttrain.binding import bind, code_digest, object_in_file, object_in_module
from posttrain.errors import RunError, UserError
from posttrain.options.reward import RewardSettings


@dataclass(frozen=True, slots=True)
class CodeSource:
    """A name in a file or in a module."""

    place: str
    """An absolute path that ends in .py, or the dotted name of a module."""
    name: str
    """Dotted inside a class."""
    file: str
    digest: str
    """The SHA-256 of the file and of the files in its folder that it imports, when it was loaded."""

    def require_unchanged(self) -> None:
        if code_digest(Path(self.file)) != self.digest:
            remedy = "A run keeps its rewards: restore the file and resume the run, or start a new run."
            raise RunError(f"{self.file}, or a file it imports, has changed since `{self.name}` was loaded. {remedy}")


def source_at(place: str, name: str, call: object) -> CodeSource:
    if place.endswith(".py"):
        place = file = str(Path(place).resolve())
    else:
        defines = call.__module__ if inspect.isfunction(call) else place
        file = getattr(sys.modules.get(defines), "__file__", None) or ""
    return CodeSource(place=place, name=name, file=file, digest=code_digest(Path(file)))


@functools.cache  # the first answer is kept: a file may change after its function has been imported
def source_of(call: Callable[..., object], reward: str) -> CodeSource:
    """The source of a function given in Python.  Raises UserError if no name leads back to it."""
    module, name = getattr(call, "__module__", ""), getattr(call, "__qualname__", "")
    found: object = sys.modules.get(module)
    file = getattr(found, "__file__", None)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not inspect.isfunction(call):
        why = f"it is a {type(call).__name__}"
    elif module == "__main__":
        why = "it is in the program that was started"
    elif "<" in name:
        why = "it is inside another function, or a lambda"
    elif found is call and file is not None:
        return CodeSource(place=module, name=name, file=file, digest=code_digest(Path(file)))
    else:
        why = f"{module}:{name} is not this function"
    remedy = "Import it from a file where it is a top-level `def`, or name it in the recipe as FILE.py:FUNCTION."
    raise UserError(f"reward {reward!r}: no worker or cache can find it by name: {why}. {remedy}")


class ScoringFailure(Exception):
    """Scoring failed (a killed worker, a judge's error 500), which says nothing about the completion.

    A reward function raises it for the whole call, or returns it in place of a score it could not get.  Such scores are
    retried twice, then treated as missing (never as 0) and counted.
    """


@runtime_checkable
class Cacheable(Protocol):
    """A reward of this package whose scores may be cached."""

    @property
    def rows_stand_alone(self) -> bool:
        """Whether a completion's score depends only on the completion and its row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """A callable under a name, and its settings; posttrain.rewards.grading.grade says how it is called."""

    name: str
    """Its scores are logged under this name."""
    call: Callable[..., object]
    settings: RewardSettings = field(default_factory=RewardSettings)
    """When it counts and how much, in which process it is called and for how long."""
    text_only: bool = False
    """Give it prompts and completions as text even if the prompt is a conversation."""
    bounded: bool = False
    """It always returns: it takes linear time, or has its own limits."""
    source: CodeSource | None = None

    def __post_init__(self) -> None:
        if not callable(self.call) or isinstance(self.call, type):
            remedy = "Give a function, or an object with a __call__ method (an instance, not its class)."
            raise UserError(f"reward {self.name!r}: {self.call!r} cannot score completions. {remedy}")

    def find_source(self) -> CodeSource:
        return self.source or source_of(self.call, self.name)

    def unconditional(self) -> "RewardFunction":
        plain = replace(self.settings, gate="", of="", clip=None, weight_to=None, over_steps=0)
        return replace(self, settings=plain)

    @property
    def is_async(self) -> bool:
        call = innermost(self.call)
        return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)


def reward_function(
    call: Callable[..., object], *, name: str = "", weight: float = 1.0, text_only: bool = False, **settings: object
) -> RewardFunction:
    """A callable as a reward function; its default name is `__name__`, or an object's class.

    `settings` are fields of posttrain.options.reward.RewardSettings: `gate="solved"`, `clip=(0, 1)`, `workers=2`.
    """
    named = name or name_of_callable(call)
    made = bind(RewardSettings, {"weight": weight, **settings}, where=f"reward {named!r}")
    return RewardFunction(name=named, call=call, settings=made, text_only=text_only)


def with_distinct_names(functions: Sequence[RewardFunction]) -> tuple[RewardFunction, ...]:
    """The functions as `solved`, `solved_2`, `solved_3`; the first keeps the name, to which gates and `of` refer."""
    taken = {function.name for function in functions}
    named: dict[str, RewardFunction] = {}
    for function in functions:
        others = (f"{function.name}_{number}" for number in itertools.count(2))
        names = itertools.chain([function.name], (name for name in others if name not in taken))
        name = next(name for name in names if name not in named)
        named[name] = function if name == function.name else replace(function, name=name)
    return tuple(named.values())


def name_of_callable(call: object) -> str:
    call = innermost(call)
    return str(getattr(call, "__name__", type(call).__name__))


def innermost(call: object) -> object:
    while isinstance(call, functools.partial):
        call = call.func
    return call


TEXTS = {"texts", "responses"}
OF_ALL = TEXTS | {"prompts", "completions", "completion_ids"}


@dataclass(frozen=True, slots=True)
class Keywords:
    """The parameters of a function."""

    required: frozenset[str]
    optional: frozenset[str]
    takes_any: bool

    @property
    def one_by_one(self) -> bool:
        """Whether it scores one completion per call, as `(response, ground_truth) -> float` does, not a list."""
        named = self.required | self.optional
        return bool(named & {"response", "completion"}) and not named & OF_ALL

    def wants(self, name: str) -> bool:
        return self.takes_any or name in self.required or name in self.optional


def keywords(function: RewardFunction) -> Keywords:
    """The parameters of a function.  Raises UserError for one that cannot be called by keyword."""
    try:
        parameters = inspect.signature(function.call).parameters.values()
    except (TypeError, ValueError) as error:
        raise UserError(f"reward {function.name!r} has no readable signature. Wrap it in a `def`.") from error
    kind = inspect.Parameter
    for parameter in parameters:
        if parameter.kind is kind.POSITIONAL_ONLY and parameter.default is kind.empty:
            where = f"reward {function.name!r} takes {parameter.name!r} by position only"
            raise UserError(f"{where}, but is called by keyword. Remove the `/` from its signature.")
    named = {each.name: each for each in parameters if each.kind in (kind.KEYWORD_ONLY, kind.POSITIONAL_OR_KEYWORD)}
    required = frozenset(name for name, each in named.items() if each.default is kind.empty)
    takes_any = any(each.kind is kind.VAR_KEYWORD for each in parameters)
    return Keywords(required, frozenset(named) - required, takes_any)


def may_be_cached(function: RewardFunction) -> bool:
    call: object = function.call
    return call.rows_stand_alone if isinstance(call, Cacheable) else function.settings.cache


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """A run's progress, named as in transformers' TrainerState; 0 outside of a run."""

    global_step: int = 0
    """Steps finished: 0 while completions of the first one are scored."""
    max_steps: int = 0
    """Steps of the whole run."""
    epoch: float | None = None
    """Passes over the training rows so far; None if prompts are generated."""
    is_world_process_zero: bool = True
    """Always true: only rank 0 calls rewards."""
    is_local_process_zero: bool = True


def function_at(place: str, name: str) -> object:
    if place.endswith(".py"):
        return load_function(f"{place}:{name}")
    first, *rest = name.split(".")
    return functools.reduce(getattr, rest, object_in_module(f"{place}:{first}", where="rewards"))


def load_function(path: str) -> Callable[..., object]:
    place, _, name = path.rpartition(":")
    found = object_in_file(path, where="rewards") if place.endswith(".py") else object_in_module(path, where="rewards")
    if not callable(found) or isinstance(found, type):
        what = f"`{name}` in {place} is a {type(found).__name__} and cannot score completions"
        raise UserError(f"rewards: {what}. Name a function, or an object with a __call__ method.")
    return found


def environment(
    completions: Sequence[object], environment_rewards: Sequence[float | None] = (), **_: object
) -> list[float | None]:
    """What the replies to each completion earned together; None if no reply had a reward."""
    return list(environment_rewards) or [None] * len(completions)


ENVIRONMENT_REWARD = RewardFunction(name=environment.__name__, call=environment, bounded=True)
