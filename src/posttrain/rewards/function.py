"""What a reward function is, and what it asks to be called with."""

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from posttrain.errors import UserError
from posttrain.rewards.asking_options import Asking
from posttrain.rewards.homes import Home, home_of
from posttrain.rewards.terms_options import Terms


class ScoringFailure(Exception):
    """Scoring itself failed (a killed worker, a judge's error 500), which says nothing about the completion.

    A reward function raises it for the whole call, or returns it in place of the scores it could not get.  These are
    asked for again twice, then left out and counted; never are they a 0.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """A callable under a name and a weight; posttrain.rewards.protocol says how it is called."""

    name: str
    """Its scores are logged under this name."""
    call: Callable[..., object]
    weight: float = 1.0
    """What its scores are multiplied by in the sum; 0 reports them and trains on none of them."""
    text_only: bool = False
    """Give it prompts and completions as text also where the prompt is a conversation."""
    terms: Terms = field(default_factory=Terms)
    """When it counts, and how much."""
    asking: Asking = field(default_factory=Asking)
    """In which process it is called, and for how long."""
    bounded: bool = False
    """It is known to come back: it takes linear time, or has limits of its own."""
    home: Home | None = None
    """Where it was loaded from, if it was."""

    def __post_init__(self) -> None:
        if not callable(self.call) or isinstance(self.call, type):
            raise UserError(
                f"reward {self.name!r}: {self.call!r} cannot score completions. Give a function, or an object with a"
                " __call__ method (an instance, not its class)."
            )
        if not math.isfinite(self.weight):
            raise UserError(f"reward {self.name!r}: weight = {self.weight} must be a finite number")

    def found(self) -> Home:
        """Where another process finds it by name.  Raises UserError where none can."""
        return self.home or home_of(self.call, self.name)

    @property
    def is_async(self) -> bool:
        """Whether it is an `async def`, or an object whose call is one."""
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
    terms: Terms | None = None,
    asking: Asking | None = None,
) -> RewardFunction:
    """A callable as a reward function, by default under its own name: `__name__`, or the class of an object."""
    named, terms, asking = name or own_name(call), terms or Terms(), asking or Asking()
    return RewardFunction(name=named, call=call, weight=weight, text_only=text_only, terms=terms, asking=asking)


def own_name(call: object) -> str:
    """A function's name, also from under functools.partial; an object's class."""
    while isinstance(call, functools.partial):
        call = call.func
    return str(getattr(call, "__name__", type(call).__name__))


@dataclass(frozen=True, slots=True)
class Keywords:
    """The keywords of a function's signature."""

    required: frozenset[str]
    optional: frozenset[str]
    takes_any: bool
    """Whether there is a `**kwargs`."""

    @property
    def one_by_one(self) -> bool:
        """Whether it scores one completion per call, `(response, ground_truth) -> float`, rather than lists of all."""
        named = self.required | self.optional
        return "response" in named and not named & {"prompts", "completions", "completion_ids"}

    def wants(self, name: str) -> bool:
        """Whether an argument of this name can be given."""
        return self.takes_any or name in self.required or name in self.optional


def keywords(function: RewardFunction) -> Keywords:
    """What a reward function may and must be called with."""
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
