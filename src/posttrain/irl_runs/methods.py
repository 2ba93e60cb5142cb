"""The `method` section: three ways from demonstrations to a reward, one record of the result, and its measures."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from posttrain.irl.array_files import read_array
from posttrain.irl.causal import MaxCausalEntIRL
from posttrain.irl.comparison import expected_value_difference, finite_occupancy, occupancy
from posttrain.irl.counting import check_whole, in_world, visit_totals
from posttrain.irl.course import feature_expectations, local_action_probabilities, recover_reward, start_histogram
from posttrain.irl.demonstrations import Demonstrations
from posttrain.irl.feasibility import smallest_gap
from posttrain.irl.features import LinearReward, Weights, dense
from posttrain.irl.fitting import Fit
from posttrain.irl.grids import tiles
from posttrain.irl.linear_solvers import Divergence
from posttrain.irl.maxent import MaxEntIRL, PathFit
from posttrain.irl.mdp import TabularMDP
from posttrain.irl.minimisers import Watch
from posttrain.irl.objectives import Setting
from posttrain.irl.planning import Reward, greedy_policy
from posttrain.irl.uncertainty import identifiability
from posttrain.irl_runs.expert_episodes import ExpertEpisodes
from posttrain.irl_runs.worlds import World
from posttrain.options.irl import (
    CausalOptions,
    CourseOptions,
    FeatureOptions,
    FileFeatures,
    MethodOptions,
    PathOptions,
    TileFeatures,
)

AnyPolicy = Float[ndarray, "*horizon state action"]
"""π(a|s); with a horizon it depends on the time too."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RecoveredReward:
    """The result of any method."""

    weights: Weights
    reward: Reward
    policy: AnyPolicy
    expected: Weights
    """Features of an episode, as the method expects them of its policy."""
    moments: Weights
    """Features of a demonstration, which `expected` should match."""
    converged: bool
    curve: tuple[Mapping[str, float], ...]
    """The numbers of each iteration."""
    measures: Mapping[str, object] = field(default_factory=dict)
    """Other entries of summary.json that this method has."""
    setting: Setting | None = None
    """For the least gap of any policy; None if policies are not stationary."""

    @property
    def gap(self) -> float:
        """The largest difference between a feature of a demonstration and what the method expects."""
        return float(np.abs(self.expected - self.moments).max())


def linear_reward(options: FeatureOptions, world: World) -> LinearReward:
    """The reward model of a recipe: a weight for each of its features."""
    num_states = world.mdp.num_states
    match options:
        case TileFeatures():
            assert world.layout is not None, "IrlConfig sees to that"
            return LinearReward(features=tiles(world.layout.width, options.width))
        case FileFeatures():
            return LinearReward(features=read_array(options.path, where="features.path = "), on=options.on)
    from scipy.sparse import eye_array

    return LinearReward(features=eye_array(num_states).tocsr() if num_states > 1000 else np.eye(num_states))


def fit_reward(
    options: MethodOptions,
    world: World,
    reward: LinearReward,
    demonstrations: Demonstrations,
    watch: Watch | None = None,
) -> RecoveredReward:
    """Find the reward by the method of a recipe; the course's algorithm does not call `watch`."""
    match options:
        case CourseOptions():
            return fit_course(options, world, reward, demonstrations)
        case PathOptions():
            return fit_maxent(options, world, reward, demonstrations, watch)
        case CausalOptions():
            return fit_causal(options, world, reward, demonstrations, watch)


def fit_course(
    options: CourseOptions, world: World, reward: LinearReward, demonstrations: Demonstrations
) -> RecoveredReward:
    """Run the course's algorithm, on the grid in which episodes continue after the ends."""
    grid, features = world.endless, dense(reward.bound(world.mdp).table)
    assert grid is not None, "IrlConfig sees to that"
    known = in_world(demonstrations, world.mdp)
    check_whole(known, world.mdp, discount=1.0, horizon=None)
    step_size, tolerance = options.step_size, options.tolerance
    taught = recover_reward(grid.mdp, features, grid.ends, known, step_size=step_size, tolerance=tolerance)
    worth = features @ taught.weights
    shares = local_action_probabilities(grid.mdp, grid.ends, worth)
    # Where no path reaches an end within its sweeps the algorithm has no policy: take the uniform one.
    policy = np.where(shares.sum(axis=1, keepdims=True) > 0, shares, 1 / grid.mdp.num_actions)
    return RecoveredReward(
        weights=taught.weights,
        reward=worth,
        policy=policy,
        expected=features.T @ taught.visitations,
        moments=feature_expectations(features, known),
        converged=True,  # by its own rule: the step has shrunk
        curve=tuple({"gap": gap, "largest_step": step} for gap, step in taught.history),
        measures={"expected_path_states": float(taught.visitations.sum())},
        setting=undiscounted_setting(world, reward, known),
    )


