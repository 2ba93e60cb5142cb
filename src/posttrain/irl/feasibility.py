"""Start weights for a fit, and the smallest gap that any policy can reach."""

import numpy as np
from scipy.sparse import block_array, csr_array, diags_array, eye_array, hstack

from posttrain.errors import UserError
from posttrain.irl.arguments import Numbers, require_kind
from posttrain.irl.features import Weights, moments_array
from posttrain.irl.linear_solvers import Divergence
from posttrain.irl.mdp import reachable, state_graph
from posttrain.irl.minimisers import Point
from posttrain.irl.objectives import Plan, PlannedObjective, Setting

MARGIN = 0.1
"""Cost of a step beyond the entropy that it adds, as a share of it: values at the start are far from infinite."""
MAX_PAIRS = 50_000
"""Most pairs of state and action for which a linear program is tried."""


def feasible_start(objective: PlannedObjective) -> Point[Plan]:
    """Weights that make finite soft values: zero where the discount or a horizon guarantees that.

    At discount 1 a step must cost more than the entropy it may add, τ log A.  Such weights are sought by least squares
    (exact where some combination of features is constant), then by a linear program up to potential shaping, for any
    values W:

        r_θ(s,a) + Σ_s' P(s'|s,a) W(s') - W(s) ≤ -τ log A      so that T W ≤ W, and sweeps from W fall to a finite V

    Raises Divergence if neither finds any: the features cannot express that an episode should end.
    """
    setting = objective.setting
    zero = np.zeros(setting.features.num_features)
    if setting.horizon is not None or setting.discount < 1:
        return objective.at(zero)
    setting.problem(zero).check_ends()
    for seek in (constant_cost, shaped_cost, lambda _: zero):  # one after the other: the second may take a minute
        candidate = seek(setting)
        if candidate is None:
            continue
        try:
            return objective.at(candidate)
        except Divergence:
            continue
    raise Divergence(
        f"no weights make soft values finite at discount {setting.discount} and temperature {setting.temperature}: add"
        " a feature that is 1 in every step, so that a step can have a cost, or use a discount below 1 or a horizon"
    )


def step_cost(setting: Setting) -> float:
    """The least cost of a step: the entropy it may add, and a margin."""
    return (1 + MARGIN) * setting.temperature * float(np.log(max(setting.features.mdp.num_actions, 2)))


def acting_rows(setting: Setting) -> tuple[csr_array, np.ndarray]:
    """Features of every pair in which something is done, as a sparse matrix, and the numbers of these pairs."""
    features = setting.features
    mdp = features.mdp
    pairs = np.flatnonzero(np.repeat(~mdp.terminal, mdp.num_actions))
    table = csr_array(features.table)
    return table[pairs // mdp.num_actions if features.per_state else pairs], pairs


def constant_cost(setting: Setting) -> Weights | None:
    """Weights under which every step costs at least `step_cost`, by least squares."""
    rows, _ = acting_rows(setting)
    units = setting.features.units
    scaled, costs = rows @ diags_array(1 / units), np.full(rows.shape[0], -step_cost(setting))
    if len(units) > 2000:  # the normal equations would be dense: as many weights as that, and one will be a constant's
        from scipy.sparse.linalg import lsqr

        weights = lsqr(scaled, costs, atol=1e-12, btol=1e-12)[0] / units
    else:
        weights = np.linalg.lstsq((scaled.T @ scaled).toarray(), scaled.T @ costs, rcond=1e-12)[0] / units
    enough = (rows @ weights).max(initial=-np.inf) <= -step_cost(setting) / (1 + MARGIN / 2)
    return weights if enough else None


def shaped_cost(setting: Setting) -> Weights | None:
    """Weights under which every step costs `step_cost` once some potential is added, smallest first."""
    from scipy.optimize import linprog

    rows, pairs = acting_rows(setting)
    if rows.shape[0] > MAX_PAIRS:
        return None
    mdp = setting.features.mdp
    shaping = mdp.transitions[pairs] - csr_array(
        (np.ones(len(pairs)), (np.arange(len(pairs)), pairs // mdp.num_actions)), shape=(len(pairs), mdp.num_states)
    )
    num_weights = rows.shape[1]
    # |θ| ≤ bound, smallest bound: variables θ, W, bound.
    zero_w = csr_array((num_weights, mdp.num_states))
    minus = csr_array(-np.ones((num_weights, 1)))
    limits = block_array(
        [
            [rows, shaping, csr_array((len(pairs), 1))],
            [eye_array(num_weights), zero_w, minus],
            [-eye_array(num_weights), zero_w, minus],
        ]
    )
    right = np.concatenate([np.full(len(pairs), -step_cost(setting)), np.zeros(2 * num_weights)])
    goal = np.zeros(limits.shape[1])
    goal[-1] = 1
    bounds = [(None, None)] * num_weights + [(0, 0) if end else (None, None) for end in mdp.terminal] + [(0, None)]
    found = linprog(goal, A_ub=limits, b_ub=right, bounds=bounds, method="highs")
    return found.x[:num_weights] if found.status == 0 else None


def smallest_gap(setting: Setting, moments: Numbers) -> float:
    """The smallest largest difference from `moments` that the features of any policy can have, by a linear program.

        min g   over visits x(s,a) ≥ 0 and ends y(s) ≥ 0:   |Φᵀ(x, y) - μ| ≤ g,   Σ_a x(s,a) - γ Σ Pᵀ x = start(s)

    No estimator can do better, so compare a fit's gap with this.  Only without a horizon.  At discount 1 policies may
    approach it without reaching it, by taking a loop more rarely and for longer.
    """
    from scipy.optimize import linprog

    if require_kind(setting, Setting, "setting").horizon is not None:
        raise UserError("horizon: the smallest gap is computed without one; use horizon = None")
    limits, right, flows, starts = gap_program(setting, moments_array(setting.features, moments))
    goal = np.zeros(limits.shape[1])
    goal[-1] = 1
    found = linprog(goal, A_ub=limits, b_ub=right, A_eq=flows, b_eq=starts, method="highs")
    if found.status != 0:
        raise Divergence(f"the linear program of the smallest gap at discount {setting.discount}: {found.message}")
    return float(found.x[-1])


def gap_program(setting: Setting, moments: Weights) -> tuple[csr_array, np.ndarray, csr_array, np.ndarray]:
    """Inequalities and equalities over (x, y, g), for states that the start leads to.

    Elsewhere a loop could sustain itself at discount 1 without ever being entered.
    """
    mdp, features = setting.features.mdp, setting.features
    rows, pairs = acting_rows(setting)
    visited = reachable(state_graph(mdp), setting.start > 0)[pairs // mdp.num_actions]
    rows, pairs = rows[visited], pairs[visited]
    ends = np.flatnonzero(mdp.terminal)
    counted = features.on_arrival
    at_ends = csr_array((len(ends), rows.shape[1])) if counted is None else csr_array(counted)[ends]
    sums = hstack([rows.T, at_ends.T])
    minus = csr_array(-np.ones((len(moments), 1)))
    limits = block_array([[sums, minus], [-sums, minus]], format="csr")
    size = mdp.num_states
    out = csr_array((np.ones(len(pairs)), (pairs // mdp.num_actions, np.arange(len(pairs)))), shape=(size, len(pairs)))
    staying = csr_array((np.ones(len(ends)), (ends, np.arange(len(ends)))), shape=(size, len(ends)))
    arriving = setting.discount * mdp.transitions[pairs].T
    flows = hstack([out - arriving, staying, csr_array((size, 1))], format="csr")
    return limits, np.concatenate([moments, -moments]), flows, setting.start
