"""Demonstrations from every source, counted by hand, and those refused, naming the episode and the step."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import numpy as np
import pytest
from scipy.sparse import csr_array

from posttrain.irl.causal import MaxCausalEntIRL
from posttrain.irl.comparison import occupancy
from posttrain.irl.counting import action_counts, discounted_counts, in_world, start_shares, visit_totals
from posttrain.irl.demonstrations import Demonstrations, Episode
from posttrain.irl.episode_sampling import sample_demonstrations
from posttrain.irl.features import LinearReward
from posttrain.irl.fitting import Fit
from posttrain.irl.grids import GridWorld
from tests.support.irl_worlds import Zeros, chain, random_world
from tests.support.refusals import refused

# On a dry 3 × 3 grid: 0 →+x 1 →+y 4 →+y 7 →+x 8 (the end), and 3 →+y 6 →-x 6, stopped there.
TO_THE_END = Episode([0, 1, 4, 7, 8], [0, 2, 2, 0], terminated=True)
STOPPED = Episode([3, 6, 6], [2, 1], terminated=False, truncated=True)
BOTH = Demonstrations.from_episodes([TO_THE_END, STOPPED])


def same(a: Demonstrations, b: Demonstrations) -> bool:
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("states", "actions", "lengths", "terminated", "truncated")
    )


def test_episodes_of_different_lengths_are_kept_end_to_end_and_given_back() -> None:
    assert BOTH.states.tolist() == [0, 1, 4, 7, 8, 3, 6, 6]
    assert BOTH.actions.tolist() == [0, 2, 2, 0, 2, 1]
    assert BOTH.lengths.tolist() == [4, 2]
    assert BOTH.visit_times.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert BOTH.acting.tolist() == [True, True, True, True, False, True, True, False]
    first, second = BOTH
    assert (first.states.tolist(), first.actions.tolist()) == ([0, 1, 4, 7, 8], [0, 2, 2, 0])
    assert (second.states.tolist(), second.actions.tolist()) == ([3, 6, 6], [2, 1])
    assert [(e.terminated, e.truncated) for e in (first, second)] == [(True, False), (False, True)]
    names = [BOTH.step_name(visit).removeprefix("demonstration ") for visit in (0, 4, 5)]
    assert names == ["0, step 0", "0, step 4", "1, step 0"]


def test_every_source_gives_the_same_demonstrations(tmp_path) -> None:
    for name in ("both.npz", "both"):
        BOTH.save(tmp_path / name)
        assert same(Demonstrations.load(tmp_path / name), BOTH)
    triples = [[(0, 0, 1), (1, 2, 4), (4, 2, 7), (7, 0, 8)], [(3, 2, 6), (6, 1, 6)]]
    assert same(Demonstrations.from_transitions(triples, terminated=[True, False]), BOTH)
    assert same(Demonstrations.from_transitions(map(np.array, triples), terminated=np.array([True, False])), BOTH)
    minari, imitation = [], []
    for way in (TO_THE_END, STOPPED):
        states, actions = np.array(way.states), np.array(way.actions)
        last = np.arange(1, len(actions) + 1) == len(actions)
        flags = {"terminations": last & way.terminated, "truncations": last & way.truncated}
        minari.append(SimpleNamespace(observations=states, actions=actions, **flags))
        imitation.append(SimpleNamespace(obs=states[:, None], acts=actions, terminal=way.terminated, infos=None))
    assert same(Demonstrations.from_minari(minari), BOTH)
    assert same(Demonstrations.from_imitation(imitation), BOTH)


def test_an_end_that_imitations_time_limit_made_is_no_end_of_the_world() -> None:
    def trajectory(way, info):
        infos = None if info is None else [{}] * (len(way.actions) - 1) + [info]
        return SimpleNamespace(obs=np.array(way.states), acts=np.array(way.actions), terminal=True, infos=infos)

    told = [trajectory(way, {"TimeLimit.truncated": way.truncated}) for way in (TO_THE_END, STOPPED)]
    assert same(Demonstrations.from_imitation(told), BOTH)
    untold = [trajectory(TO_THE_END, None), trajectory(STOPPED, {})]
    assert Demonstrations.from_imitation(untold).terminated.tolist() == [True, True]
    assert same(Demonstrations.from_imitation(untold, time_limit=2), BOTH)


def test_minaris_own_episodes_are_read() -> None:
    minari = pytest.importorskip("minari")
    states, actions, ends = np.array(TO_THE_END.states), np.array(TO_THE_END.actions), np.arange(4) == 3
    given = {"observations": states, "actions": actions, "terminations": ends, "truncations": ends & False}
    episode = minari.EpisodeData(id=0, rewards=np.zeros(4), infos={}, **given)
    assert same(Demonstrations.from_minari([episode]), Demonstrations.from_episodes([TO_THE_END]))


def test_totals_and_starts_are_averages_over_episodes() -> None:
    assert visit_totals(BOTH, 9).tolist() == [0.5, 0.5, 0, 0.5, 0.5, 0, 1.0, 0.5, 0.5]
    assert start_shares(BOTH, 9).tolist() == [0.5, 0, 0, 0.5, 0, 0, 0, 0, 0]


def test_counts_are_discounted_from_each_episodes_own_start_and_leave_out_where_one_stopped() -> None:
    counts = discounted_counts(BOTH, GridWorld(3, start=np.full(9, 1 / 9)), discount=0.5)
    acting = np.zeros((9, 4))
    acting[0, 0], acting[1, 2], acting[4, 2], acting[7, 0] = 1 / 2, 1 / 4, 1 / 8, 1 / 16  # halves: of two episodes
    acting[3, 2], acting[6, 1] = 1 / 2, 1 / 4
    np.testing.assert_array_equal(counts.acting, acting)
    assert counts.ending.tolist() == [0] * 8 + [1 / 32]
    assert counts.entered.tolist() == [0, 1 / 2, 0, 0, 1 / 4, 0, 1 / 2 + 1 / 4, 1 / 8, 1 / 16]
    by_time = action_counts(BOTH, GridWorld(3), horizon=4)
    assert by_time.sum(axis=(1, 2)).tolist() == [1.0, 1.0, 0.5, 0.5]
    assert by_time[1, 6, 1] == by_time[1, 1, 2] == 0.5


def test_observed_features_are_sums_over_what_they_are_features_of() -> None:
    world, rng = GridWorld(3, start=np.full(9, 1 / 9)), np.random.default_rng(0)
    counts = discounted_counts(BOTH, world, discount=0.5)
    per_state, per_pair = rng.normal(size=(9, 2)), rng.normal(size=(9, 4, 2))
    halves = 0.5 ** np.array([0, 1, 2, 3, 4, 0, 1]) / 2  # the last state of the second episode is not counted
    steps = 0.5 ** np.array([0, 1, 2, 3, 0, 1]) / 2
    for features, on, expected in (
        (per_state, "state", halves @ per_state[[0, 1, 4, 7, 8, 3, 6]]),
        (per_pair, "state_action", steps @ per_pair[[0, 1, 4, 7, 3, 6], [0, 2, 2, 0, 2, 1]]),
        (per_state, "next_state", steps @ per_state[[1, 4, 7, 8, 6, 6]]),
    ):
        observed = LinearReward(features=features, on=on).bound(world).observed(counts)
        np.testing.assert_allclose(observed, expected, rtol=1e-14)


@pytest.mark.parametrize("on", ["state", "state_action", "next_state"])
def test_what_is_observed_is_the_mean_over_episodes(on) -> None:
    world, rng = GridWorld(3, start=np.full(9, 1 / 9)), np.random.default_rng(0)
    features = LinearReward(features=rng.normal(size=(36 if on == "state_action" else 9, 2)), on=on).bound(world)
    each = features.per_episode(BOTH, 0.5)
    assert each.shape == (2, 2)
    for mean, of in ((each.mean(axis=0), BOTH), (each[1], Demonstrations.from_episodes([STOPPED]))):
        observed = features.observed(discounted_counts(of, world, discount=0.5))
        np.testing.assert_allclose(mean, observed, rtol=1e-14)


def test_where_there_is_one_action_its_features_are_the_mean_over_actions() -> None:
    features = LinearReward(features=np.array([[1.0, -7.0], [2.0, 3.0], [5.0, 5.0]]), on="state_action")
    bound = features.bound(chain(3, ends=True))
    assert bound.averaged(np.ones((3, 1))).tolist() == [[1, -7], [2, 3], [0, 0]]
    assert bound.largest == 7, "in size"


def test_walking_visits_states_as_often_as_expected_and_is_fixed_by_its_seed() -> None:
    mdp = random_world(np.random.default_rng(4))
    policy = np.random.default_rng(5).dirichlet(np.ones(3), 6)
    walks = [sample_demonstrations(mdp, policy, num_episodes=4000, rng=np.random.default_rng(9)) for _ in range(2)]
    assert same(*walks)
    assert walks[0].terminated.all()
    assert not walks[0].truncated.any()
    expected = occupancy(mdp, policy, discount=1.0)
    assert np.abs(visit_totals(walks[0], 6) - expected).max() < 0.05 * expected.max()  # some four standard errors
    assert np.abs(start_shares(walks[0], 6) - mdp.start).max() < 0.03


def test_a_draw_of_zero_chooses_nothing_that_has_probability_zero() -> None:
    grid = GridWorld(3, start=[0.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    upwards = np.tile([0.0, 0.0, 0.5, 0.5], (9, 1))
    walk = sample_demonstrations(grid, upwards, num_episodes=1, rng=Zeros(), max_steps=3)
    assert (walk.states.tolist(), walk.actions.tolist()) == ([1, 4, 7, 7], [2, 2, 2])


def test_a_walk_that_goes_on_too_long_is_truncated() -> None:
    still = np.tile([0.0, 1.0, 0.0, 0.0], (9, 1))
    walk = sample_demonstrations(GridWorld(3), still, num_episodes=1, rng=np.random.default_rng(0), max_steps=7)
    assert (walk.lengths.tolist(), walk.terminated.tolist(), walk.truncated.tolist()) == ([7], [False], [True])


def test_states_are_named_as_the_environment_names_them() -> None:
    """A world that lost states in reading still takes and gives the environment's numbers."""
    mdp = replace(chain(2, ends=True), states=np.array([17, 40]))
    walk = sample_demonstrations(mdp, np.ones((2, 1)), num_episodes=1, rng=np.random.default_rng(0))
    assert walk.states.tolist() == [17, 40]
    assert in_world(walk, mdp).states.tolist() == [0, 1]
    with refused("demonstration 0, step 1: there is no state 18 among … 17 to 40"):
        in_world(Demonstrations.from_transitions([[(17, 0, 18)]]), mdp)


