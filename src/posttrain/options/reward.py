"""Which reward functions score a completion: an item of a recipe's `rewards` section."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import ClassVar

from posttrain.options.bounds import Bounded, FiniteFloat, NonNegativeFloat, NonNegativeInt
from posttrain.options.reward_model import OF_MODELS, EnsembleOptions, RewardModelOptions, folder_name
from posttrain.options.rules import GIVEN, Rule, Rules, Unused


@dataclass(frozen=True, kw_only=True)
class CallOptions(Bounded):
    """In which process a reward function is called, for how long, and whether twice.

    Workers call a function of lists once for each prompt, with that prompt's completions.  A function that compares
    completions of different prompts must stay in the trainer's process.
    """

    workers: NonNegativeInt = 0
    """Separate processes that call it, so that a deadline or a crash does no harm; 0 is the trainer's process."""
    item_seconds: NonNegativeFloat = 0.0
    """Deadline for one completion; n times that for n in a call.  Needs workers or an async function."""
    seconds: NonNegativeFloat = 0.0
    """Deadline for all completions of a step, retries included; needs workers or an async function."""
    cache: bool = False
    """Call it once for the same completion and columns: you promise that each score depends on nothing else.  A change
    of its file is noticed, a change of what the file imports is not."""

    rules: ClassVar[Rules] = (
        Rule(
            "item_seconds",
            lambda o: not o.seconds or o.item_seconds <= o.seconds,
            "is more than seconds = {o.seconds}, the deadline for all completions together.  Use less.",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class RewardTerms(Bounded):
    """When a reward counts, and how much."""

    weight: FiniteFloat = 1.0
    """Factor of its scores in the sum; with 0 they are only reported."""
    where: Mapping[str, object] = field(default_factory=dict)
    """Columns and the values that a row must have, such as `{kind: code}`; the reward skips all other rows."""
    gate: str = ""
    """Another reward whose score must be above 0; else this one is 0 and is not called: "format must hold first"."""
    of: str = ""
    """Another reward whose scores this one gets as its argument `base`, as `cosine_length` does."""
    clip: tuple[float, float] | None = None
    """Bounds, [low, high], of its part of the sum; the score is logged without them."""
    weight_to: FiniteFloat | None = None
    """The weight at step `over_steps`, reached linearly from `weight`."""
    over_steps: NonNegativeInt = 0
    """Steps from the first weight to `weight_to`."""

    rules: ClassVar[Rules] = (
        Rule(
            "clip",
            lambda o: o.clip is None or (o.clip[0] < o.clip[1] and all(map(isfinite, o.clip))),
            "must be two finite bounds, the lower one first.  Use such as [-1, 1].",
        ),
        Rule("over_steps", lambda o: (o.weight_to is None) == (o.over_steps == 0), "goes with weight_to.  Give both."),
    )

    def weight_at(self, step: int) -> float:
        if self.weight_to is None:
            return self.weight
        share = min(1.0, max(0, step - 1) / self.over_steps)
        return self.weight + share * (self.weight_to - self.weight)

    def applies(self, columns: Mapping[str, object]) -> bool:
        return all(columns.get(name) == value for name, value in self.where.items())


@dataclass(frozen=True, kw_only=True)
class RewardSettings(CallOptions, RewardTerms):
    """When a reward function counts, and how it is called."""


@dataclass(frozen=True, kw_only=True)
class RewardOptions(RewardModelOptions, EnsembleOptions, RewardSettings):
    """One reward function, by name or by path, or a reward model; and its settings."""

    name: str = ""
    """A reward function of this package; or a name for a reward model, whose default is its folder."""
    path: str = ""
    """Your function, as FILE.py:FUNCTION or package.module:FUNCTION; give this, `name` or `model`."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Options of a reward of this package, such as `{max_tokens: 400, cache_tokens: 100}`."""

    rules: ClassVar[Rules] = (
        Rule(
            "path",
            lambda o: bool(o.name or o.model) != bool(o.path),
            "with name = {o.name!r} and model = {o.model!r} is not one reward.  Give `name: graded_format`,"
            " `path: my_rewards.py:solved` or `model: my-reward-model`.",
        ),
        Unused("options", {"path": "", "model": ""}, "They are for rewards of this package."),
        Unused("ensemble", {"model": GIVEN}, "Name its first reward model as model."),
        Unused(OF_MODELS, {"model": GIVEN}),
        Rule(
            "name",
            lambda o: not o.name or o.model or o.name.isidentifier(),
            "is not a name of a reward.  For your function use path: FILE.py:FUNCTION.",
        ),
        Rule(
            "path",
            lambda o: not o.path or is_path(o.path),
            "is not FILE.py:FUNCTION or package.module:FUNCTION.  Use such as my_rewards.py:solved.",
        ),
        Unused("workers cache", {"path": GIVEN}, "Rewards of this package and reward models need no workers or cache."),
    )

    @property
    def called(self) -> str:
        return self.name or self.path.rpartition(":")[2] or folder_name(self.model)


def is_path(path: str) -> bool:
    """Whether a text is FILE.py:FUNCTION or package.module:FUNCTION."""
    place, _, function = path.rpartition(":")
    module = place.endswith(".py") or all(part.isidentifier() for part in place.split("."))
    return module and function.isidentifier()
