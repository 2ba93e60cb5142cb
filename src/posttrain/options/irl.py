"""The sections of a recipe for inverse RL; all but `run` are classes chosen by `name`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Literal

from posttrain.options.bounds import (
    GIVEN,
    Bounded,
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rule,
    Share,
    Unused,
)

OUTSIDE = "has a state outside the grid of {o.size} · {o.size}.  Count states from 0, or from -1 down."


@dataclass(frozen=True, kw_only=True)
class IcyGridOptions(Bounded):
    """A square grid on which steps slip; state y · size + x, actions +x, −x, +y, −y."""

    name: Literal["icy_grid"] = "icy_grid"
    size: PositiveInt = 5
    """States along each side."""
    slip: Share = 0.2
    """Probability, 0 to 1, that a step goes in a random direction; 0 means no slipping."""
    starts: tuple[int, ...] = (0,)
    """States in which episodes start, with equal probability; empty: any state that is not an end.  Negative numbers
    count from the last state, here and below."""
    ends: tuple[int, ...] = (-1,)
    """States that end an episode on arrival."""
    rewards: tuple[tuple[int, float], ...] = ()
    """Pairs of a state and its reward to the expert; all other states have the reward `ground`."""
    ground: float = 0.0
    """Reward of all other states."""
    terrain: int = 0
    """Width of square tiles of terrain.  Each tile adds a number to its states' rewards; 0: no tiles."""
    terrain_low: float = -1.0
    """The smallest number that a tile adds; the numbers are uniform between it and 0."""
    terrain_seed: NonNegativeInt = 0
    """Seed of the tiles' numbers."""

    rules = (
        Rule("terrain", lambda o: 0 <= o.terrain <= o.size, "must be between 0 and size = {o.size}."),
        Rule("terrain_low", lambda o: -inf < o.terrain_low <= 0, "must be a finite number, at most 0."),
        Unused("terrain_low terrain_seed", {"terrain": GIVEN}),
        Rule("ground", lambda o: isfinite(o.ground), "must be a finite number."),
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
    """A gymnasium environment with a transition table: FrozenLake, CliffWalking, Taxi."""

    name: Literal["gymnasium"] = "gymnasium"
    env: str = "FrozenLake-v1"
    """Its id in gymnasium's registry."""
    options: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """Arguments of `gymnasium.make`, such as map_name: 8x8."""


@dataclass(frozen=True, kw_only=True)
class TableOptions(Bounded):
    """A world from your own file."""

    name: Literal["table"] = "table"
    path: NonEmptyStr = ""
    """An .npz file with the array `transitions` (state, action, next state), or, sparse, the arrays `data`, `indices`
    and `indptr` of a matrix with a row state · num_actions + action; `start`, a probability for each state; `terminal`,
    the numbers of the states that end an episode, or a flag for each state; and, if the true reward is known, `rewards`
    (state, or state and action)."""


@dataclass(frozen=True, kw_only=True)
class SampledOptions(Bounded):
    """Demonstrations by an expert who knows the world's rewards."""

    name: Literal["sampled"] = "sampled"
    expert: Literal["course", "soft", "greedy"] = "soft"
    """`course`: π(a|s) ∝ exp(steepness · V(where a should lead)), with V computed as if ends kept paying.  `soft`:
    optimal for reward plus entropy.  `greedy`: the first of the best actions."""
    discount: Share = 0.9
    """The expert's discount factor, 0 to 1; with 1, every episode must reach an end."""
    temperature: PositiveFloat = 1.0
    """Weight of entropy for the soft expert, in units of reward."""
    steepness: NonNegativeFloat = 50.0
    """How strongly the course's expert prefers better states, per unit of value."""
    num_episodes: PositiveInt = 200
    """Number of episodes to sample."""
    max_steps: PositiveInt = 10_000
    """Actions after which an episode is cut off."""
    seed: NonNegativeInt = 0
    """Seed of the episodes."""

    rules = (Unused("steepness", {"expert": "course"}), Unused("temperature", {"expert": "soft"}))


@dataclass(frozen=True, kw_only=True)
class RecordedOptions(Bounded):
    """Demonstrations in a file."""

    name: Literal["recorded"] = "recorded"
    path: NonEmptyStr = ""
    """An .npz file as `Demonstrations.save` writes it, with the arrays states, actions, lengths, terminated and
    truncated.  Episodes follow each other; each has one state more than actions."""
    discount: Share = 0.9
    """Discount factor, 0 to 1, used when the world's own reward is known and values are compared."""


WorldOptions = IcyGridOptions | GymnasiumOptions | TableOptions
DemonstrationOptions = SampledOptions | RecordedOptions


@dataclass(frozen=True, kw_only=True)
class StateFeatures:
    """One feature per state: every state has a free reward."""

    name: Literal["states"] = "states"


@dataclass(frozen=True, kw_only=True)
class TileFeatures(Bounded):
    """A constant, and one feature per square tile of a grid."""

    name: Literal["tiles"] = "tiles"
    width: PositiveInt = 2
    """States along each side of a tile."""


@dataclass(frozen=True, kw_only=True)
class FileFeatures(Bounded):
    """Features from your own file."""

    name: Literal["file"] = "file"
    path: NonEmptyStr = ""
    """An .npy file with one row per state (for state_action: row state · num_actions + action) and one column per
    feature."""
    on: Literal["state", "state_action", "next_state"] = "state"
    """What the features describe: the state, the state and the action, or the next state."""


@dataclass(frozen=True, kw_only=True)
class CourseOptions(Bounded):
    """The course's algorithm as taught, for small grids: exponentiated gradient from weights of 1."""

    name: Literal["course"] = "course"
    step_size: PositiveFloat = 0.2
    """α of the first step; step t has α/(1 + t)."""
    tolerance: PositiveFloat = 1e-4
    """Stop when no weight moves by more than this; the shrinking step ensures that it happens."""


@dataclass(frozen=True, kw_only=True)
class PathOptions(Bounded):
    """Maximum entropy over paths (2008), solved exactly; right for worlds without chance."""

    name: Literal["maxent"] = "maxent"
    gradient: Literal["tilted", "algorithm1"] = "tilted"
    """`tilted`: the gradient of the likelihood.  `algorithm1`: the paper's, which is not a gradient in worlds with
    chance."""
    l2: NonNegativeFloat = 1e-3
    """Penalty (l2/2)‖θ‖² on the weights."""
    tolerance: PositiveFloat = 1e-8
    """Largest entry of the gradient at which the fit is done."""
    max_iterations: PositiveInt = 1000
    """Steps at most."""


@dataclass(frozen=True, kw_only=True)
class CausalOptions(Bounded):
    """Maximum causal entropy: the agent chooses actions, not their random outcomes.  Solved exactly."""

    name: Literal["causal"] = "causal"
    objective: Literal["dual", "likelihood"] = "dual"
    """`dual`: convex, matches features.  `likelihood`: makes the demonstrated actions likely; not convex in general."""
    discount: Share = 1.0
    """Discount factor, 0 to 1; with 1, every episode must be able to end."""
    temperature: PositiveFloat = 1.0
    """Weight of entropy, in units of reward; the lower, the greedier the fitted policy."""
    horizon: PositiveInt | None = None
    """Maximum number of actions in an episode; null: no limit."""
    l2: NonNegativeFloat = 1e-3
    """Penalty (l2/2)‖θ‖² on the weights; with 0, features that no policy can match have no finite weights."""
    solver: Literal["auto", "newton", "lbfgs"] = "auto"
    """`newton` takes about ten steps, `lbfgs` hundreds of cheap ones; `auto` is Newton up to 500 weights."""
    tolerance: PositiveFloat = 1e-8
    """Largest entry of the gradient at which the fit is done."""
    max_iterations: PositiveInt = 5000
    """Steps at most."""


@dataclass(frozen=True, kw_only=True)
class RecoveryOptions(Bounded):
    """Where a run is saved, and what it contains besides the reward."""

    folder: NonEmptyStr = "runs/irl"
    """Everything the run writes goes here; an existing run is never overwritten unless `overwrite` is set."""
    overwrite: bool = False
    """Delete the run in `folder` and start again."""
    plots: bool = True
    """Draw rewards, policy, visits and convergence as PNG files."""
    least_gap: bool = True
    """Find the smallest gap that any policy can reach, by a linear program: eight minutes for 10,000 states."""


FeatureOptions = StateFeatures | TileFeatures | FileFeatures
MethodOptions = CourseOptions | PathOptions | CausalOptions
