"""Inverse reinforcement learning: which reward explains the demonstrated behaviour.

    world = IcyGridWorld(5, slip=0.2)
    demonstrations = sample_demonstrations(world, policy, num_episodes=200, rng=np.random.default_rng(0))
    fit = MaxCausalEntIRL().fit(world, LinearReward(features=np.eye(25)), demonstrations)
    fit.reward, fit.policy, fit.gap

Worlds are tables and everything is exact: no simulation, no learning rates.  numpy and scipy only, in float64
and in log space; neural rewards are in `posttrain.neural_irl`, which needs torch.
"""

from posttrain.irl.causal import MaxCausalEntIRL
from posttrain.irl.comparison import (
    epic_distance,
    expected_value_difference,
    finite_occupancy,
    occupancy,
    policy_divergence,
    transfer_loss,
)
from posttrain.irl.demonstrations import Demonstrations, Episode
from posttrain.irl.episode_sampling import sample_demonstrations
from posttrain.irl.feasibility import smallest_gap
from posttrain.irl.features import LinearReward
from posttrain.irl.fitting import Fit
from posttrain.irl.grids import GridWorld, IcyGridWorld, tiles
from posttrain.irl.gymnasium_table import read_gymnasium
from posttrain.irl.linear_solvers import ConvergenceWarning, Divergence
from posttrain.irl.maxent import MaxEntIRL, PathFit
from posttrain.irl.mdp import TabularMDP
from posttrain.irl.planning import (
    Problem,
    action_values,
    greedy_policy,
    soft_finite_horizon,
    soft_policy_iteration,
    soft_value_iteration,
    value_iteration,
)
from posttrain.irl.preferences import PreferenceFit, fit_jointly, fit_preferences
from posttrain.irl.uncertainty import confidence_intervals, identifiability

__all__ = [
    "ConvergenceWarning",
    "Demonstrations",
    "Divergence",
    "Episode",
    "Fit",
    "GridWorld",
    "IcyGridWorld",
    "LinearReward",
    "MaxCausalEntIRL",
    "MaxEntIRL",
    "PathFit",
    "PreferenceFit",
    "Problem",
    "TabularMDP",
    "action_values",
    "confidence_intervals",
    "epic_distance",
    "expected_value_difference",
    "finite_occupancy",
    "fit_jointly",
    "fit_preferences",
    "greedy_policy",
    "identifiability",
    "occupancy",
    "policy_divergence",
    "read_gymnasium",
    "sample_demonstrations",
    "smallest_gap",
    "soft_finite_horizon",
    "soft_policy_iteration",
    "soft_value_iteration",
    "tiles",
    "transfer_loss",
    "value_iteration",
]
