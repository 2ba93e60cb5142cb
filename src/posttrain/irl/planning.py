"""Planning: the best policy, and the policy of maximum entropy (soft planning), without dense tables.

Soft planning maximises reward plus temperature · entropy of the actions, each counted with its discount:

    Q(s,a) = r(s,a) + γ Σ_s' P(s'|s,a) V(s')      V(s) = τ log Σ_a exp(Q(s,a)/τ)      π(a|s) = exp((Q(s,a) - V(s))/τ)

Ziebart 2010 (thesis), eqs. 9.1-9.3, has it at discount 1 and temperature 1.  A reward is given per state or per state
and action.  One per state is earned on acting there, and in a terminal state on arriving: V(terminal) = r(terminal).
One per state and action pays terminals nothing.  Where a horizon or a time limit cuts an episode off, nothing more is
paid.

At discount 1 episodes must end: the values are finite only while a step's reward outweighs the entropy it adds (up to
τ log A).  Where they are not, `Divergence` says so; no function here returns NaN or infinity.
"""

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from posttrain.errors import UserError
from posttrain.irl import arguments
from posttrain.irl.linear_solvers import Divergence, Solver
from posttrain.irl.linear_systems import always_ends, policy_system
from posttrain.irl.mdp import TabularMDP, reachable, state_graph

TOLERANCE = 1e-12
"""Error of the values, relative to the largest, below which they count as settled."""
ROUNDING = 4 * float(np.finfo(np.float64).eps)
"""A relative change that rounding may cause."""
MAX_SWEEPS = 200_000
LEAP = 1000
"""Sweeps of value iteration after which the best policy is valued by a solve."""
MAX_SOLVES = 200
UNBOUNDED = 1e9
"""Values this many times the largest reward or entropy of a step: episodes so long that rounding shows in sums."""

Reward = Float[ndarray, " state"] | Float[ndarray, "state action"]
Policy = Float[ndarray, "state action"]


