"""Random numbers are functions of (seed, purpose, step, draw, sample, position); which row of a mixture a draw is."""

from collections import Counter
from itertools import accumulate

import numpy as np
from hypothesis import given, settings, strategies as st

from posttrain.generation.request import StreamKey, philox_key, uniform_table
from posttrain.tasks.draw_order import DrawOrder, quotas_of
from tests.support.refusals import refused
from tests.support.streams import uniforms

MASK = 2**64 - 1
KEY = StreamKey(seed=7, purpose="rollout", step=3)


def philox4x64(counter: list[int], key: list[int], rounds: int = 10) -> list[int]:
    """Salmon et al. 2011, section 3.2, written with Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(rounds):
        left, right = c[0] * 0xD2E7470EE14C6C93, c[2] * 0xCA5A826395121157
        c = [(right >> 64) ^ c[1] ^ k[0], right & MASK, (left >> 64) ^ c[3] ^ k[1], left & MASK]
        k = [(k[0] + 0x9E3779B97F4A7C15) & MASK, (k[1] + 0xBB67AE8584CAA73B) & MASK]
    return c


def test_the_reference_philox_gives_the_published_answer() -> None:
    # Random123's known-answer test for philox4x64-10 with counter 0 and key 0.
    published = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    assert philox4x64([0, 0, 0, 0], [0, 0]) == published


def test_uniforms_are_philox_words_of_block_draw_and_sample() -> None:
    key = [int(word) for word in philox_key(KEY)]
    # numpy uses the counter after adding 1 to it: position 4 is word 0 of block 1, hence of counter 2.
    words = philox4x64([2, 11, 5, 0], key)
    expected = [(word >> 11) / 2**53 for word in words]
    assert uniforms(KEY, 11, 5, 4, 4).tolist() == expected


@given(start=st.integers(0, 50), count=st.integers(0, 30))
def test_any_position_is_reached_without_the_ones_before_it(start: int, count: int) -> None:
    whole = uniforms(KEY, 2, 1, 0, 80)
    assert uniforms(KEY, 2, 1, start, count).tolist() == whole[start : start + count].tolist()


@given(first=st.integers(0, 40), second=st.integers(1, 40))
def test_a_second_turn_draws_the_numbers_behind_those_of_the_first(first: int, second: int) -> None:
    whole = uniforms(KEY, 2, 1, 0, first + second).tolist()
    assert uniforms(KEY, 2, 1, first, second).tolist() == whole[first:]
    assert not set(whole[first:]) & set(whole[:first])


@given(rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8), st.integers(0, 9)), min_size=1, max_size=6))
def test_a_row_of_a_table_does_not_depend_on_the_other_rows(rows: list[tuple[int, int, int]]) -> None:
    table = uniform_table(KEY, rows, count=9)
    for row, (draw, sample, start) in zip(table, rows, strict=True):
        assert row.tolist() == uniforms(KEY, draw, sample, start, 9).tolist()


def test_every_part_of_the_name_gives_other_numbers() -> None:
    base = uniforms(KEY, 1, 1, 0, 8)
    keys = [StreamKey(8, "rollout", 3), StreamKey(7, "evaluation", 3), StreamKey(7, "rollout", 4)]
    others = [uniforms(key, 1, 1, 0, 8) for key in keys]
    others += [uniforms(KEY, *place, 8) for place in ((2, 1, 0), (1, 2, 0), (1, 1, 1))]
    assert all((base != other).all() for other in others)
    # "seed 1, step 11" and "seed 11, step 1" are different names.
    assert (uniforms(StreamKey(1, "a", 11), 0, 0, 0, 8) != uniforms(StreamKey(11, "a", 1), 0, 0, 0, 8)).all()


def test_numbers_are_uniform_along_positions_draws_samples_and_steps() -> None:
    along_positions = uniforms(KEY, 0, 0, 0, 20_000)
    along_draws = uniform_table(KEY, [(draw, 0, 0) for draw in range(20_000)], count=1)
    along_samples = uniform_table(KEY, [(0, sample, 0) for sample in range(20_000)], count=1)
    along_steps = np.array([uniforms(StreamKey(7, "rollout", step), 0, 0, 0, 1)[0] for step in range(5_000)])
    # About the 1 - 1e-6 quantile of chi-square over 100 bins (Wilson and Hilferty 1931).
    far_out = 99 * (1 - 2 / (9 * 99) + 4.753 * (2 / (9 * 99)) ** 0.5) ** 3
    for numbers in (along_positions, along_draws, along_samples, along_steps):
        assert 0 <= numbers.min() <= numbers.max() < 1
        counts, expected = np.histogram(numbers, bins=100, range=(0, 1))[0], numbers.size / 100
        assert ((counts - expected) ** 2 / expected).sum() < far_out


def test_neighbouring_streams_are_uncorrelated() -> None:
    table = uniform_table(KEY, [(draw, sample, 0) for draw in range(8) for sample in range(8)], count=4_000)
    correlation = np.corrcoef(table) - np.eye(64)
    # The correlation of n independent pairs has deviation 1/√n; 2016 pairs exceed 5.5 deviations once in 10^4 tests.
    assert abs(correlation).max() < 5.5 / 4_000**0.5


MIXTURES = st.lists(st.tuples(st.integers(1, 12), st.floats(0.1, 9)), min_size=2, max_size=4)


def order(counts: list[int], weights: list[float] | None, *, seed: int = 0, size: int = 8) -> DrawOrder:
    names = tuple("abcd"[: len(counts)])
    return DrawOrder(seed=seed, size=size, names=names, counts=tuple(counts), quotas=quotas_of(counts, weights))


def rows(mine: DrawOrder, draws: range) -> list[int]:
    """Draws counted through all steps."""
    return [mine.row(1 + draw // mine.size, draw % mine.size) for draw in draws]


def source_of(mine: DrawOrder, row: int) -> int:
    return next(source for source, end in enumerate(accumulate(mine.counts)) if row < end)


@settings(max_examples=12)
@given(mixture=MIXTURES, seed=st.integers(0, 2), epoch=st.integers(0, 2))
def test_every_epoch_honours_the_weights_to_one_draw(mixture: list[tuple[int, float]], seed: int, epoch: int) -> None:
    counts, weights = [count for count, _ in mixture], [weight for _, weight in mixture]
    mine = order(counts, weights, seed=seed)
    length = sum(mine.quotas)
    drawn = Counter(source_of(mine, row) for row in rows(mine, range(epoch * length, (epoch + 1) * length)))
    for source, weight in enumerate(weights):
        assert abs(drawn[source] - length * weight / sum(weights)) < 1


@settings(max_examples=15)
@given(mixture=MIXTURES)
def test_a_source_comes_to_its_end_before_a_row_of_it_comes_again(mixture: list[tuple[int, float]]) -> None:
    mine = order([count for count, _ in mixture], [weight for _, weight in mixture])
    drawn = rows(mine, range(600))
    for source, count in enumerate(mine.counts):
        own = [row for row in drawn if source_of(mine, row) == source]
        for start in range(0, len(own) - count, count):
            assert len(set(own[start : start + count])) == count


@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=4), size=st.integers(1, 5))
def test_without_weights_every_epoch_draws_every_row_once(counts: list[int], size: int) -> None:
    mine = order(counts, None, size=size)
    for epoch in range(2):
        drawn = rows(mine, range(epoch * sum(counts), (epoch + 1) * sum(counts)))
        assert sorted(drawn) == list(range(sum(counts)))


def test_a_draw_depends_on_nothing_but_seed_step_and_number() -> None:
    whole = [order([50, 20], [1.0, 3.0]).row(7, draw) for draw in range(20)]
    mine = order([50, 20], [1.0, 3.0])
    assert [mine.row(7, draw) for draw in reversed(range(20))] == whole[::-1]  # refills, above 8, as well
    assert [order([50, 20], [1.0, 3.0], seed=1).row(7, draw) for draw in range(20)] != whole


def test_a_step_is_no_run_of_one_source() -> None:
    mine = order([500, 500], [1.0, 1.0])
    mixed = [len({source_of(mine, mine.row(step, draw)) for draw in range(8)}) for step in range(1, 101)]
    assert sum(mixed) / 100 > 1.95  # 2 - 2⁻⁷ = 1.99 of steps that are mixed at random


def test_refills_are_of_each_source_as_often_as_its_weight_says_and_are_not_drawn_already() -> None:
    mine = order([300, 100], [1.0, 3.0])
    refills = [mine.row(step, draw) for step in range(1, 201) for draw in range(8, 16)]
    share = sum(source_of(mine, row) == 1 for row in refills) / len(refills)
    assert abs(share - 0.75) < 4 * (0.75 * 0.25 / 1600) ** 0.5  # four deviations
    for step in range(1, 21):
        drawn = {mine.row(step, draw) for draw in range(8)}
        refilled = [mine.row(step, draw) for draw in range(8, 48)]
        assert not drawn & set(refilled)
        assert len(set(refilled)) == 40


def test_quotas_are_rounded_by_the_largest_remainder() -> None:
    # 1000/7 = 142.86, 2000/7 = 285.71, 4000/7 = 571.43: the two that are left go to the first two.
    assert quotas_of([5, 5, 5], [1.0, 2.0, 4.0]) == (143, 286, 571)
    assert quotas_of([1500, 500], [1.0, 1.0]) == (1000, 1000)  # an epoch of a mixture is as long as its rows are many
    assert quotas_of([5, 7], None) == (5, 7)


def test_a_weight_that_is_not_one_draw_is_refused() -> None:
    with refused("task.sources[1].weight = 0.0001 of 1.0001 is less than one draw in an epoch of 1000"):
        quotas_of([10, 10], [1.0, 0.0001])


def test_rows_that_are_not_shuffled_come_in_their_own_order_in_every_epoch() -> None:
    mine = DrawOrder(seed=3, size=2, counts=(5,), quotas=(5,), shuffled=False)
    assert rows(mine, range(12)) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
