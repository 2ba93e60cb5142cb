"""Comparisons of rewards that shaping does not disturb."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from posttrain import irl
from posttrain.irl.comparison import policy_value
from tests.support.irl_worlds import GOAL, course_fit, course_rewards, random_world
from tests.support.refusals import refused

SEEDS = st.integers(0, 10_000)
few = settings(max_examples=25)


@few
@given(seed=SEEDS, discount=st.sampled_from([0.6, 0.9]))
def test_shaping_changes_neither_what_is_done_nor_what_is_best(seed, discount) -> None:
    rng = np.random.default_rng(seed)
    mdp = random_world(rng)
    reward = rng.normal(size=(6, 3))
    potential = np.where(mdp.terminal, 0.0, rng.normal(size=6) * 3)
    shaped = reward + discount * (mdp.transitions @ potential).reshape(6, 3) - potential[:, None]
    other = rng.normal(size=(6, 3))
    assert irl.policy_divergence(mdp, reward, shaped, discount=discount) == pytest.approx(0, abs=1e-9)
    assert irl.policy_divergence(mdp, reward, other, discount=discount) > 1e-3
    assert irl.policy_divergence(mdp, other, shaped, discount=discount) == pytest.approx(
        irl.policy_divergence(mdp, other, reward, discount=discount), rel=1e-6, abs=1e-9
    )
    assert irl.transfer_loss(mdp, reward, shaped, discount=discount) == pytest.approx(0, abs=1e-8)
    assert irl.transfer_loss(mdp, reward, -reward, discount=discount) > 1e-3


def test_the_divergence_is_the_mean_log_ratio_of_an_episode() -> None:
    """Two soft policies in one state: π = (3/4, 1/4) and (1/2, 1/2); action 0 ends, action 1 stays."""
    table = np.array([[[0.0, 1.0], [1.0, 0.0]], [[0, 1.0], [0, 1.0]]])
    mdp = irl.TabularMDP.from_dense(table, layout="state action next", start=0, terminal=[1])

    def reward(stay: float) -> np.ndarray:
        """Q(0,0) = 0 and Q(0,1) = r + V with V = -log(1 - stay): r = log(stay / (1 - stay)) - V = log(stay)."""
        return np.array([[0.0, np.log(stay)], [0.0, 0.0]])

    # Each visit of the state costs KL = 3/4 log(3/2) + 1/4 log(1/2); visits of the first policy are 1/(1 - 1/4).
    expected = 4 / 3 * (0.75 * np.log(1.5) + 0.25 * np.log(0.5))
    assert irl.policy_divergence(mdp, reward(0.25), reward(0.5), discount=1.0) == pytest.approx(expected, rel=1e-9)


def test_the_divergence_is_in_nats_whatever_the_unit_of_rewards() -> None:
    rng = np.random.default_rng(0)
    mdp = random_world(rng)
    first, second = rng.normal(size=(2, 6, 3))
    assert irl.policy_divergence(mdp, 3 * first, 3 * second, discount=0.9, temperature=3.0) == pytest.approx(
        irl.policy_divergence(mdp, first, second, discount=0.9), rel=1e-9
    )


def test_the_value_difference_is_what_wandering_costs() -> None:
    """On a dry 2 × 2 grid at -1 a step (the end pays 0), the best way takes 2 steps."""
    grid, reward = irl.GridWorld(2), np.array([-1.0, -1.0, -1.0, 0.0])
    uniform = np.full((4, 4), 0.25)
    # Steps from the corner: u = 1 + u/2 + v/2, from its neighbours: v = 1 + v/2 + u/4: u = 8, v = 6.
    assert policy_value(grid, reward, uniform, discount=1.0) == pytest.approx(-8)
    assert irl.expected_value_difference(grid, reward, uniform, discount=1.0) == pytest.approx(6)


def test_a_reward_learned_on_slippery_ice_is_worth_as_much_on_drier_ice() -> None:
    """Learn with slip .2 and discount .9, then plan with what was learned where slip is .4."""
    fit = course_fit(0.9)
    elsewhere = irl.IcyGridWorld(5, slip=0.4, terminal=[GOAL])
    reward = np.where(np.arange(25) == GOAL, 10.0, course_rewards())  # a goal that pays 1 for ever, at discount .9
    best = float(elsewhere.start @ irl.value_iteration(elsewhere, reward, discount=0.9))
    loss = irl.transfer_loss(elsewhere, reward, fit.reward, discount=0.9)
    assert 0 <= loss < 0.05 * best
    assert irl.transfer_loss(elsewhere, reward, -fit.reward, discount=0.9) > 0.5 * best


@few
@given(seed=SEEDS, discount=st.sampled_from([0.5, 0.9]))
def test_epic_sees_neither_shaping_nor_scale_nor_a_constant(seed, discount) -> None:
    rng = np.random.default_rng(seed)
    reward, other = rng.normal(size=(2, 5, 3, 5))
    potential = rng.normal(size=5) * 4
    shaped = 2.5 * reward + discount * potential[None, None, :] - potential[:, None, None] + 1.7
    assert irl.epic_distance(reward, shaped, discount=discount) == pytest.approx(0, abs=1e-7)
    assert irl.epic_distance(reward, -shaped, discount=discount) == pytest.approx(1, abs=1e-9)
    apart = irl.epic_distance(reward, other, discount=discount)
    assert 0.1 < apart < 1
    assert apart == pytest.approx(irl.epic_distance(other, shaped, discount=discount), abs=1e-9)
    third = rng.normal(size=(5, 3, 5))
    assert apart <= irl.epic_distance(reward, third, discount=discount) + irl.epic_distance(
        third, other, discount=discount
    )


def test_epic_takes_rewards_of_pairs_as_rewards_of_whatever_follows_and_refuses_constants() -> None:
    rng = np.random.default_rng(0)
    pairs, other = rng.normal(size=(2, 4, 2))
    whole = np.repeat(pairs[:, :, None], 4, axis=2)
    assert irl.epic_distance(whole, other, discount=0.9) == pytest.approx(irl.epic_distance(pairs, other, discount=0.9))
    potential = rng.normal(size=4)
    constant = 3 + 0.9 * potential[None, None, :] - np.repeat(potential[:, None, None], 2, axis=1)
    with refused("constant up to potential shaping"):
        irl.epic_distance(constant, whole, discount=0.9)
    hidden = 0.9 * 1e8 * np.arange(4.0)[None, None, :] - 1e8 * np.arange(4.0)[:, None, None] + np.zeros((4, 2, 4))
    for nothing in (hidden, np.full((4, 2), -3e8)):
        with refused("constant up to potential shaping"):
            irl.epic_distance(nothing, whole, discount=0.9)
    assert irl.epic_distance(1e-13 * pairs, pairs, discount=0.9) == pytest.approx(0, abs=1e-7), "small, but no constant"
    with refused("same states"):
        irl.epic_distance(pairs[:3], other, discount=0.9)


@few
@given(
    seed=SEEDS, discount=st.sampled_from([0.0, 0.7, 1.0]), shapes=st.sampled_from(["ss", "sp", "so", "pp", "po", "oo"])
)
def test_epic_is_what_its_definition_says_term_by_term(seed, discount, shapes) -> None:
    """The canonical reward of Gleave et al., its uniform S, A and S' summed out; r(s) is paid for any action."""
    rng, size = np.random.default_rng(seed), {"s": (4,), "p": (4, 3), "o": (4, 3, 4)}
    rewards = [rng.normal(size=size[shape]) * 10.0 ** rng.integers(-3, 4) for shape in shapes]

    def canonical(reward: np.ndarray) -> np.ndarray:
        whole = np.broadcast_to(reward.reshape(reward.shape + (1,) * (3 - reward.ndim)), (4, 3, 4))
        mean = [sum(whole[s, a, t] for a in range(3) for t in range(4)) / 12 for s in range(4)]
        steps = itertools.product(range(4), range(3), range(4))
        shaped = lambda s, a, t: whole[s, a, t] + discount * mean[t] - mean[s] - discount * sum(mean) / 4
        return np.array([shaped(*step) for step in steps])

    one, two = (canonical(reward) for reward in rewards)
    if discount == 0 and "s" in shapes:  # nothing but shaping is left
        with refused("constant up to potential shaping"):
            irl.epic_distance(*rewards, discount=discount)
        return
    expected = np.sqrt((1 - np.corrcoef(one, two)[0, 1]) / 2)
    assert irl.epic_distance(*rewards, discount=discount) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("other", "discount", "message"),
    [
        (np.array([[0.0, np.nan], [1, 2], [3, 4]]), 0.9, "a reward has nan at (0, 1)"),
        (np.full((3, 2, 4), 1.0), 0.9, "a reward has the shape (3, 2, 4)"),
        (np.arange(9.0).reshape(3, 3), 0.9, "same states"),
        (np.arange(6.0).reshape(3, 2), 2.0, "discount = 2.0"),
    ],
)
def test_what_is_no_reward_has_no_epic_distance(other, discount, message) -> None:
    with refused(message):
        irl.epic_distance(np.array([[1.0, 2], [0, 3], [5, 1]]), other, discount=discount)
