"""What a reward function is, and what it asks to be called with."""

import functools
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from posttrain.binding import bind, code_digest, object_in_file, object_in_module
from posttrain.errors import RunError, UserError, exit_call
from posttrain.options.reward import RewardSettings


@dataclass(frozen=True, slots=True)
class FunctionSource:
    """A name in a file or in a module."""

    place: str
    """An absolute path that ends in .py, or the dotted name of a module."""
    name: str
    """A name there, dotted where it is within a class."""
    file: str
    """The file that defines it."""
    digest: str
    """The SHA-256 of the file, and of those in its folder that it imports, when it was loaded."""

    def require_unchanged(self) -> None:
        """Refuse to use a function whose file has changed since it was loaded."""
        if code_digest(Path(self.file)) != self.digest:
            raise RunError(
                f"{self.file} has changed since `{self.name}` was loaded from it, or a file that it imports has,"
                " and a run keeps its rewards.  Put it back as it was and resume the run, or start another."
            )


def source_in_file(file: Path, name: str) -> FunctionSource:
    return FunctionSource(place=str(file.resolve()), name=name, file=str(file.resolve()), digest=code_digest(file))


def source_in_module(call: object, place: str, name: str) -> FunctionSource:
    """The source of a function that a recipe names as package.module:FUNCTION, which may come from another module."""
    defines = call.__module__ if inspect.isfunction(call) else place
    file = getattr(sys.modules.get(defines), "__file__", None) or ""
    return FunctionSource(place=place, name=name, file=file, digest=code_digest(Path(file)))


@functools.cache  # as it was when first asked for: a file may change after its function has been imported
def source_of(call: Callable[..., object], reward: str) -> FunctionSource:
    """The source of a function that Python code handed over.  Raises UserError where no name leads back to it."""
    remedy = (
        "  Write it as a `def` at the top of a file of its own and import it from there, or name it in the recipe as"
        " FILE.py:FUNCTION."
    )
    if not inspect.isfunction(call):
        kind = type(call).__name__
        raise UserError(f"reward {reward!r} is a {kind}, which neither a worker nor a cache finds by name.{remedy}")
    module, name = call.__module__, call.__qualname__
    if module == "__main__" or "<" in name:
        where = "in the program that was started" if module == "__main__" else "inside another function, or a lambda"
        raise UserError(f"reward {reward!r} is {where}, where neither a worker nor a cache finds it by name.{remedy}")
    found: object = sys.modules.get(module)
    file = getattr(found, "__file__", None)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not call or file is None:
        raise UserError(f"reward {reward!r}: {module}:{name} is not this function.{remedy}")
    return FunctionSource(place=module, name=name, file=file, digest=code_digest(Path(file)))


class ScoringFailure(Exception):
    """Scoring itself failed (a killed worker, a judge's error 500), which says nothing about the completion.

    A reward function raises it for the whole call, or returns it in place of the scores it could not get.  These are
    asked for again twice, then left out and counted; never are they a 0.
    """


