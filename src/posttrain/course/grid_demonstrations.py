"""The four functions of maximum-entropy inverse RL that a homework has its readers write, over `posttrain.irl.course`.

They take the homework's dense arrays and its trajectories: anything with `transitions()`, each with `s_from`, `action`
and `s_to`.  They load scipy (the extra `irl`) when they are called.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from jaxtyping import Float
from numpy import ndarray

from posttrain.errors import UserError

if TYPE_CHECKING:
    from posttrain.irl.demonstrations import Demonstrations
    from posttrain.irl.mdp import TabularMDP


@runtime_checkable
class TransitionLike(Protocol):
    """One step of a walk."""

    s_from: int
    action: int
    s_to: int


@runtime_checkable
class TrajectoryLike(Protocol):
    """A walk as the homework has it."""

    def transitions(self) -> Sequence[TransitionLike]: ...


def feature_expectation_from_trajectories(
    features: Float[ndarray, "state feature"], demos: Iterable[TrajectoryLike]
) -> Float[ndarray, " feature"]:
    """Totals of the features over all visited states, the last one too, averaged over the walks.

    μ_E = 1/N Σ_i Σ_t φ(s_t^(i))
    """
    from posttrain.irl.course import feature_expectations

    expectations: ndarray = feature_expectations(features, as_demonstrations(demos))
    return expectations


def initial_probabilities_from_trajectories(n_states: int, demos: Iterable[TrajectoryLike]) -> Float[ndarray, " state"]:
    """The share of walks that begin in each state.

    The homework skips walks without a step but still divides by the number of all walks, unless its reader notices.
    """
    from posttrain.irl.course import start_histogram

    histogram: ndarray = start_histogram(n_states, as_demonstrations(demos))
    return histogram


def compute_expected_svf(
    p_transition: Float[ndarray, "state next action"],
    p_initial: Float[ndarray, " state"],
    terminal: Iterable[int],
    reward: Float[ndarray, " state"],
) -> Float[ndarray, " state"]:
    """Expected visits of each state within 2·S steps, by a backward sweep of partitions and a forward one of visits.

        Z_{s,a} = e^{r(s)} Σ_s' P(s'|s,a) Z_s',   Z_s = Σ_a Z_{s,a},   π(a|s) = Z_{s,a} / Z_s
        d_{t+1}(s') = Σ_{s,a} d_t(s) π(a|s) P(s'|s,a),   and nothing leaves a terminal state

    As taught.  What is wrong with it is in docs/irl.md: under random dynamics the partition lets a path choose where it
    slips to.
    """
    from posttrain.irl.course import expected_visitations, local_action_probabilities

    world, ends = world_of(p_transition), [*terminal]
    visits: ndarray = expected_visitations(world, ends, p_initial, local_action_probabilities(world, ends, reward))
    return visits


def maxent_irl(
    p_transition: Float[ndarray, "state next action"],
    features: Float[ndarray, "state feature"],
    terminal: Iterable[int],
    demos: Iterable[TrajectoryLike],
    lr: float = 0.2,
    eps: float = 1e-4,
) -> Float[ndarray, " state"]:
    """The reward of each state, by exponentiated gradient from weights of 1.

        ω ← ω · exp(α_t (μ_E - μ_ω)),   α_t = lr / (1 + t),   R = features · ω

    It stops when no weight moves by more than `eps`, which happens because the step has shrunk: the features are not
    matched (.81 off on the homework's own grid, whose test allows .85).  `posttrain irl irl-course-exact` matches them.
    """
    from posttrain.irl.course import recover_reward

    fit = recover_reward(
        world_of(p_transition), features, [*terminal], as_demonstrations(demos), step_size=lr, tolerance=eps
    )
    reward: ndarray = features @ fit.weights
    return reward


def as_demonstrations(demos: Iterable[TrajectoryLike]) -> "Demonstrations":
    from posttrain.irl.demonstrations import Demonstrations

    walks = [[(step.s_from, step.action, step.s_to) for step in each.transitions()] for each in demos]
    kept = [walk for walk in walks if walk]
    if not kept:
        raise UserError("demos: none of the trajectories has a step.  Give at least one that has.")
    return Demonstrations.from_transitions(kept)


def world_of(p_transition: Float[ndarray, "state next action"]) -> "TabularMDP":
    """The homework's table, in a world that continues after its terminal states."""
    from posttrain.irl.mdp import TabularMDP

    return TabularMDP.from_dense(p_transition, layout="state next action", start=0)
