"""What demonstrations cannot say: directions in which weights move and behaviour does not, and how sure the rest is.

Rewards that differ by potential shaping make the same policy (Ng, Harada & Russell 1999), so no amount of data tells
them apart.  With linear rewards that shows as a Hessian of the dual without full rank.
"""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray

from posttrain.errors import UserError
from posttrain.irl.counting import in_world
from posttrain.irl.curvature import curvature, expected_from
from posttrain.irl.demonstrations import Demonstrations
from posttrain.irl.fitting import Fit
from posttrain.irl.rewards import Weights

NO_CURVATURE = 1e-13
"""Curvature below this share of the largest counts as none."""
UNTOUCHED = 1e-5
"""The share of a free direction that a weight may have and still count as identified."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Identifiability:
    """Which weights, and which combinations of them, behaviour determines."""

    curvatures: Weights
    """Eigenvalues of the dual's Hessian without its penalty, from large to small."""
    free: Float[ndarray, "feature direction"]
    """Orthonormal directions along which weights can move and no policy changes."""
    identified: Bool[ndarray, " feature"]
    """Whether each weight by itself is determined: no free direction moves it."""

    @property
    def rank(self) -> int:
        """How many independent combinations of weights are determined."""
        return len(self.curvatures) - int(self.free.shape[1])


def identifiability(fit: Fit) -> Identifiability:
    """Read off the curvature of the dual at the fitted weights, whatever objective found them."""
    plan, features = fit.point.plan, fit.setting.features
    visits = plan.visits(fit.setting.sources())
    curvatures, axes = np.linalg.eigh(curvature(plan, features, visits) / fit.setting.temperature)
    free = axes[:, curvatures <= NO_CURVATURE * max(float(curvatures[-1]), 1e-300)]
    return Identifiability(
        curvatures=curvatures[::-1],
        free=free,
        identified=np.abs(free).max(axis=1, initial=0.0) <= UNTOUCHED,
    )


@dataclass(frozen=True, eq=False)
class Intervals:
    """Where each true weight lies, with the confidence asked for; unbounded for weights that are not identified."""

    low: Weights
    high: Weights


def confidence_intervals(fit: Fit, demonstrations: Demonstrations, *, level: float = 0.95) -> Intervals:
    """Intervals from the curvature of the objective and the spread of the demonstrations, for many of them.

        θ̂ ≈ N(θ, H⁻¹ J H⁻¹ / N)

    H is the Hessian, the penalty included, and J the covariance over episodes of what the gradient adds up: for the
    dual the features of an episode less what the policy expects from its start.  For the likelihood J = H without the
    penalty, the Fisher information.  They cover the weights that a penalty of 0 would find only as far as the penalty
    is small, and assume that the model is right: that the demonstrator is soft-optimal for some weights.
    """
    if not 0 < level < 1:
        raise UserError(f"level = {level}: use a probability, such as 0.95")
    hessian, known = fit.point.hessian, identifiability(fit).identified
    bend = np.linalg.pinv(hessian, rcond=NO_CURVATURE, hermitian=True)
    num_episodes = len(demonstrations)
    if fit.objective == "likelihood":
        spread = hessian - fit.setting.l2 * np.eye(len(hessian))
    else:
        setting = fit.setting
        found = in_world(demonstrations, setting.features.mdp)
        starts = found.states[found.first_visits]
        surprise = setting.features.per_episode(found, setting.discount)
        surprise -= expected_from(fit.point.plan, setting.features)[starts]
        spread = surprise.T @ surprise / num_episodes
    deviation = np.sqrt(np.maximum(np.diag(bend @ spread @ bend), 0) / num_episodes)
    reach = np.where(known, NormalDist().inv_cdf((1 + level) / 2) * deviation, np.inf)
    return Intervals(low=fit.weights - reach, high=fit.weights + reach)
