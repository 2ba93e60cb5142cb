"""What is minimised: two objectives over weights, each with its gradient and its exact Hessian.

    dual         g(θ) = Σ_s start(s) V_θ(s) - θ·μ + (l2/2)‖θ‖²         ∇g = E_π[φ] - μ + l2 θ
    likelihood   L(θ) = -Σ_t,s,a c_t(s,a) log π_θ(a|s) + (l2/2)‖θ‖²

μ are the features of a demonstration and c its actions, both averaged over demonstrations; V and E are discounted.  The
dual of maximum causal entropy (Ziebart, Bagnell & Dey 2010; Ziebart 2010, thesis, ch. 5) is convex: its minimum is the
policy of most entropy whose features match.  The likelihood of the same policies is not convex in general.  It uses
only actions, so it needs no whole episodes, and random slips of the demonstrator do not affect it.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from posttrain.irl.arguments import require_kind
from posttrain.irl.curvature import Matrix, curvature, expected_from
from posttrain.irl.demonstrations import Demonstrations
from posttrain.irl.features import Features, Weights
from posttrain.irl.mdp import check_start, start_distribution
from posttrain.irl.minimisers import DifferentiableObjective, Point, Watch
from posttrain.irl.planning import FinitePlan, Problem, Reward, SoftPlan, soft_finite_horizon, soft_policy_iteration

Plan = SoftPlan | FinitePlan


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """The problem that an objective plans in, without the weights."""

    features: Features
    start: Float[ndarray, " state"]
    discount: float
    temperature: float
    horizon: int | None
    l2: float

    def __post_init__(self) -> None:
        mdp = require_kind(self.features, Features, "features").mdp
        object.__setattr__(self, "start", start_distribution(self.start, mdp.num_states))
        check_start(self.start)

    def plan(self, weights: Weights, guess: Plan | None = None) -> Plan:
        """The soft-optimal policy for the rewards that the weights make; `guess` is one for weights near by."""
        problem = self.problem(weights)
        if self.horizon is not None:
            return soft_finite_horizon(problem, horizon=self.horizon)
        return soft_policy_iteration(problem, guess=guess.values if isinstance(guess, SoftPlan) else None)

    def problem(self, weights: Weights) -> Problem:
        return Problem(
            mdp=self.features.mdp,
            reward=self.features.rewards(weights),
            discount=self.discount,
            temperature=self.temperature,
            ends=self.features.end_rewards(weights),
        )

    def paid(self, weights: Weights) -> Reward:
        """r = θ · φ; where φ is of pairs, rewards of ends are added, discounted, to the actions that lead there."""
        reward, ends = self.features.rewards(weights), self.features.end_rewards(weights)
        if ends is None:
            return reward
        return np.asarray(reward + self.discount * (self.features.mdp.transitions @ ends).reshape(reward.shape))

    def sources(self) -> ndarray:
        if self.horizon is None:
            return self.start
        return np.vstack([self.start, np.zeros((self.horizon, len(self.start)))])

    def totals(self, plan: Plan, flow: ndarray) -> Weights:
        ending = np.where(self.features.mdp.terminal, flow if flow.ndim == 1 else flow.sum(axis=0), 0.0)
        if isinstance(plan, SoftPlan):
            acting = plan.policy * flow[:, None]
        else:
            acting = np.einsum("tsa,ts->sa", plan.policy, flow[:-1])
        acting[self.features.mdp.terminal] = 0
        return self.features.totals(acting, ending)


@runtime_checkable
class PlannedObjective(DifferentiableObjective[Plan], Protocol):
    """An objective that plans, with its setting."""

    @property
    def setting(self) -> Setting: ...


@dataclass(frozen=True, eq=False)
class WatchedObjective:
    """An objective whose evaluations are shown to a `watch`."""

    objective: PlannedObjective
    watch: Watch

    @property
    def setting(self) -> Setting:
        return self.objective.setting

    def at(self, weights: Weights, guess: Plan | None = None) -> Point[Plan]:
        point = self.objective.at(weights, guess)
        self.watch(point.numbers)
        return point


@runtime_checkable
class InformativeObjective(PlannedObjective, Protocol):
    """An objective with the information of its data about the weights."""

    @property
    def convex(self) -> bool:
        """Whether its only minimum is the one that is found."""

    def information(self, point: Point[Plan]) -> Matrix:
        """Expected curvature from the data, without the penalty: never negative."""

    def scatter(self, point: Point[Plan], known: Demonstrations) -> Matrix:
        """The covariance over demonstrations of what each adds to the gradient there."""


@dataclass(frozen=True, eq=False)
class Dual:
    """The convex dual: match the features `moments`."""

    setting: Setting
    moments: Weights
    convex: bool = True

    def at(self, weights: Weights, guess: Plan | None = None) -> Point[Plan]:
        """g, ∇g and ∇²g = Σ_s D(s) Cov_π(dQ)/τ + l2."""
        setting = self.setting
        plan = setting.plan(weights, guess)
        visits = plan.visits(setting.sources())
        first = plan.values if isinstance(plan, SoftPlan) else plan.values[0]

        def bend() -> Matrix:
            return curvature(plan, setting.features, visits) / setting.temperature + setting.l2 * np.eye(len(weights))

        return Point(
            weights=weights,
            plan=plan,
            value=float(setting.start @ first - weights @ self.moments + setting.l2 / 2 * weights @ weights),
            gradient=setting.totals(plan, visits) - self.moments + setting.l2 * weights,
            bend=bend,
        )

    def information(self, point: Point[Plan]) -> Matrix:
        visits = point.plan.visits(self.setting.sources())
        return curvature(point.plan, self.setting.features, visits) / self.setting.temperature

    def scatter(self, point: Point[Plan], known: Demonstrations) -> Matrix:
        features = self.setting.features
        expected = expected_from(point.plan, features)[known.states[known.first_visits]]
        apart = features.per_episode(known, self.setting.discount) - expected
        return np.asarray(apart.T @ apart / len(known))


@dataclass(frozen=True, eq=False)
class Likelihood:
    """The negative log-likelihood of the demonstrated actions, in nats per demonstration."""

    setting: Setting
    counts: Float[ndarray, "*time state action"]
    """Per demonstration; with an axis of time where there is a horizon."""
    convex: bool = False

    def at(self, weights: Weights, guess: Plan | None = None) -> Point[Plan]:
        """L, ∇L and ∇²L.

        Σ c (dQ - dV) needs no derivative of V: with the adjoint flow λ = (I - γ P_πᵀ)⁻¹ (γ Pᵀ c - c) it is
        Σ c φ + Σ λ φ_π, and its own derivative is Σ_s λ(s) Cov_π(dQ)/τ.
        """
        setting = self.setting
        plan = setting.plan(weights, guess)
        flow = plan.visits(self.adjoint_sources())
        counts = self.counts if self.counts.ndim == 2 else self.counts.sum(axis=0)
        slope = setting.features.totals(counts, np.zeros(len(counts))) + setting.totals(plan, flow)
        tau, l2 = setting.temperature, setting.l2

        def bend() -> Matrix:
            return -curvature(plan, setting.features, flow) / tau**2 + l2 * np.eye(len(weights))

        return Point(
            weights=weights,
            plan=plan,
            value=-log_likelihood(plan, self.counts) + l2 / 2 * float(weights @ weights),
            gradient=-slope / tau + l2 * weights,
            bend=bend,
        )

    def information(self, point: Point[Plan]) -> Matrix:
        """Fisher's: Σ c(s) Cov_π(dQ)/τ², what the Hessian is on average over actions of the policy."""
        return curvature(point.plan, self.setting.features, self.counts.sum(axis=-1)) / self.setting.temperature**2

    def scatter(self, point: Point[Plan], known: Demonstrations) -> Matrix:
        """Fisher's information, which equals that covariance where the model is right."""
        return self.information(point)

    def adjoint_sources(self) -> ndarray:
        """γ Pᵀ c - c: where the demonstrations went, less where they acted."""
        mdp, discount = self.setting.features.mdp, self.setting.discount
        if self.counts.ndim == 2:
            return np.asarray(discount * (mdp.backward @ self.counts.ravel()) - self.counts.sum(axis=1))
        flows = np.zeros((len(self.counts) + 1, mdp.num_states))
        flows[:-1] -= self.counts.sum(axis=2)
        flows[1:] += discount * (mdp.backward @ self.counts.reshape(len(self.counts), -1).T).T
        return flows


def log_likelihood(plan: Plan, counts: Float[ndarray, "*time state action"]) -> float:
    """Σ c log π, from Q and V, so that a policy that rounds to 0 keeps its logarithm."""
    problem = plan.problem
    if isinstance(plan, SoftPlan):
        gains = problem.backup(plan.values) - plan.values[:, None]
        return float((counts * gains).sum() / problem.temperature)
    return sum(
        float((counts[t] * (problem.backup(plan.values[t + 1]) - plan.values[t][:, None])).sum())
        for t in range(len(counts))
    ) / float(problem.temperature)
