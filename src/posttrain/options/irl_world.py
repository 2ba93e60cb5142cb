"""The `world` and `demonstrations` sections of a recipe for inverse RL, each a class chosen by `name`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Literal

from posttrain.options.bounds import (
    Bounded,
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
)
from posttrain.options.rules import GIVEN, Rule, Unused

OUTSIDE = "has a state outside of the grid, {o.size} · {o.size}.  Count states from 0, or from -1 down."


@dataclass(frozen=True, kw_only=True)
class IcyGridOptions(Bounded):
    """A square grid on which steps slip; state y · size + x, actions +x, −x, +y, −y."""

    name: Literal["icy_grid"] = "icy_grid"
    size: PositiveInt = 5
    """States along each side."""
    slip: Share = 0.2
    """Probability, 0 to 1, that a step goes in a random one of the four directions; 0 is dry ground."""
    starts: tuple[int, ...] = (0,)
    """States in which episodes start, equally often; empty is any state but an end.  Negative numbers count from the
    last state, here and below."""
    ends: tuple[int, ...] = (-1,)
    """States that end an episode on arrival."""
    rewards: tuple[tuple[int, float], ...] = ()
    """Pairs of a state and its reward to the expert; all other states have the reward `ground`."""
    ground: float = 0.0
    """Reward of all other states."""
    terrain: int = 0
    """Width of square tiles of terrain, each of which adds a number to its states' rewards; 0 is none."""
    terrain_low: float = -1.0
    """The least that a tile adds; numbers from there to 0 are equally likely."""
    terrain_seed: NonNegativeInt = 0
    """The tiles' numbers are a function of it."""

    rules = (
        Rule("terrain", lambda o: 0 <= o.terrain <= o.size, "is not a width on this grid.  Use 0 to size = {o.size}."),
        Rule(
            "terrain_low", lambda o: -inf < o.terrain_low <= 0, "must not be above 0, and finite.  Use a number <= 0."
        ),
        Unused("terrain_low terrain_seed", {"terrain": GIVEN}),
        Rule("ground", lambda o: isfinite(o.ground), "must be finite.  Use a finite number."),
        Rule("starts", lambda o: o.has("starts"), OUTSIDE),
        Rule("ends", lambda o: o.has("ends"), OUTSIDE),
        Rule("rewards", lambda o: o.has("rewards"), OUTSIDE),
        Rule("rewards", lambda o: all(isfinite(each) for _, each in o.rewards), "must be finite.  Change it."),
        Rule("starts", lambda o: not o.indices("starts") & o.indices("ends"), "has one of ends.  Change it."),
    )

    def states(self, option: str) -> list[int]:
        return [each[0] if isinstance(each, tuple) else each for each in getattr(self, option)]

    def has(self, option: str) -> bool:
        return all(-(self.size**2) <= each < self.size**2 for each in self.states(option))

    def indices(self, option: str) -> set[int]:
        """The states that an option names, counted from 0."""
        return {each % self.size**2 for each in self.states(option)}


@dataclass(frozen=True, kw_only=True)
class GymnasiumOptions:
    """An environment of gymnasium that has a transition table: FrozenLake, CliffWalking, Taxi."""

    name: Literal["gymnasium"] = "gymnasium"
    env: str = "FrozenLake-v1"
    """Its id in gymnasium's registry."""
    options: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """Arguments of `gymnasium.make`, such as map_name: 8x8."""


@dataclass(frozen=True, kw_only=True)
class TableOptions(Bounded):
    """A world from a file of yours."""

    name: Literal["table"] = "table"
    path: NonEmptyStr = ""
    """An .npz file with the array `transitions` (state, action, next state), or, sparse, the arrays `data`, `indices`
    and `indptr` of a matrix with a row state · num_actions + action; `start`, a probability for each state; `terminal`,
    the numbers of the states that end an episode, or a flag for each state; and, if the true reward is known, `rewards`
    (state, or state and action)."""


@dataclass(frozen=True, kw_only=True)
class SampledOptions(Bounded):
    """Demonstrations of an expert who knows the world's rewards."""

    name: Literal["sampled"] = "sampled"
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

    rules = (Unused("steepness", {"expert": "course"}), Unused("temperature", {"expert": "soft"}))


@dataclass(frozen=True, kw_only=True)
class RecordedOptions(Bounded):
    """Demonstrations in a file."""

    name: Literal["recorded"] = "recorded"
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
