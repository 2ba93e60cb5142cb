"""The course's algorithm as taught: Ziebart et al. 2008 with exponentiated gradient, each step a small function.

Ziebart, Maas, Bagnell & Dey 2008, "Maximum entropy inverse reinforcement learning", algorithm 1, for 2·S steps, and the
exponentiated gradient of Kivinen & Warmuth 1997.  `maxent.py` and `causal.py` solve what this approximates.

It fits its own data badly.  On the 5×5 icy grid the two paid states come out on top.  Yet in one state the policy's
expected visits stay .81 away from the demonstrations', where some policy gets within .023.  Its paths are twice as long
as the demonstrated ones.  It stops because the step has shrunk (α_t = α/(1+t): all 454 steps together move by Σ α_t =
1.34), not because it matched anything.  Weights stay positive, so every step is paid and long paths earn more.  And
under random dynamics the difference that it follows is not a gradient, since the partition lets paths choose their
slips.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.sparse import csr_array

from posttrain.errors import UserError
from posttrain.irl import arguments
from posttrain.irl.counting import start_shares, visit_totals
from posttrain.irl.demonstrations import Demonstrations
from posttrain.irl.features import LinearReward, check_finite, dense
from posttrain.irl.mdp import (
    SUM_TOLERANCE,
    Ends,
    Start,
    TabularMDP,
    check_start,
    start_distribution,
    state_graph,
    terminal_mask,
)
from posttrain.irl.planning import reward_array

EARLY = 1e-6
"""The backward sweep stops once no Z changes by more than this."""
STEEPNESS = 50.0
"""How strongly the course's expert prefers a better state, per unit of value."""

PerState = Float[ndarray, " state"]


@dataclass(frozen=True, eq=False)
class CourseFit:
    """The result of the course's algorithm."""

    weights: Float[ndarray, " feature"]
    visitations: PerState
    """Expected visits under these weights."""
    gap: float
    """The largest difference between a feature's expectation and its demonstrated mean."""
    history: tuple[tuple[float, float], ...]
    """The gap before each step, and the most by which the step moved a weight."""

    @property
    def num_iterations(self) -> int:
        return len(self.history)


def feature_expectations(features: arguments.Numbers, demonstrations: Demonstrations) -> Float[ndarray, " feature"]:
    """Totals of the features over all visited states, averaged over the demonstrations."""
    table = arguments.real_array(features, "features")
    if table.ndim != 2:
        raise UserError(f"features have the shape {table.shape}: give a row for each state")
    check_finite(table, "features")
    totals: ndarray = table.T @ visit_totals(demonstrations, len(table))
    return totals


def start_histogram(num_states: int, demonstrations: Demonstrations) -> PerState:
    return start_shares(demonstrations, num_states)


def local_action_probabilities(
    mdp: TabularMDP, terminal: Ends, reward: arguments.Numbers
) -> Float[ndarray, "state action"]:
    """The backward sweep: how much of the partition function goes through each action.

        Z_{s,a} = e^{r(s)} Σ_s' P(s'|s,a) Z_s'     Z_s = Σ_a Z_{s,a}     P(a|s) = Z_{s,a} / Z_s

    Z starts at 1 in terminal states and 0 elsewhere; 2·S sweeps, fewer once nothing changes by 10⁻⁶.  The world
    continues after its terminal states, as the course's does.  Where Z is 0 so is the probability.
    """
    paid = reward_array(mdp, reward)
    if paid.ndim != 1:
        raise UserError(f"the reward has the shape {paid.shape}: give the course's algorithm a reward of states")
    if mdp.terminal.any():
        raise UserError(
            f"state {mdp.states[mdp.terminal.argmax()]} ends episodes in this world, but the course's sweeps continue"
            " from ends: make the world with terminal=() and pass them here"
        )
    sweeps = np.zeros((2 * mdp.num_states + 1, mdp.num_states))
    sweeps[0, terminal_mask(terminal, mdp.num_states)] = 1
    with np.errstate(over="ignore", invalid="ignore"):
        gains = np.exp(paid)
        step = gains[:, None] * state_graph(mdp).toarray()  # Σ_a P(s'|s,a)
        for before, after in pairwise(sweeps):
            np.dot(step, before, out=after)
        changes = np.abs(np.diff(sweeps, axis=0)).max(axis=1)
    early = np.flatnonzero(changes < EARLY)
    last = int(early[0]) if early.size else len(changes) - 1
    before, after = sweeps[last], sweeps[last + 1]
    if not np.isfinite(after).all():
        raise UserError(
            f"the partition function overflows at rewards up to {paid.max():.3g} over {2 * mdp.num_states} steps: the"
            " course's algorithm is for small grids; use MaxEntIRL or MaxCausalEntIRL"
        )
    through = gains[:, None] * (mdp.transitions @ before).reshape(mdp.num_states, -1)
    shares: ndarray = np.divide(through, after[:, None], out=np.zeros_like(through), where=after[:, None] > 0)
    return shares


