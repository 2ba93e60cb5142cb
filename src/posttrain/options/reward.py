"""Which reward functions score a completion: an item of a recipe's `rewards` section."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from posttrain.errors import UserError, require
from posttrain.options.bounds import Bounded, FiniteFloat, NonNegativeFloat, NonNegativeInt
from posttrain.options.reward_model import EnsembleOptions, RewardModelOptions, folder_name


@dataclass(frozen=True, kw_only=True)
class CallOptions(Bounded):
    """In which process a reward function is called, for how long, and whether twice.

    In workers, a function of lists is called once for each prompt, with that prompt's completions, however many workers
    there are; one that compares completions of different prompts has to stay in the trainer's process.
    """

    workers: NonNegativeInt = 0
    """Processes of its own that call it, which a deadline or a crash ends without harm; 0 is the trainer's process."""
    item_seconds: NonNegativeFloat = 0.0
    """Deadline for one completion, or for a call with n of them n times as long; needs workers or an async function."""
    seconds: NonNegativeFloat = 0.0
    """Deadline for all completions of a step together, other tries included; needs workers or an async function."""
    cache: bool = False
    """Ask once about the same completion and columns: you promise that it scores each completion by itself alone.
    A change of its file is noticed, a change of what the file imports is not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = not self.seconds or self.item_seconds <= self.seconds
        require(fits, self, "item_seconds", f"is more than seconds = {self.seconds} allows all completions together")


@dataclass(frozen=True, kw_only=True)
class RewardTerms(Bounded):
    """When a reward counts, and how much."""

    weight: FiniteFloat = 1.0
    """What its scores are multiplied by in the sum; 0 reports them and trains on none of them."""
    where: Mapping[str, object] = field(default_factory=dict)
    """Columns and the values that a row must have there, such as `{kind: code}`; the reward applies to no other row."""
    gate: str = ""
    """Another reward whose score must be above 0, else this one is 0 and is not asked: "format must hold first"."""
    of: str = ""
    """Another reward whose scores this one is given, as its argument `base`: `cosine_length` asks what was solved."""
    clip: tuple[float, float] | None = None
    """Bounds, [low, high], of what goes into the sum; the score itself is logged as it was."""
    weight_to: FiniteFloat | None = None
    """The weight at step `over_steps`, reached in a line from `weight`."""
    over_steps: NonNegativeInt = 0
    """Steps from the first weight to `weight_to`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip is not None:
            ordered = self.clip[0] < self.clip[1] and all(math.isfinite(bound) for bound in self.clip)
            require(ordered, self, "clip", "must be two finite bounds, the lower one first")
        paired = (self.weight_to is None) == (self.over_steps == 0)
        require(paired, self, "over_steps", "goes with weight_to: give both, or neither")

    def weight_at(self, step: int) -> float:
        """The weight in a step; steps count from 1."""
        if self.weight_to is None:
            return self.weight
        share = min(1.0, max(0, step - 1) / self.over_steps)
        return self.weight + share * (self.weight_to - self.weight)

    def applies(self, columns: Mapping[str, object]) -> bool:
        """Whether a row with these columns is one of those meant."""
        return all(columns.get(name) == value for name, value in self.where.items())


@dataclass(frozen=True, kw_only=True)
class RewardSettings(CallOptions, RewardTerms):
    """All that is said of a reward function beside which one it is: when it counts, and how it is called."""

    def __post_init__(self) -> None:
        RewardTerms.__post_init__(self)
        CallOptions.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class RewardOptions(RewardModelOptions, EnsembleOptions, RewardSettings):
    """One reward function, by name or by path, or a reward model; and its settings."""

    name: str = ""
    """A reward function of this package, by name; or what a reward model is to be called, else by its folder."""
    path: str = ""
    """A function of your own, as FILE.py:FUNCTION or package.module:FUNCTION; give this, `name` or `model`."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Options of a reward of this package that has some, such as `{max_tokens: 400, cache_tokens: 100}`."""

    def __post_init__(self) -> None:
        RewardSettings.__post_init__(self)
        RewardModelOptions.__post_init__(self)
        EnsembleOptions.__post_init__(self)
        if (self.path or self.model) and self.options:
            given = self.path or f"a reward model has options beside `model`, and {self.model}"
            raise UserError(f"options = {dict(self.options)} are for rewards of this package; {given} takes none")
        if [self.name == "" and self.model == "", self.path == ""].count(False) != 1:
            raise UserError(
                "a reward has either a name (`name: graded_format`), a path (`path: my_rewards.py:solved`) or a model"
                " (`model: my-reward-model`)"
            )
        if self.ensemble and not self.model:
            raise UserError(
                f"ensemble = {', '.join(self.ensemble)} is more beside `model`, and {self.called} is a function.  Name"
                " the first of them as model."
            )
        if self.model_options and not self.model:
            option, value = next(iter(self.model_options.items()))
            raise UserError(f"{option} = {value} is of a reward model, and {self.called} is a function; leave it out")
        named = self.name == "" or self.model != "" or self.name.isidentifier()
        require(named, self, "name", "is no name of a reward; a function of your own is path: FILE.py:FUNCTION")
        place, _, function = self.path.rpartition(":")
        found = place.endswith(".py") or all(part.isidentifier() for part in place.split("."))
        rule = "is not FILE.py:FUNCTION, such as my_rewards.py:solved, and not package.module:FUNCTION"
        require(self.path == "" or (found and function.isidentifier()), self, "path", rule)
        for option in ("workers", "cache"):
            own = self.path != "" or not getattr(self, option)
            require(own, self, option, f"is for functions of your own; {self.called} sees to it by itself")

    @property
    def called(self) -> str:
        """The name that its scores are logged under."""
        return self.name or self.path.rpartition(":")[2] or folder_name(self.model)
