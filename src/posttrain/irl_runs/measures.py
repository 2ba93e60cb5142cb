"""What a recovered reward is worth: numbers that mean the same whatever method found it."""

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from posttrain.irl.comparison import expected_value_difference
from posttrain.irl.counting import in_world, visit_totals
from posttrain.irl.divergence import Divergence
from posttrain.irl.mdp import TabularMDP
from posttrain.irl.occupancies import finite_occupancy, occupancy
from posttrain.irl.planning import greedy_policy
from posttrain.irl_runs.expert_episodes import ExpertEpisodes
from posttrain.irl_runs.methods import AnyPolicy, RecoveredReward
from posttrain.irl_runs.worlds import World

NUM_TOP = 5
"""Best states that are named."""


def expected_visits(mdp: TabularMDP, policy: AnyPolicy) -> Float[ndarray, " state"] | None:
    """Expected visits of each state in an episode of the policy; None where it may never end."""
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
    """How much less than the best policy a policy earns of what the expert is after; None where that is unknown."""
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