def triples(*steps: tuple[int, int, int], **given) -> Demonstrations:
    return Demonstrations.from_transitions([[(7, 0, 8)], list(steps)], **given)


def walked(*steps: tuple[int, int, int]) -> Demonstrations:
    return in_world(triples(*steps), GridWorld(3))


def walks_of(policy, *, num_episodes: int = 1, max_steps: int = 5) -> Demonstrations:
    rng = np.random.default_rng(0)
    return sample_demonstrations(GridWorld(3), policy, num_episodes=num_episodes, rng=rng, max_steps=max_steps)


def fitted_to(demonstrations: Demonstrations) -> Fit:
    return MaxCausalEntIRL().fit(GridWorld(3), LinearReward(features=np.eye(9)), demonstrations)


def flat(states, actions) -> Demonstrations:
    """One episode, said to be of one action."""
    yes = np.array([True])
    return Demonstrations(
        states=np.array(states), actions=np.array(actions), lengths=np.array([1]), terminated=yes, truncated=~yes
    )


def one(states, actions) -> Demonstrations:
    return Demonstrations.from_episodes([Episode(states, actions, terminated=True)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Demonstrations.from_episodes([]), "no demonstrations"),
        (lambda: Demonstrations.from_transitions([]), "no demonstrations"),
        (lambda: triples(), "demonstration 1 has no transitions"),
        (lambda: triples((0, 0, 1), (4, 0, 5)), "demonstration 1, step 1: it begins in state 4, … ended in state 1"),
        (lambda: triples((0, 0, 1), terminated=[True]), "1 flags for 2 demonstrations"),
        (lambda: triples((0, 0, -1, 1), (1, 0, -1, 2)), "1, step 0: (0, 0, -1, 1) is not (state, action, next state)"),
        (lambda: in_world(one([3], []), GridWorld(3)), "demonstration 0 is marked as terminated in state 3"),
        (
            lambda: in_world(Demonstrations.from_episodes([TO_THE_END, Episode([3], [], False, True)]), GridWorld(3)),
            "demonstration 1 has no actions and its state 3 is not terminal: … leave it out",
        ),
        (lambda: visit_totals(BOTH, 8), "demonstration 0, step 4: there is no state 8; states are 0 to 7"),
        (lambda: start_shares(one([0, -1], [0]), 9), "demonstration 0, step 1: there is no state -1"),
        (lambda: walked((0, 0, 2)), "demonstration 1, step 0: action 0 in state 0 never leads to state 2"),
        (lambda: walked((0, 5, 1)), "demonstration 1, step 0: action 5 … actions are 0 to 3"),
        (lambda: walked((0, -1, 1)), "action -1"),
        (lambda: walked((0, 0, 9)), "demonstration 1, step 1: there is no state 9"),
        (lambda: walked((-1, 0, 0)), "demonstration 1, step 0: there is no state -1"),
        (lambda: walked((7, 0, 8), (8, 0, 8)), "step 1: … state 8, which is terminal"),
        (lambda: walked((0, 0, 1)), "demonstration 1 is marked as terminated in state 1, which is not terminal"),
        (lambda: one([0, 1], [0, 0]), "demonstration 0 has 2 states and 2 actions"),
        *(
            (lambda states=states: one(np.array(states), [0]), "demonstration 0: each state must be one whole number")
            for states in ([0.5, 1], [[0.0] * 3] * 2, [0, 1e300], ["0", "1"], [0, None], {"place": 0})
        ),
        (lambda: one([0, 1], np.array([np.nan])), "demonstration 0: each action must be one whole number … 0 is nan"),
        (lambda: one(np.array([0, np.inf]), [0]), "demonstration 0: each state must be one whole number … 1 is inf"),
        (lambda: flat([0, 1, 2], [0]), "1 actions and 2 states … ; 1 and 3 are given"),
        (lambda: flat([0, 1], [0, 0]), "1 actions and 2 states … ; 2 and 2 are given"),
        (lambda: walks_of(np.full((9, 4), 0.25), num_episodes=0), "num_episodes = 0"),
        (lambda: walks_of(np.full((9, 4), 0.25), max_steps=0), "max_steps = 0"),
        (lambda: fitted_to(BOTH), "demonstration 1 was truncated in state 6 after 2 actions"),
    ],
)
def test_what_is_no_demonstration_is_refused_naming_it(make, message) -> None:
    with refused(message):
        make()