@dataclass
class StallDetector:
    """Detects sweeps without progress: changes that have not shrunk enough over 2·S sweeps or more."""

    num_states: int
    sweeps: int = 0
    marked: float = np.inf

    def stuck(self, change: float) -> bool:
        """Whether to stop; a chain of S states may take S sweeps of equal change before it settles."""
        window = max(1000, 2 * self.num_states)
        self.sweeps += 1
        if self.sweeps % window:
            return False
        before, self.marked = self.marked, change
        return change > before * (1 - window / UNBOUNDED)


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A problem of soft planning: the world, its reward, and how the future and entropy count."""

    mdp: TabularMDP
    reward: Reward
    discount: float
    temperature: float = 1.0
    ends: Float[ndarray, " state"] | None = None
    """Earned on arriving in each terminal state, with a reward of pairs, which itself pays ends nothing."""

    def __post_init__(self) -> None:
        arguments.check_numbers(self, discount=arguments.SHARE, temperature=arguments.POSITIVE)
        object.__setattr__(self, "reward", reward_array(self.mdp, self.reward))
        if self.ends is not None:
            object.__setattr__(self, "ends", arguments.shaped_array(self.ends, "ends", (self.mdp.num_states,)))
            if self.reward.ndim == 1:
                raise UserError("a reward of states pays for arriving in an end already: give ends to one of pairs")

    @cached_property
    def step_rewards(self) -> Float[ndarray, "state action"]:
        return per_action(self.mdp, self.reward)

    @cached_property
    def end_values(self) -> Float[ndarray, " state"]:
        """What arriving in each terminal state earns; zero elsewhere."""
        return at_ends(self.mdp, self.reward if self.ends is None else self.ends)

    @cached_property
    def scale(self) -> float:
        """The most that one step can add to a value, in size."""
        entropy = self.temperature * float(np.log(self.mdp.num_actions))
        paid = max(float(np.abs(reward).max()) for reward in (self.step_rewards, self.end_values))
        return max(paid, entropy, 1e-300)

    def backup(self, values: Float[ndarray, " state"]) -> Policy:
        """Q(s,a) for given values of what follows."""
        following: Policy = (self.mdp.transitions @ values).reshape(-1, self.mdp.num_actions)
        following *= self.discount
        following += self.step_rewards
        return following

    def soften(self, q: Policy) -> tuple[Float[ndarray, " state"], Policy]:
        """V and π of the equations above; overwrites q with π."""
        ends = self.mdp.terminal
        best = reduce(np.maximum, q.T[1:], q[:, 0].copy())  # a copy, or one action's best would be q itself
        q -= best[:, None]
        q /= self.temperature
        np.exp(q, out=q)
        total = reduce(np.add, q.T[1:], q[:, 0].copy())
        q /= total[:, None]
        values = np.where(ends, self.end_values, best + self.temperature * np.log(total))
        return values, q

    def sweep(self, values: Float[ndarray, " state"]) -> tuple[Float[ndarray, " state"], Policy]:
        """One application of the soft Bellman operator, and the policy that it makes."""
        return self.soften(self.backup(values))

    def diverged(self, why: str) -> Divergence:
        return Divergence(
            f"soft planning diverges at discount {self.discount} and temperature {self.temperature}: {why}. Lower one,"
            " or make each step cost more than the entropy it adds"
            f" ({self.temperature * np.log(self.mdp.num_actions):.3g} = temperature · log {self.mdp.num_actions})"
        )

    def check_ends(self) -> None:
        """At discount 1 every state must have a way to an end."""
        if self.discount < 1 or not (lost := self.mdp.never_ending()).size:
            return
        met = reachable(state_graph(self.mdp), self.mdp.start > 0)[lost[0]]
        raise Divergence(
            f"soft planning diverges at discount {self.discount} and temperature {self.temperature}: {lost.size} states"
            f" can never reach a terminal state, first {self.mdp.states[lost[0]]}. Use a discount below 1 or a horizon,"
            f" or {'give it a way out' if met else 'leave it out of the world: no episode comes there'}"
        )

    def solve(self, policy: Policy, right: Float[ndarray, " state"]) -> tuple[Solver, Float[ndarray, " state"]]:
        try:
            forwards = policy_system(self.mdp, policy, self.discount)
            return forwards, forwards.solve(right)
        except Divergence as error:
            raise self.diverged(str(error)) from error


@dataclass(frozen=True, kw_only=True, eq=False)
class SoftPlan:
    """The soft-optimal stationary policy of a problem without horizon, with its linear system."""

    problem: Problem
    values: Float[ndarray, " state"]
    policy: Policy
    """π(a|s); uniform in terminal states, where nothing is done."""
    system: Solver
    """I - γ P_π: solved, it looks forward in time from each state; transposed, it carries visits forward."""

    def visits(self, sources: Float[ndarray, " state"]) -> Float[ndarray, " state"]:
        """Discounted expected visits when the mass `sources` starts and follows the policy."""
        return self.system.solve(sources, "T")


def value_iteration(
    mdp: TabularMDP, reward: arguments.Numbers, *, discount: float, tolerance: float = 1e-10
) -> Float[ndarray, " state"]:
    """Values of the best policy, by sweeps until none changes a value by more than `tolerance`, or than rounding does.

        V(s) = max_a r(s,a) + γ Σ_s' P(s'|s,a) V(s')

    Every thousand sweeps the best policy so far is valued exactly, if it ends or is discounted.  Sweeps would otherwise
    be as many as the longest episode has steps, times the digits of the tolerance.
    """
    arguments.checked_number(discount, "discount", arguments.SHARE)
    arguments.checked_number(tolerance, "tolerance", arguments.NON_NEGATIVE)
    paid = reward_array(mdp, reward)
    steps, ends = per_action(mdp, paid), at_ends(mdp, paid)
    values, detector = ends, StallDetector(mdp.num_states)
    for sweep in range(1, MAX_SWEEPS + 1):
        q = steps + discount * (mdp.transitions @ values).reshape(steps.shape)
        updated = np.where(mdp.terminal, ends, reduce(np.maximum, q.T))
        change, largest = (float(np.abs(numbers).max()) for numbers in (updated - values, updated))
        values = updated
        if change <= max(tolerance, ROUNDING * largest):
            return values
        if detector.stuck(change):
            break
        best = greedy_policy(mdp, q) if sweep % LEAP == 0 else None
        if best is not None and (discount < 1 or always_ends(mdp, best)):
            with suppress(Divergence):  # then sweeps continue
                values = policy_system(mdp, best, discount).solve(ends + (best * steps).sum(axis=1))
    raise Divergence(
        f"value iteration does not settle at discount {discount}: a sweep still changes a value by {change:.3g}. Use a"
        " lower discount, or a world in which every paid loop ends"
    )


def greedy_policy(mdp: TabularMDP, q: arguments.Numbers) -> Policy:
    """A policy with all probability on the first best action of each state."""
    shape = (arguments.require_kind(mdp, TabularMDP, "mdp").num_states, mdp.num_actions)
    policy = np.zeros(shape)
    policy[np.arange(mdp.num_states), arguments.shaped_array(q, "q", shape).argmax(axis=1)] = 1
    return policy


def action_values(mdp: TabularMDP, reward: arguments.Numbers, values: arguments.Numbers, *, discount: float) -> Policy:
    """Q(s,a) of given values."""
    arguments.checked_number(discount, "discount", arguments.SHARE)
    paid = reward_array(mdp, reward)
    onwards = mdp.transitions @ arguments.shaped_array(values, "values", (mdp.num_states,))
    q: Policy = per_action(mdp, paid) + discount * onwards.reshape(mdp.num_states, mdp.num_actions)
    return q


def soft_value_iteration(problem: Problem, *, tolerance: float = TOLERANCE) -> SoftPlan:
    """The soft-optimal policy by sweeps; slow near discount 1, where `soft_policy_iteration` takes a few solves.

    Changes shrink by the discount each sweep, or at discount 1 by the last ratio: the remaining error is their
    geometric sum.
    """
    arguments.require_kind(problem, Problem, "problem").check_ends()
    arguments.checked_number(tolerance, "tolerance", arguments.NON_NEGATIVE)
    values, before, detector = problem.end_values, 0.0, StallDetector(problem.mdp.num_states)
    for _ in range(MAX_SWEEPS):
        updated, policy = problem.sweep(values)
        change = float(np.abs(updated - values).max())
        values = updated
        largest = float(np.abs(values).max())
        seen = change / before if before > change else 1.0
        ratio = problem.discount if problem.discount < 1 else seen
        settled = change * ratio <= (1 - ratio) * tolerance * max(problem.scale, largest)
        if settled or change <= ROUNDING * largest:
            forwards, _ = problem.solve(policy, values)
            return SoftPlan(problem=problem, values=values, policy=policy, system=forwards)
        if detector.stuck(change):
            break
        before = change
    raise Divergence(
        f"soft value iteration does not settle at discount {problem.discount} and temperature {problem.temperature}: a"
        f" sweep still changes a value by {change:.3g}. Use soft_policy_iteration"
    )


def soft_policy_iteration(problem: Problem, *, guess: arguments.Numbers | None = None) -> SoftPlan:
    """The soft-optimal policy by Newton's method on the soft Bellman equation: one sparse solve an iteration.

        V ← V + (I - γ P_π)⁻¹ (T V - V),   π the policy of T V: the new V is the soft value of π

    V never falls after the first solve, and converges quadratically.  It starts from `guess`, such as the values of
    similar rewards, where that leads to a solution, else from the uniform policy.
    """
    arguments.require_kind(problem, Problem, "problem")
    if guess is not None:
        near_by = arguments.shaped_array(guess, "guess", (problem.mdp.num_states,))
        try:
            return solve_soft_values(problem, np.where(problem.mdp.terminal, problem.end_values, near_by))
        except Divergence:
            pass  # a guess may mislead at discount 1; the uniform policy cannot
    problem.check_ends()
    mdp = problem.mdp
    uniform = np.full((mdp.num_states, mdp.num_actions), 1 / mdp.num_actions)
    worth = problem.step_rewards.mean(axis=1) + problem.temperature * np.log(mdp.num_actions)
    values = np.where(mdp.terminal, problem.end_values, worth)
    return solve_soft_values(problem, problem.solve(uniform, values)[1])


def solve_soft_values(problem: Problem, values: Float[ndarray, " state"]) -> SoftPlan:
    """The iteration of `soft_policy_iteration` from these values, until it no longer moves."""
    before = np.inf
    for _ in range(MAX_SOLVES):
        updated, policy = problem.sweep(values)
        left_over = updated - values
        forwards, step = problem.solve(policy, left_over)
        values = values + step
        largest, moved = float(np.abs(values).max()), float(np.abs(step).max())
        if not largest < UNBOUNDED * problem.scale:
            break
        if newton_converged(left_over, moved, before, largest=largest, scale=problem.scale):
            if problem.discount == 1 and not forwards.solve(np.ones(len(values))).max() < UNBOUNDED:
                break
            return SoftPlan(problem=problem, values=values, policy=policy, system=forwards)
        before = moved
    raise problem.diverged(f"values reach {largest:.3g} and episodes almost never end")


def newton_converged(
    left_over: Float[ndarray, " state"], moved: float, before: float, *, largest: float, scale: float
) -> bool:
    """Whether Newton's method has converged: it moved values by `moved` and, the last time, by `before`.

    A step may be only the rounding of a small remainder, which long episodes enlarge.
    """
    rounding = bool(np.abs(left_over).max() <= TOLERANCE * largest) and before / 2 <= moved <= 1e-6 * largest
    return moved <= TOLERANCE * max(scale, largest) or rounding


def reward_array(mdp: TabularMDP, given: arguments.Numbers) -> Reward:
    size = arguments.require_kind(mdp, TabularMDP, "mdp").num_states
    reward = arguments.shaped_array(given, "the reward", (size,), (size, mdp.num_actions), finite=True, rows=mdp.states)
    arguments.check_size(reward, "the rewards")
    return reward


def per_action(mdp: TabularMDP, reward: Reward) -> Policy:
    wide = np.repeat(reward[:, None], mdp.num_actions, axis=1) if reward.ndim == 1 else reward
    table = wide.astype(np.float64)
    table[mdp.terminal] = 0
    return table


def at_ends(mdp: TabularMDP, reward: Reward) -> Float[ndarray, " state"]:
    """What arriving in each terminal state earns; zero elsewhere."""
    return np.where(mdp.terminal, reward if reward.ndim == 1 else 0.0, 0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class FinitePlan:
    """The soft-optimal policy of each step."""

    problem: Problem
    values: Float[ndarray, "time state"]
    """V_0 to V_H."""
    policy: Float[ndarray, "horizon state action"]

    def visits(self, sources: Float[ndarray, "time state"]) -> Float[ndarray, "time state"]:
        """Discounted expected visits at each time when the mass sources[t] joins at time t and follows the policy."""
        mdp, discount = self.problem.mdp, self.problem.discount
        flow = sources.copy()
        for t, policy in enumerate(self.policy):
            flow[t + 1] += discount * (mdp.backward @ (policy * flow[t][:, None]).ravel())
        return flow


def soft_finite_horizon(problem: Problem, *, horizon: int) -> FinitePlan:
    """Plan backwards from the last action to the first: exact, whatever the discount."""
    horizon = arguments.checked_integer(horizon, "horizon", least=1)
    mdp = arguments.require_kind(problem, Problem, "problem").mdp
    values = np.empty((horizon + 1, mdp.num_states))
    policy = np.empty((horizon, mdp.num_states, mdp.num_actions))
    values[horizon] = problem.end_values
    for t in reversed(range(horizon)):
        values[t], policy[t] = problem.sweep(values[t + 1])
    return FinitePlan(problem=problem, values=values, policy=policy)