def fit_maxent(
    options: PathOptions, world: World, reward: LinearReward, demonstrations: Demonstrations, watch: Watch | None
) -> RecoveredReward:
    irl = MaxEntIRL(**settings_of(MaxEntIRL, options))
    fit = irl.fit(world.mdp, reward, demonstrations, watch=watch)
    setting = undiscounted_setting(world, reward, in_world(demonstrations, world.mdp))
    return reward_of_fit(fit, measures={"executed_gap": fit.executed_gap}, setting=setting)


def fit_causal(
    options: CausalOptions, world: World, reward: LinearReward, demonstrations: Demonstrations, watch: Watch | None
) -> RecoveredReward:
    irl = MaxCausalEntIRL(**settings_of(MaxCausalEntIRL, options))
    fit = irl.fit(world.mdp, reward, demonstrations, watch=watch)
    return reward_of_fit(fit, measures=fit_measures(fit), setting=fit.setting if options.horizon is None else None)


def settings_of(method: type, options: PathOptions | CausalOptions) -> dict[str, Any]:
    return {each.name: getattr(options, each.name) for each in fields(method)}


def reward_of_fit(fit: Fit | PathFit, *, measures: Mapping[str, object], setting: Setting | None) -> RecoveredReward:
    shared = {name: getattr(fit, name) for name in ("weights", "reward", "policy", "expected", "moments", "converged")}
    curve = tuple({"objective": value, "largest_gradient": gradient} for value, gradient in fit.history)
    return RecoveredReward(**shared, curve=curve, measures=measures, setting=setting)


def undiscounted_setting(world: World, reward: LinearReward, known: Demonstrations) -> Setting:
    """The setting of the least gap for a method that counts whole episodes."""
    return MaxCausalEntIRL().setting(reward.bound(world.mdp), start_histogram(world.mdp.num_states, known))


def fit_measures(fit: Fit) -> dict[str, object]:
    identified = identifiability(fit)
    return {
        "gap_error": fit.gap_error,
        "log_likelihood": fit.log_likelihood,
        "suboptimality": fit.suboptimality,
        "identified_combinations": identified.rank,
        "identified_weights": int(identified.identified.sum()),
    }


def least_gap(recovered: RecoveredReward) -> float | None:
    """The least gap of any policy; None if no linear program finds it."""
    if recovered.setting is None:
        return None
    try:
        return smallest_gap(recovered.setting, recovered.moments)
    except Divergence:
        return None


NUM_TOP = 5
"""Best states that are named."""


def expected_visits(mdp: TabularMDP, policy: AnyPolicy) -> Float[ndarray, " state"] | None:
    """Expected visits of each state in an episode of the policy; None if it may never end."""
    if policy.ndim == 3:
        visits: ndarray = finite_occupancy(mdp, policy, discount=1.0, horizon=len(policy)).sum(axis=0)
        return visits
    try:
        return occupancy(mdp, policy, discount=1.0)
    except Divergence:
        return None


def demonstrated_visits(world: World, expert: ExpertEpisodes) -> Float[ndarray, " state"]:
    return visit_totals(in_world(expert.episodes, world.mdp), world.mdp.num_states)


def value_lost(world: World, expert: ExpertEpisodes, policy: AnyPolicy | None) -> float | None:
    """How much less of the expert's reward a policy earns than the best one; None if that reward is unknown."""
    if expert.reward is None or policy is None or policy.ndim == 3:
        return None
    try:
        return expected_value_difference(world.mdp, expert.reward, policy, discount=expert.discount)
    except Divergence:
        return None


def policy_measures(world: World, expert: ExpertEpisodes, recovered: RecoveredReward) -> dict[str, object]:
    """What the policy does and earns, compared with the demonstrations."""
    mdp, policy = world.mdp, recovered.policy
    shown, visits = demonstrated_visits(world, expert), expected_visits(mdp, policy)
    greedy = greedy_policy(mdp, policy) if policy.ndim == 2 else None
    return {
        "gap": recovered.gap,
        "visits_gap": None if visits is None else float(np.abs(visits - shown).max()),
        "steps_per_episode": None if visits is None else float(visits.sum()) - 1,
        "value_lost": value_lost(world, expert, policy),
        "value_lost_greedy": value_lost(world, expert, greedy),
        "value_lost_by_expert": value_lost(world, expert, expert.policy),
        "best_states": best_states(mdp, recovered),
    }


def best_states(mdp: TabularMDP, recovered: RecoveredReward) -> list[int] | None:
    """The states of most reward, best first, as the environment numbers them; None for rewards of actions."""
    if recovered.reward.ndim == 2:
        return None
    order = np.argsort(-recovered.reward, kind="stable")[:NUM_TOP]
    return [int(mdp.states[state]) for state in order]
