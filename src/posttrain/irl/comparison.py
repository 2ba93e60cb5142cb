"""Occupancies, which say how often a policy visits each state, and rewards compared by what they make policies do.

Rewards are never compared by their numbers, which shaping changes.
"""

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray

from posttrain.errors import UserError
from posttrain.irl import arguments, planning
from posttrain.irl.linear_solvers import Divergence
from posttrain.irl.linear_systems import next_state_table, policy_system
from posttrain.irl.mdp import SUM_TOLERANCE, Start, TabularMDP, check_start, reachable, start_distribution

REMEDY = "Use a lower discount or a horizon"


def occupancy(mdp: TabularMDP, policy: arguments.Numbers, *, discount: float) -> Float[ndarray, " state"]:
    """Expected visits of each state, without horizon.

        D(s) = Σ_t γᵗ P(s_t = s),   D = (I - γ P_πᵀ)⁻¹ start

    At discount 1 a terminal state's entry is the probability of ending there, and the entries add up to the expected
    number of states in an episode, the last included.
    """
    start = arguments.require_kind(mdp, TabularMDP, "mdp").start
    return occupancy_from(mdp, policy, start, discount=discount)


def occupancy_from(
    mdp: TabularMDP, policy: arguments.Numbers, start: Start, *, discount: float
) -> Float[ndarray, " state"]:
    """Expected visits of each state in episodes with another start."""
    arguments.checked_number(discount, "discount", arguments.SHARE)
    acting = policy_array(mdp, policy)
    starts = start_distribution(start, mdp.num_states)
    check_start(starts)
    if discount == 1:
        visited = visited_states(mdp, acting, starts)
        # Elsewhere it may loop without end, which makes the matrix singular.
        acting = np.where(visited[:, None], acting, 0.0)
    try:
        visits: ndarray = policy_system(mdp, acting, discount).solve(starts, "T")
    except Divergence as error:
        raise Divergence(f"occupancy diverges at discount {discount}: {error}. {REMEDY}") from error
    if not np.abs(visits).max() < planning.UNBOUNDED:
        raise Divergence(
            f"occupancy diverges at discount {discount}: an episode of this policy visits some state"
            f" {planning.UNBOUNDED:.0e} times or more. {REMEDY}"
        )
    return visits


def finite_occupancy(
    mdp: TabularMDP, policy: arguments.Numbers, *, discount: float, horizon: int
) -> Float[ndarray, "time state"]:
    """The same for each time from 0 to `horizon`, discounted: row t is γᵗ P(s_t = s), and zero once an episode is over.

    The policy may depend on time.  The last row holds episodes that continue after `horizon` actions, and those that
    have just ended.
    """
    arguments.checked_number(discount, "discount", arguments.SHARE)
    arguments.require_kind(mdp, TabularMDP, "mdp")
    horizon = arguments.checked_integer(horizon, "horizon", least=0)
    given = arguments.real_array(policy, "the policy")
    if given.ndim == 3 and len(given) != horizon:
        raise UserError(f"the policy is given for {len(given)} steps, and the horizon is {horizon}")
    steps = [policy_array(mdp, step) for step in given] if given.ndim == 3 else [policy_array(mdp, given)] * horizon
    visits = np.empty((horizon + 1, mdp.num_states))
    visits[0] = mdp.start
    for t, now in enumerate(steps):
        visits[t + 1] = discount * (mdp.backward @ (now * visits[t][:, None]).ravel())
    return visits


def visited_states(
    mdp: TabularMDP, policy: planning.Policy, start: Float[ndarray, " state"]
) -> Bool[ndarray, " state"]:
    """The states that a policy visits.  Raises Divergence if it never ends from one of them."""
    edges = next_state_table(mdp, policy)
    edges.eliminate_zeros()
    visited = reachable(edges, start > 0)
    stuck = np.flatnonzero(visited & ~reachable(edges.T.tocsr(), mdp.terminal))
    if stuck.size:
        state = mdp.states[stuck[0]]
        raise Divergence(f"occupancy diverges at discount 1: from state {state} this policy never ends. {REMEDY}")
    return visited


def policy_array(mdp: TabularMDP, given: arguments.Numbers) -> planning.Policy:
    """A policy as an array, with a distribution over actions for every state that is not terminal."""
    arguments.require_kind(mdp, TabularMDP, "mdp")
    policy = arguments.real_array(given, "the policy")
    if policy.shape != (mdp.num_states, mdp.num_actions):
        raise UserError(f"the policy has the shape {policy.shape}; use {(mdp.num_states, mdp.num_actions)}")
    normal = (policy >= 0).all(axis=1) & (np.abs(policy.sum(axis=1) - 1) <= SUM_TOLERANCE)
    rule = "use numbers from 0 to 1, divided by their sum"
    arguments.check_entries(~normal & ~mdp.terminal, lambda i: f"policy of state {mdp.states[i]}: {policy[i]}; {rule}")
    return policy


OutcomeReward = Float[ndarray, "..."]
"""r(s), r(s,a), or r(s,a,s') with an axis for the state that follows."""


