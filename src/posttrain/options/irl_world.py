"""The `world` and `demonstrations` sections of a recipe for inverse RL, each a class chosen by `name`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Literal

from posttrain.errors import UserError, require
from posttrain.options.bounds import (
    Bounded,
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
)
from posttrain.schemas import require_left_out


@dataclass(frozen=True, kw_only=True)
class IcyGridOptions(Bounded):
    """A square grid on which steps slip; state y · size + x, actions +x, −x, +y, −y."""

    name: Literal["icy_grid"] = "icy_grid"
    """Which kind of world this is."""
    size: PositiveInt = 5
    """States along each side."""
    slip: Share = 0.2
    """Probability, 0 to 1, that a step goes in a random one of the four directions; 0 is dry ground."""
    starts: tuple[int, ...] = (0,)
    """States in which episodes start, each as often; none means anywhere but in an end.  Negative numbers count from
    the last state, here and below."""
    ends: tuple[int, ...] = (-1,)
    """States that end an episode on arrival."""
    rewards: tuple[tuple[int, float], ...] = ()
    """Pairs of a state and what being there is worth to the expert; the ground elsewhere is worth what follows."""
    ground: float = 0.0
    """What a step anywhere else is worth."""
    terrain: int = 0
    """Width of square tiles of terrain, each of which adds a number of its own to its states' worth; 0 is none."""
    terrain_low: float = -1.0
    """The least that a tile adds; the most is 0, and all between are equally likely."""
    terrain_seed: NonNegativeInt = 0
    """The tiles' numbers are a function of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.terrain <= self.size, self, "terrain", f"is wider than the grid; use 0 to size = {self.size}")
        require(-inf < self.terrain_low <= 0, self, "terrain_low", "is no cost; use a number <= 0")
        if not self.terrain:
            require_left_out(self, ("terrain_low", "terrain_seed"), "is about tiles of terrain, and terrain is 0")
        require(isfinite(self.ground), self, "ground", "is no worth; use a finite number")
        last = self.size * self.size
        for option in ("starts", "ends", "rewards"):
            for entry in getattr(self, option):
                state = entry[0] if isinstance(entry, tuple) else entry
                if not -last <= state < last:
                    raise UserError(f"{option}: there is no state {state}; use 0 to {last - 1}, or -{last} to -1")
        for state, reward in self.rewards:
            if not isfinite(reward):
                raise UserError(f"rewards: that of state {state} is {reward}; use finite numbers")
        ended = {state % last for state in self.starts} & {state % last for state in self.ends}
        if ended:
            raise UserError(f"starts: state {min(ended)} ends an episode; start elsewhere, or leave it out of ends")


@dataclass(frozen=True, kw_only=True)
class GymnasiumOptions:
    """An environment of gymnasium that has a transition table: FrozenLake, CliffWalking, Taxi."""

    name: Literal["gymnasium"] = "gymnasium"
    """Which kind of world this is."""
    env: str = "FrozenLake-v1"
    """Its id in gymnasium's registry."""
    options: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """Arguments of `gymnasium.make`, such as map_name: 8x8."""


@dataclass(frozen=True, kw_only=True)
class TableOptions(Bounded):
    """A world of your own, in a file."""

    name: Literal["table"] = "table"
    """Which kind of world this is."""
    path: NonEmptyStr = ""
    """An .npz file with the array `transitions` (state, action, next state), or, sparse, the arrays `data`, `indices`
    and `indptr` of a matrix with a row state · num_actions + action; `start`, a probability for each state; `terminal`,
    the numbers of the states that end an episode, or a flag for each state; and, if the true reward is known, `rewards`
    (state, or state and action)."""


@dataclass(frozen=True, kw_only=True)
class SampledOptions(Bounded):
    """Demonstrations of an expert who knows the world's rewards."""

    name: Literal["sampled"] = "sampled"
    """Where demonstrations come from."""
    expert: Literal["course", "soft", "greedy"] = "soft"
    """`course`: π(a|s) ∝ exp(steepness · V(where a should lead)), V as if the ends went on paying.  `soft`: optimal for
    reward plus entropy.  `greedy`: the first best action."""
    discount: Share = 0.9
    """Weight of the next step's reward to the expert, 0 to 1; 1 needs ends that are always reached."""
    temperature: PositiveFloat = 1.0
    """How much entropy is worth to the soft expert, in units of reward."""
    steepness: NonNegativeFloat = 50.0
    """How strongly the course's expert prefers a better state, per unit of value."""
    num_episodes: PositiveInt = 200
    """Episodes that are sampled."""
    max_steps: PositiveInt = 10_000
    """Actions after which an episode is cut off."""
    seed: NonNegativeInt = 0
    """The episodes are a function of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, expert in (("steepness", "course"), ("temperature", "soft")):
            if self.expert != expert:
                require_left_out(self, (option,), f"is for expert = {expert}, and expert = {self.expert}")


@dataclass(frozen=True, kw_only=True)
class RecordedOptions(Bounded):
    """Demonstrations in a file."""

    name: Literal["recorded"] = "recorded"
    """Where demonstrations come from."""
    path: NonEmptyStr = ""
    """An .npz file with the arrays states, actions, lengths, terminated and truncated, as `Demonstrations.save` writes
    it: episodes end to end, one state more than actions in each."""
    discount: Share = 0.9
    """Weight of the next step's reward, 0 to 1, when the world's own reward is known and values are compared."""


WorldOptions = IcyGridOptions | GymnasiumOptions | TableOptions
DemonstrationOptions = SampledOptions | RecordedOptions

WORLD_OPTIONS: dict[str, type[WorldOptions]] = {
    "icy_grid": IcyGridOptions,
    "gymnasium": GymnasiumOptions,
    "table": TableOptions,
}
"""The option class of each kind of world, by the name it has in recipes."""
DEMONSTRATION_OPTIONS: dict[str, type[DemonstrationOptions]] = {"sampled": SampledOptions, "recorded": RecordedOptions}
"""The option class of each source of demonstrations, by the name it has in recipes."""
