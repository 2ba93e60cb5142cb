"""Directions in which weights can move without changing behaviour, and how certain the others are.

Rewards that differ by potential shaping make the same policy (Ng, Harada & Russell 1999), so no amount of data can
distinguish them.  With linear rewards the Hessian then lacks full rank.
"""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray

from posttrain.errors import UserError
from posttrain.irl import arguments, counting, curvature, fitting, preferences
from posttrain.irl.demonstrations import Demonstrations
from posttrain.irl.features import Weights

NO_CURVATURE = 1e-13
"""Curvature below this share of the largest counts as none."""
UNTOUCHED = 1e-5
"""The share of a free direction that a weight may have and still count as identified."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Identifiability:
    """Which weights, and which combinations of them, behaviour determines."""

    curvatures: Weights
    """Eigenvalues of the objective's curvature without its penalty, with features in units of their size; from large to
    small."""
    free: Float[ndarray, "feature direction"]
    """Orthonormal directions along which weights can move and no policy changes."""
    identified: Bool[ndarray, " feature"]
    """Whether each weight is determined: no free direction moves it."""

    @property
    def rank(self) -> int:
        """How many independent combinations of weights are determined."""
        return len(self.curvatures) - int(self.free.shape[1])


def identifiability(fit: fitting.Fit | preferences.PreferenceFit) -> Identifiability:
    """Identifiability at the fitted weights, from demonstrated features or actions and from comparisons.

    Features are compared at one scale, so the unit of a column does not matter.
    """
    if not isinstance(fit, fitting.Fit | preferences.PreferenceFit):
        raise UserError(f"fit is {arguments.brief_repr(fit)}: give a Fit, or the PreferenceFit of `fit_preferences`")
    units = fit.setting.features.units
    curvatures, axes = np.linalg.eigh(fit.information / np.outer(units, units))
    scaled = axes[:, curvatures <= NO_CURVATURE * max(float(curvatures[-1]), 1e-300)]
    return Identifiability(
        curvatures=curvatures[::-1],
        free=np.linalg.qr(scaled / units[:, None])[0],
        identified=np.abs(scaled).max(axis=1, initial=0.0) <= UNTOUCHED,
    )


@dataclass(frozen=True, eq=False)
class Intervals:
    """Where each true weight lies, at the confidence level; unbounded for weights that are not identified."""

    low: Weights
    high: Weights


def confidence_intervals(fit: fitting.Fit, demonstrations: Demonstrations, *, level: float = 0.95) -> Intervals:
    """Intervals from the curvature of the objective and the spread of the demonstrations, for many of them.

        θ̂ ≈ N(θ, H⁻¹ J H⁻¹ / N)

    H is the Hessian with the penalty, and J the covariance over episodes of the terms of the gradient: for the dual the
    features of an episode less those expected from its start, in a joint fit plus the comparisons' terms; for the
    likelihood J is Fisher's information.  The intervals cover the weights that a penalty of 0 would find only if the
    penalty is small.  They assume that the demonstrator is soft-optimal for some weights, and that comparisons follow
    Bradley-Terry for the same weights.
    """
    arguments.require_kind(fit, fitting.Fit, "fit")
    arguments.checked_number(level, "level", arguments.PROBABILITY)
    report, known = identifiability(fit), fitted_demonstrations(demonstrations, fit)
    spread = fit.objective.scatter(fit.point, known)
    bend = inverse_hessian(fit, report)
    deviation = np.sqrt(np.maximum(np.diag(bend @ spread @ bend), 0) / len(known))
    reach = np.where(report.identified, NormalDist().inv_cdf((1 + level) / 2) * deviation, np.inf)
    return Intervals(low=fit.weights - reach, high=fit.weights + reach)


def fitted_demonstrations(demonstrations: Demonstrations, fit: fitting.Fit) -> Demonstrations:
    """The demonstrations in the world of the fit, which must be those that were fitted, if any were."""
    features = fit.setting.features
    known = counting.in_world(demonstrations, features.mdp)
    if not fit.num_demonstrations:
        return known
    moments = features.observed(counting.discounted_counts(known, features.mdp, discount=fit.setting.discount))
    same = np.allclose(moments, fit.moments, rtol=1e-9, atol=1e-12 * features.largest)
    if len(known) != fit.num_demonstrations or not same:
        raise UserError(f"{len(known)} demonstrations are not the {fit.num_demonstrations} of the fit; give those")
    return known


def inverse_hessian(fit: fitting.Fit, report: Identifiability) -> curvature.Matrix:
    """H⁻¹, zero along what neither data nor penalty determine; each weight in its own unit, which may be any."""
    hessian, units = fit.point.hessian, fit.setting.features.units
    least = NO_CURVATURE * max(float(report.curvatures[0]), 1e-300) * units**2
    sizes = np.sqrt(np.maximum(np.diag(hessian), least))
    scaled = np.linalg.pinv(hessian / np.outer(sizes, sizes), rcond=NO_CURVATURE, hermitian=True)
    return np.asarray(scaled / np.outer(sizes, sizes))
