"""The `features`, `method` and `run` sections of a recipe for inverse RL; the first two are chosen by `name`."""

from dataclasses import dataclass
from typing import Literal

from posttrain.options.bounds import Bounded, NonEmptyStr, NonNegativeFloat, PositiveFloat, PositiveInt, Share


@dataclass(frozen=True, kw_only=True)
class StateFeatures:
    """One feature for each state: the reward of every state is free."""

    name: Literal["states"] = "states"


@dataclass(frozen=True, kw_only=True)
class TileFeatures(Bounded):
    """A constant, and one feature for each square tile of a grid."""

    name: Literal["tiles"] = "tiles"
    width: PositiveInt = 2
    """States along each side of a tile."""


@dataclass(frozen=True, kw_only=True)
class FileFeatures(Bounded):
    """Features from a file of yours."""

    name: Literal["file"] = "file"
    path: NonEmptyStr = ""
    """An .npy file with a row for each state, or for state_action a row state · num_actions + action, and a column for
    each feature."""
    on: Literal["state", "state_action", "next_state"] = "state"
    """What they are features of: where one acts, the action too, or where it leads."""


@dataclass(frozen=True, kw_only=True)
class CourseOptions(Bounded):
    """The course's algorithm as taught, for small grids: exponentiated gradient from weights of 1."""

    name: Literal["course"] = "course"
    step_size: PositiveFloat = 0.2
    """α of the first step; step t has α/(1 + t)."""
    tolerance: PositiveFloat = 1e-4
    """Stop once no weight moves by more; the shrinking step makes sure of that."""


@dataclass(frozen=True, kw_only=True)
class PathOptions(Bounded):
    """Maximum entropy over paths (2008), solved exactly; right for worlds without chance."""

    name: Literal["maxent"] = "maxent"
    gradient: Literal["tilted", "algorithm1"] = "tilted"
    """`tilted`: the gradient of the likelihood.  `algorithm1`: the paper's, which is not one on ice."""
    l2: NonNegativeFloat = 1e-3
    """Penalty (l2/2)‖θ‖² on the weights."""
    tolerance: PositiveFloat = 1e-8
    """Largest entry of the gradient at which the fit is done."""
    max_iterations: PositiveInt = 1000
    """Steps at most."""


@dataclass(frozen=True, kw_only=True)
class CausalOptions(Bounded):
    """Maximum causal entropy: an agent that cannot choose its luck.  Solved exactly."""

    name: Literal["causal"] = "causal"
    objective: Literal["dual", "likelihood"] = "dual"
    """`dual`: convex, matches features.  `likelihood`: makes the demonstrated actions likely; not convex in general."""
    discount: Share = 1.0
    """Weight of the next step's reward, 0 to 1; at 1 every episode must be able to end."""
    temperature: PositiveFloat = 1.0
    """How much entropy is worth, in units of reward; the lower, the greedier the fitted policy."""
    horizon: PositiveInt | None = None
    """Most actions in an episode; null sets no limit."""
    l2: NonNegativeFloat = 1e-3
    """Penalty (l2/2)‖θ‖² on the weights; with 0, features that no policy can match have no finite weights."""
    solver: Literal["auto", "newton", "lbfgs"] = "auto"
    """`newton` takes about ten steps, `lbfgs` hundreds that are cheap; `auto` is Newton up to 500 weights."""
    tolerance: PositiveFloat = 1e-8
    """Largest entry of the gradient at which the fit is done."""
    max_iterations: PositiveInt = 5000
    """Steps at most."""


@dataclass(frozen=True, kw_only=True)
class RecoveryOptions(Bounded):
    """Where a run is kept, and what is written into it besides the reward."""

    folder: NonEmptyStr = "runs/irl"
    """Everything the run writes goes here; an existing run is never overwritten unless `overwrite` is set."""
    overwrite: bool = False
    """Delete the run in `folder` and start again."""
    plots: bool = True
    """Draw rewards, policy, visits and convergence as PNG files."""
    least_gap: bool = True
    """Find the least gap that any policy can reach, by a linear program: eight minutes for 10,000 states."""


FeatureOptions = StateFeatures | TileFeatures | FileFeatures
MethodOptions = CourseOptions | PathOptions | CausalOptions

FEATURE_OPTIONS: dict[str, type[FeatureOptions]] = {
    "states": StateFeatures,
    "tiles": TileFeatures,
    "file": FileFeatures,
}
"""The option class of each kind of features, by the name it has in recipes."""
METHOD_OPTIONS: dict[str, type[MethodOptions]] = {
    "course": CourseOptions,
    "maxent": PathOptions,
    "causal": CausalOptions,
}
"""The option class of each method, by the name it has in recipes."""
