"""Rewards linear in features, r = θ · φ, of the current state, of state and action, or of the next state."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.sparse import csr_array, diags_array, issparse

from posttrain.errors import UserError
from posttrain.irl.arguments import Numbers, check_size, real_array, require_kind, require_word, shaped_array
from posttrain.irl.counting import Counts
from posttrain.irl.demonstrations import Demonstrations
from posttrain.irl.mdp import TabularMDP, sparse_floats
from posttrain.irl.planning import Policy, Reward

Place = Literal["state", "state_action", "next_state"]
Weights = Float[ndarray, " feature"]


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearReward:
    """Features of a world, and where they are earned."""

    features: Numbers | csr_array
    """A row for each state; for "state_action" a row s · A + a for each pair, or axes (state, action, feature)."""
    on: Place = "state"
    """"state": earned on acting there, and on arriving in a terminal state.  "next_state": earned on every arrival."""
    ends: Numbers | csr_array | None = None
    """Only with "state_action", which pays nothing for ends: a row for each state, with the features earned on arriving
    there if it is terminal.  Rows of other states are ignored."""

    def bound(self, mdp: TabularMDP) -> "Features":
        """The features as planning in this world uses them, checked."""
        require_kind(mdp, TabularMDP, "mdp")
        require_word(self.on, "on", get_args(Place))
        if issparse(self.features):
            table = sparse_floats(self.features, "features")
        else:
            table = real_array(self.features, "features")
            if self.on == "state_action" and table.shape[:2] == (mdp.num_states, mdp.num_actions) and table.ndim == 3:
                table = table.reshape(mdp.num_states * mdp.num_actions, -1)
        rows = mdp.num_states * (mdp.num_actions if self.on == "state_action" else 1)
        if table.ndim != 2 or table.shape[0] != rows or table.shape[1] < 1:
            pair = "pair of state and action" if self.on == "state_action" else "state"
            raise UserError(
                f"features on {self.on} have the shape {table.shape}; use {rows} rows, one for each {pair}, and a"
                " column for each feature"
            )
        check_finite(table, "features")
        entered, ends = None, self.bound_ends(mdp, table.shape[1])
        if self.on == "next_state":
            entered, table = table, mdp.transitions @ table
        return Features(mdp=mdp, table=table, per_state=self.on == "state", entered=entered, ends=ends)

    def bound_ends(self, mdp: TabularMDP, num_features: int) -> ndarray | csr_array | None:
        """The features of ends, checked; zero in states that end nothing."""
        if self.ends is None:
            return None
        if self.on != "state_action":
            raise UserError(f"on = {self.on!r} pays for arriving in an end already: use ends with on='state_action'")
        table = sparse_floats(self.ends, "ends") if issparse(self.ends) else real_array(self.ends, "ends")
        if table.shape != (mdp.num_states, num_features):
            raise UserError(f"ends have the shape {table.shape}; use {(mdp.num_states, num_features)}")
        check_finite(table, "ends")
        ending: ndarray | csr_array = diags_array(mdp.terminal.astype(np.float64)).tocsr() @ table
        return ending


@dataclass(frozen=True, kw_only=True, eq=False)
class Features:
    """Features of a step: φ(s), the same for every action, or φ(s,a), which may be expected over what follows."""

    mdp: TabularMDP
    table: ndarray | csr_array
    """A row for each state if `per_state`, else a row s · A + a for each pair."""
    per_state: bool
    entered: ndarray | csr_array | None
    """φ(s') where features are of the next state: demonstrations are counted with these, not with their expectation."""
    ends: ndarray | csr_array | None = None
    """φ of arriving in each terminal state, where the others are of pairs and ends have some too."""

    @property
    def on_arrival(self) -> ndarray | csr_array | None:
        """Features of arriving in each terminal state; None if there are none."""
        return self.table if self.per_state else self.ends

    @property
    def num_features(self) -> int:
        return int(self.table.shape[1])

    def rewards(self, weights: Weights) -> Reward:
        worth: ndarray = self.table @ weights
        return worth if self.per_state else worth.reshape(self.mdp.num_states, self.mdp.num_actions)

    def end_rewards(self, weights: Weights) -> Float[ndarray, " state"] | None:
        """Earned on arriving in each end, where that is not part of `rewards`."""
        return None if self.ends is None else np.asarray(self.ends @ weights)

    def totals(self, acting: Policy, ending: Float[ndarray, " state"]) -> Weights:
        """Features summed over visits: acting[s,a] of each pair, ending[s] of each terminal state."""
        visits = acting.sum(axis=1) + ending if self.per_state else acting.ravel()
        summed = np.asarray(self.table.T @ visits)
        return summed if self.ends is None else summed + self.ends.T @ ending

    def observed(self, counts: Counts) -> Weights:
        if self.entered is not None:
            return np.asarray(self.entered.T @ counts.entered)
        return self.totals(counts.acting, counts.ending)

    def per_episode(self, known: Demonstrations, discount: float) -> Float[ndarray, "episode feature"]:
        """The terms that `observed` averages, one row per episode."""
        acting, num_actions = known.acting, self.mdp.num_actions
        if self.entered is not None:
            table, used, rows = self.entered, acting, known.states[known.visit_times > 0]
        elif self.per_state:
            used = acting | self.mdp.terminal[known.states]
            table, rows = self.table, known.states[used]
        else:
            table, used, rows = self.table, acting, known.states[acting] * num_actions + known.actions
        episode = np.repeat(np.arange(len(known)), known.lengths + 1)
        weights = discount ** known.visit_times.astype(np.float64)
        visits = csr_array((weights[used], (episode[used], rows)), shape=(len(known), table.shape[0]))
        counted = dense(visits @ table)
        if self.ends is not None:
            last = known.first_visits + known.lengths
            counted += weights[last, None] * dense(self.ends[known.states[last]])
        return counted

    def averaged(self, policy: Policy) -> Float[ndarray, "state feature"]:
        """φ_π(s) = Σ_a π(a|s) φ(s,a); in terminal states what arriving there counts."""
        if self.per_state:
            return dense(self.table)
        size, num_actions = policy.shape
        weights = np.where(self.mdp.terminal[:, None], 0.0, policy).ravel()
        indptr = np.arange(0, size * num_actions + 1, num_actions)
        mixture = csr_array((weights, np.arange(size * num_actions), indptr), shape=(size, size * num_actions))
        means = dense(mixture @ self.table)
        return means if self.ends is None else means + dense(self.ends)

    def block(self, first: int, last: int) -> Float[ndarray, "state action feature"]:
        """φ of the states from `first` up to `last`; with one action where features are of the state."""
        if self.per_state:
            return dense(self.table[first:last])[:, None, :]
        num_actions = self.mdp.num_actions
        rows = dense(self.table[first * num_actions : last * num_actions])
        return rows.reshape(last - first, num_actions, -1)

    @property
    def largest(self) -> float:
        return float(self.column_sizes.max())

    @property
    def column_sizes(self) -> Weights:
        tables = [self.table] if self.ends is None else [self.table, self.ends]
        columns = [abs(table).max(axis=0) for table in tables]
        sizes: Weights = np.max([c if isinstance(c, ndarray) else c.toarray() for c in columns], axis=0)
        return sizes

    @property
    def units(self) -> Weights:
        """The largest entry of each column, in size, to the nearest power of 2; 1 for a column of zeros."""
        largest = self.column_sizes
        return np.exp2(np.round(np.log2(np.where(largest > 0, largest, 1.0))))


def dense(table: ndarray | csr_array) -> ndarray:
    if isinstance(table, ndarray):
        return table
    full: ndarray = table.toarray()
    return full


def moments_array(features: Features, given: Numbers) -> Weights:
    moments = shaped_array(given, "moments", (features.num_features,), finite=True)
    check_size(moments, "moments")
    return moments


def check_finite(table: ndarray | csr_array, what: str) -> None:
    """Refuse NaN and infinity, naming row and column, and numbers whose squares are infinite."""
    stored = csr_array(np.where(np.isfinite(table), 0.0, table)) if isinstance(table, ndarray) else table
    bad = np.flatnonzero(~np.isfinite(stored.data))
    if bad.size:
        row = int(np.searchsorted(stored.indptr, bad[0], side="right")) - 1
        raise UserError(f"{what}: row {row}, column {stored.indices[bad[0]]} is {stored.data[bad[0]]}; use finite ones")
    check_size(table if isinstance(table, ndarray) else table.data, what)