def policy_divergence(
    mdp: TabularMDP, reward: arguments.Numbers, other: arguments.Numbers, *, discount: float, temperature: float = 1.0
) -> float:
    """How differently two rewards make an agent act: discounted nats per episode, zero if and only if not at all.

    Σ_s D_π(s) KL(π(·|s) ‖ π'(·|s)),   π and π' the soft-optimal policies of `reward` and of `other`
    """
    first, second = (
        planning.soft_policy_iteration(
            planning.Problem(mdp=mdp, reward=planning.reward_array(mdp, r), discount=discount, temperature=temperature)
        )
        for r in (reward, other)
    )
    logs = [(plan.problem.backup(plan.values) - plan.values[:, None]) / temperature for plan in (first, second)]
    apart = (first.policy * (logs[0] - logs[1])).sum(axis=1)
    return float(np.where(mdp.terminal, 0.0, first.visits(mdp.start) * apart).sum())


def policy_value(mdp: TabularMDP, reward: arguments.Numbers, policy: arguments.Numbers, *, discount: float) -> float:
    """The return of a policy's episode, without entropy: Σ_s,a D(s) π(a|s) r(s,a), and the reward of its end."""
    paid, visits = planning.reward_array(mdp, reward), occupancy(mdp, policy, discount=discount)
    acting = np.where(mdp.terminal[:, None], 0.0, visits[:, None] * policy_array(mdp, policy))
    earned = (acting * planning.per_action(mdp, paid)).sum()
    return float(earned + visits @ planning.at_ends(mdp, paid))


def expected_value_difference(
    mdp: TabularMDP, reward: arguments.Numbers, policy: arguments.Numbers, *, discount: float
) -> float:
    """How much less a policy earns than the best one, V*(start) - V^π(start), in units of the true `reward`."""
    best = float(planning.value_iteration(mdp, reward, discount=discount) @ mdp.start)
    return best - policy_value(mdp, reward, policy, discount=discount)


def transfer_loss(mdp: TabularMDP, reward: arguments.Numbers, learned: arguments.Numbers, *, discount: float) -> float:
    """The expected value difference of the best policy for a learned reward.

    Give another world than the one it was learned in, with other slips or another start, to see whether the reward was
    learned or only the behaviour.
    """
    values = planning.value_iteration(mdp, learned, discount=discount)
    policy = planning.greedy_policy(mdp, planning.action_values(mdp, learned, values, discount=discount))
    return expected_value_difference(mdp, reward, policy, discount=discount)


def epic_distance(reward: arguments.Numbers, other: arguments.Numbers, *, discount: float) -> float:
    """The EPIC pseudometric of Gleave et al. 2021, arXiv:2006.13900: 0 for rewards equal up to shaping and scale, to 1.

        C(s,a,s') = r(s,a,s') + γ m(s') - m(s) - γ E[m(S)],   m(s) = E[r(s,A,S')]      D = √((1 - ρ(C, C'))/2)

    ρ is Pearson's correlation; s, a and s' are independent and uniform, both in m and in ρ, so the dynamics do not
    matter; `policy_divergence` is the comparison that depends on them.  A reward per state is earned whatever is done
    there.  A reward that shaping turns into a constant has no correlation with anything, and is refused.
    """
    arguments.checked_number(discount, "discount", arguments.SHARE)
    first, second = (unit_reward(given) for given in (reward, other))
    fewer, more = sorted((first.shape[1], second.shape[1]))
    if len(first) != len(second) or fewer not in (1, more):
        raise UserError(f"the rewards have the shapes {first.shape} and {second.shape}: give them the same states")
    if first.ndim != second.ndim:  # of pairs: r(s,a,s') = r(s,a), whatever follows
        first, second = (r if r.ndim == 3 else np.repeat(r[:, :, None], len(r), axis=2) for r in (first, second))
    spreads = [canonical_product(given, given, discount) ** 0.5 for given in (first, second)]
    if min(spreads) <= 1e-12:
        raise UserError("a reward is a constant up to potential shaping: it has no EPIC distance to anything")
    correlation = canonical_product(first, second, discount) / (spreads[0] * spreads[1])
    return float(np.sqrt(max(0.0, (1 - correlation) / 2)))


def unit_reward(given: arguments.Numbers) -> OutcomeReward:
    """A finite reward with an axis of actions, its largest entry 1."""
    reward = arguments.real_array(given, "a reward")
    if reward.ndim not in (1, 2, 3) or not reward.size or (reward.ndim == 3 and reward.shape[2] != len(reward)):
        raise UserError(
            f"a reward has the shape {reward.shape}: use (state), (state, action) or (state, action, state)"
        )
    arguments.shaped_array(reward, "a reward", reward.shape, finite=True)
    wide: ndarray = reward[:, None] if reward.ndim == 1 else reward
    return wide / max(float(np.abs(wide).max()), 1e-300)


def canonical_product(first: OutcomeReward, second: OutcomeReward, discount: float) -> float:
    """The covariance of two rewards, each shaped canonically (C of `epic_distance`).

    Where neither depends on s', C is r(s,a) - m(s) plus γ m(s'), and the two parts are independent: nothing is as
    large as states × states.
    """
    parts, futures = [], []
    for reward in (first, second):
        means = reward.reshape(len(reward), -1).mean(axis=1)
        futures.append(discount * (means - means.mean()))
        parts.append(reward - means.reshape(-1, *[1] * (reward.ndim - 1)))
    if first.ndim == 2:
        return float((parts[0] * parts[1]).mean() + (futures[0] * futures[1]).mean())
    shaped = [part + future for part, future in zip(parts, futures, strict=True)]
    return float((shaped[0] * shaped[1]).mean())