def expected_visitations(mdp: TabularMDP, terminal: Ends, start: Start, policy: arguments.Numbers) -> PerState:
    """The forward sweep: expected visits of each state within 2·S steps, episodes ending in terminal states.

    D_1 = start     D_{t+1}(s') = Σ_s,a D_t(s) P(a|s) P(s'|s,a)     D = Σ_{t=1}^{2S} D_t
    """
    shape = (arguments.require_kind(mdp, TabularMDP, "mdp").num_states, mdp.num_actions)
    starts = start_distribution(start, mdp.num_states)
    check_start(starts)
    going_on = arguments.shaped_array(policy, "the policy", shape).copy()  # may be all 0 where no path ends
    going_on[terminal_mask(terminal, mdp.num_states)] = 0
    sums = going_on.sum(axis=1)
    bad = (going_on < 0).any(axis=1) | ((np.abs(sums - 1) > SUM_TOLERANCE) & (sums != 0))
    arguments.check_entries(bad, lambda i: f"policy of state {mdp.states[i]}: {going_on[i]}; use numbers that sum to 1")
    table = mdp.transitions.toarray().reshape(*shape, -1)
    following = np.einsum("sa,san->ns", going_on, table)
    steps = np.empty((2 * mdp.num_states, mdp.num_states))
    steps[0] = starts
    for now, then in pairwise(steps):
        np.dot(following, now, out=then)
    total: PerState = steps.sum(axis=0)
    return total


def recover_reward(
    mdp: TabularMDP,
    features: arguments.Numbers | csr_array,
    terminal: Ends,
    demonstrations: Demonstrations,
    *,
    step_size: float = 0.2,
    tolerance: float = 1e-4,
) -> CourseFit:
    """Exponentiated gradient on the weights, from 1, until no weight moves by more than `tolerance`.

    ω ← ω · exp(α_t (μ_E - μ_ω)),   α_t = step_size / (1 + t)
    """
    arguments.checked_number(step_size, "step_size", arguments.POSITIVE)
    arguments.checked_number(tolerance, "tolerance", arguments.POSITIVE)
    table = dense(LinearReward(features=features).bound(mdp).table)
    demonstrated = feature_expectations(table, demonstrations)
    start = start_histogram(mdp.num_states, demonstrations)

    def visits(weights: Float[ndarray, " feature"]) -> PerState:
        policy = local_action_probabilities(mdp, terminal, table @ weights)
        return expected_visitations(mdp, terminal, start, policy)

    weights = np.ones(table.shape[1])
    history: list[tuple[float, float]] = []
    while not history or history[-1][1] > tolerance:
        difference = demonstrated - table.T @ visits(weights)
        updated = weights * np.exp(step_size / (1 + len(history)) * difference)
        history.append((float(np.abs(difference).max()), float(np.abs(updated - weights).max())))
        weights = updated
    visitations = visits(weights)
    return CourseFit(
        weights=weights,
        visitations=visitations,
        gap=float(np.abs(demonstrated - table.T @ visitations).max()),
        history=tuple(history),
    )


def expert_policy(
    intended: arguments.Numbers, values: arguments.Numbers, *, steepness: float = STEEPNESS
) -> Float[ndarray, "state action"]:
    """The course's expert: π(a|s) ∝ exp(steepness · V(intended next state))."""
    worth, following = arguments.real_array(values, "values"), arguments.real_array(intended, "intended")
    arguments.checked_number(steepness, "steepness", arguments.NON_NEGATIVE)
    if worth.ndim != 1 or following.ndim != 2:
        raise UserError(
            f"values have the shape {worth.shape}, intended {following.shape}: give a value for each state, and a next"
            " state for each state and action"
        )
    arguments.check_size(worth, "values")
    states = arguments.state_numbers(following, "intended", len(worth)).reshape(following.shape)
    with np.errstate(over="ignore"):
        logits = steepness * worth[states]
    if not np.isfinite(logits).all():
        raise UserError(f"steepness = {steepness} and values up to {np.abs(worth).max():.3g}: use finite numbers")
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    policy: ndarray = weights / weights.sum(axis=1, keepdims=True)
    return policy