@runtime_checkable
class Cacheable(Protocol):
    """A reward of this package that may be remembered."""

    @property
    def rows_stand_alone(self) -> bool:
        """Whether a completion's score depends on nothing but the completion and its row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """A callable under a name, and its settings; posttrain.rewards.grading.grade says how it is called."""

    name: str
    """Its scores are logged under this name."""
    call: Callable[..., object]
    settings: RewardSettings = field(default_factory=RewardSettings)
    """When it counts and how much, in which process it is called and for how long."""
    text_only: bool = False
    """Give it prompts and completions as text also where the prompt is a conversation."""
    bounded: bool = False
    """It always returns: it takes linear time, or has its own limits."""
    source: FunctionSource | None = None
    """Where it was loaded from, if it was."""

    def __post_init__(self) -> None:
        if not callable(self.call) or isinstance(self.call, type):
            raise UserError(
                f"reward {self.name!r}: {self.call!r} cannot score completions. Give a function, or an object with a"
                " __call__ method (an instance, not its class)."
            )

    def find_source(self) -> FunctionSource:
        """Where another process finds it by name.  Raises UserError where it cannot."""
        return self.source or source_of(self.call, self.name)

    def unconditional(self) -> "RewardFunction":
        """The function without gate, `of`, clip and schedule."""
        plain = replace(self.settings, gate="", of="", clip=None, weight_to=None, over_steps=0)
        return replace(self, settings=plain)

    @property
    def is_async(self) -> bool:
        call = self.call
        while isinstance(call, functools.partial):
            call = call.func
        return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)


def reward_function(
    call: Callable[..., object],
    *,
    name: str = "",
    weight: float = 1.0,
    text_only: bool = False,
    **settings: object,
) -> RewardFunction:
    """A callable as a reward function, by default under its own name: `__name__`, or the class of an object.

    `settings` are what a recipe says of a reward beside its name and weight, the fields of
    posttrain.options.reward.RewardSettings: `gate="solved"`, `clip=(0, 1)`, `workers=2`.
    """
    named = name or name_of_callable(call)
    made = bind(RewardSettings, {"weight": weight, **settings}, where=f"reward {named!r}")
    return RewardFunction(name=named, call=call, settings=made, text_only=text_only)


def with_distinct_names(functions: Sequence[RewardFunction]) -> tuple[RewardFunction, ...]:
    """The functions with distinct names: `solved`, `solved_2`, `solved_3`.

    The first keeps the name, and is the one that gates and `of` mean by it; a name that another function has is left
    to that one.
    """
    own = {function.name for function in functions}
    named: dict[str, RewardFunction] = {}
    for function in functions:
        others = (f"{function.name}_{number}" for number in itertools.count(2))
        names = itertools.chain([function.name], (name for name in others if name not in own))
        name = next(name for name in names if name not in named)
        named[name] = function if name == function.name else replace(function, name=name)
    return tuple(named.values())


def name_of_callable(call: object) -> str:
    """A function's name, or an object's class; of what functools.partial holds."""
    while isinstance(call, functools.partial):
        call = call.func
    return str(getattr(call, "__name__", type(call).__name__))


TEXTS = {"texts", "responses"}
"""What functions of lists may call all completions as text."""
OF_ALL = TEXTS | {"prompts", "completions", "completion_ids"}
"""What only a function of lists asks for."""


@dataclass(frozen=True, slots=True)
class Keywords:
    """The keywords of a function's signature."""

    required: frozenset[str]
    optional: frozenset[str]
    takes_any: bool
    """Whether there is a `**kwargs`."""

    @property
    def one_by_one(self) -> bool:
        """Whether it scores one completion per call rather than lists of all.

        `(response, ground_truth) -> float`, `(completion) -> float`, `(completion, nums, target) -> float`
        """
        named = self.required | self.optional
        return bool(named & {"response", "completion"}) and not named & OF_ALL

    def wants(self, name: str) -> bool:
        return self.takes_any or name in self.required or name in self.optional


def keywords(function: RewardFunction) -> Keywords:
    """The keywords of a function's signature."""
    try:
        parameters = inspect.signature(function.call).parameters.values()
    except (TypeError, ValueError) as error:
        raise UserError(f"reward {function.name!r} does not say its parameters; wrap it in a `def`") from error
    required, optional, takes_any = set[str](), set[str](), False
    for parameter in parameters:
        match parameter.kind:
            case inspect.Parameter.VAR_KEYWORD:
                takes_any = True
            case inspect.Parameter.KEYWORD_ONLY | inspect.Parameter.POSITIONAL_OR_KEYWORD:
                (required if parameter.default is parameter.empty else optional).add(parameter.name)
            case inspect.Parameter.POSITIONAL_ONLY if parameter.default is parameter.empty:
                raise UserError(
                    f"reward {function.name!r} takes {parameter.name!r} by position only, but reward functions are"
                    " called by keyword; remove the `/` from its signature"
                )
    return Keywords(frozenset(required), frozenset(optional), takes_any)


def may_be_cached(function: RewardFunction) -> bool:
    standing = as_standing(function.call)
    return function.settings.cache if standing is None else standing.rows_stand_alone


def as_standing(call: object) -> Cacheable | None:
    return call if isinstance(call, Cacheable) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """A run's progress, under the names that transformers' TrainerState has for it; outside of a run all is 0."""

    global_step: int = 0
    """Steps finished: 0 while completions of the first one are scored."""
    max_steps: int = 0
    """Steps of the whole run."""
    epoch: float | None = None
    """Passes over the training rows so far; None where prompts are made and not read."""
    is_world_process_zero: bool = True
    """Whether this process is the one that prints, which a run of one process is."""
    is_local_process_zero: bool = True
    """The same of one machine."""


def function_at(place: str, name: str) -> object:
    """The function of a source, in another process than the one that made the source."""
    if place.endswith(".py"):
        return load_function(f"{place}:{name}")
    try:
        found: object = importlib.import_module(place)
    except SystemExit as leave:
        raise UserError(f"rewards: module {place} cannot be imported: it calls {exit_call(leave)}") from leave
    except Exception as error:
        raise UserError(f"rewards: module {place} cannot be imported: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        found = getattr(found, part)
    return found


def load_function(path: str) -> Callable[..., object]:
    """The function that FILE.py:FUNCTION or package.module:FUNCTION names."""
    place, _, name = path.rpartition(":")
    found = object_in_file(path, where="rewards") if place.endswith(".py") else object_in_module(path, where="rewards")
    if not callable(found) or isinstance(found, type):
        raise UserError(
            f"rewards: `{name}` in {place} is a {type(found).__name__} and cannot score completions; name a function,"
            " or an object with a __call__ method"
        )
    return found