WRITTEN = {"states": [0, 1], "actions": [0], "lengths": [1], "terminated": [True], "truncated": [False]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"states": np.zeros(3)}, "holds no array 'actions'"),
        (WRITTEN | {"lengths": [2]}, "2 actions and 3 states … 1 and 2 are given"),
        (WRITTEN | {"terminated": []}, "`terminated` … the 1 episodes"),
        *((WRITTEN | {"terminated": flags}, "terminated") for flags in ([[True]], [0.5], [np.nan], ["False"], True)),
    ],
)
def test_a_file_that_holds_something_else_is_refused(tmp_path, fields, message) -> None:
    np.savez(tmp_path / "other.npz", **fields)
    with refused(message):
        Demonstrations.load(tmp_path / "other.npz")


def test_a_flag_in_a_file_may_be_a_number(tmp_path) -> None:
    np.savez(tmp_path / "numbers.npz", **WRITTEN | {"terminated": [1]})
    assert Demonstrations.load(tmp_path / "numbers.npz").terminated.tolist() == [True]


def files_gone_wrong(folder: Path) -> Iterator[Path]:
    """What holds no numbers: missing, a folder, empty, text, cut off, changed, objects, another archive."""
    BOTH.save(folder / "whole.npz")
    whole = (folder / "whole.npz").read_bytes()
    spoilt = bytearray(whole)
    spoilt[60] ^= 255  # in the first member
    yield from (folder / "missing.npz", folder)
    for number, content in enumerate((b"", b"0 1 4", whole[:-5], whole[: len(whole) // 2], bytes(spoilt))):
        (folder / str(number)).write_bytes(content)
        yield folder / str(number)
    np.savez(folder / "objects.npz", states=np.array([0, None]))
    yield folder / "objects.npz"
    np.save(folder / "header.npy", BOTH.states)
    header = (folder / "header.npy").read_bytes()
    (folder / "header.npy").write_bytes(header.replace(b"(8,), }", b"(8,), ("))
    yield folder / "header.npy"
    with ZipFile(folder / "other.zip", "w") as archive:
        archive.writestr("states", "0 1 4")
    yield folder / "other.zip"


def test_a_damaged_file_is_refused_and_named(tmp_path) -> None:
    for path in files_gone_wrong(tmp_path):
        with refused(f"{path}: "):
            Demonstrations.load(path)


@pytest.mark.parametrize(
    ("features", "on", "message"),
    [
        (np.ones((8, 2)), "state", "shape (8, 2); use 9 rows, one for each state"),
        (np.ones((9, 2)), "state_action", "use 36 rows, one for each pair"),
        (np.ones(9), "state", "shape (9,); use 9 rows"),
        (np.where(np.arange(18).reshape(9, 2) == 7, np.nan, 1), "state", "row 3, column 1 is nan"),
        (csr_array(np.where(np.arange(18).reshape(9, 2) == 8, np.inf, 1)), "next_state", "row 4, column 0 is inf"),
    ],
)
def test_features_of_the_wrong_shape_or_with_nan_are_refused_naming_the_row(features, on, message) -> None:
    with refused(message):
        LinearReward(features=features, on=on).bound(GridWorld(3))


def test_actions_are_fitted_up_to_the_horizon_and_no_further() -> None:
    features = LinearReward(features=np.eye(9))
    assert MaxCausalEntIRL(objective="likelihood", horizon=4).fit(GridWorld(3), features, BOTH).converged
    with refused("demonstration 0 has 4 actions; the horizon is 3"):
        MaxCausalEntIRL(objective="likelihood", horizon=3).fit(GridWorld(3), features, BOTH)


def test_moments_of_the_wrong_shape_are_refused() -> None:
    features = LinearReward(features=np.eye(9))
    for moments in (np.ones(8), np.where(np.arange(9) == 4, np.nan, 1.0)):
        with refused("moments has"):
            MaxCausalEntIRL().fit_moments(GridWorld(3), features, moments)
    with refused("needs demonstrations"):
        MaxCausalEntIRL(objective="likelihood").fit_moments(GridWorld(3), features, np.ones(9))
