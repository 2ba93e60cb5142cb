"""The fits of `posttrain.irl`, made to tell of each evaluation while they go on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from posttrain.irl.causal import MaxCausalEntIRL
from posttrain.irl.fitting import Fit
from posttrain.irl.maxent import MaxEntIRL, PathDual, PathFit
from posttrain.irl.minimisers import Descent, Point
from posttrain.irl.objectives import Plan, PlannedObjective, Setting
from posttrain.irl.paths import PathPlan, PerState
from posttrain.irl.rewards import Features, Weights

Tell = Callable[[Mapping[str, float]], None]
"""Is told the numbers of each evaluation."""


@dataclass(frozen=True, kw_only=True)
class ToldIRL(MaxCausalEntIRL):
    """The same fit, which says how far it is."""

    tell: Tell

    def minimise(self, objective: PlannedObjective) -> Descent[Plan]:
        """Minimise, telling of each evaluation."""
        return super().minimise(ToldObjective(objective, self.tell))

    def told(self, fit: Fit) -> Fit:
        """The same fit: the command itself says what has not converged."""
        return fit


@dataclass(frozen=True, eq=False)
class ToldObjective:
    """An objective that tells of each evaluation."""

    objective: PlannedObjective
    tell: Tell

    @property
    def setting(self) -> Setting:
        """That of the objective."""
        return self.objective.setting

    def at(self, weights: Weights, guess: Plan | None = None) -> Point[Plan]:
        """The objective there."""
        point = self.objective.at(weights, guess)
        self.tell({"objective": point.value, "largest_gradient": point.gradient_norm})
        return point


@dataclass(frozen=True, kw_only=True)
class ToldPathIRL(MaxEntIRL):
    """The same fit of paths, which says how far it is."""

    tell: Tell

    def told(self, fit: PathFit) -> PathFit:
        """The same fit: the command itself says what has not converged."""
        return fit

    def dual(self, features: Features, start: PerState, moments: Weights) -> PathDual:
        """The objective, telling of each evaluation."""
        return ToldPathDual(features, start, moments, self.l2, self.tell)


@dataclass(frozen=True, eq=False)
class ToldPathDual(PathDual):
    """The objective over paths, which tells of each evaluation."""

    tell: Tell

    def at(self, weights: Weights, guess: PathPlan | None = None) -> Point[PathPlan]:
        """The objective there."""
        point = super().at(weights, guess)
        self.tell({"objective": point.value, "largest_gradient": point.gradient_norm})
        return point
