"""Random numbers that are functions of (seed, purpose, step, draw, sample, position)."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from posttrain.generation.streams import StreamKey, philox_key, uniform_table, uniforms

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


def far_out(num_bins: int) -> float:
    """About the 1 - 1e-6 quantile of chi-square over `num_bins` bins (Wilson and Hilferty 1931)."""
    free = num_bins - 1
    return free * (1 - 2 / (9 * free) + 4.753 * (2 / (9 * free)) ** 0.5) ** 3


def chi_square(numbers: np.ndarray, num_bins: int) -> float:
    counts = np.histogram(numbers, bins=num_bins, range=(0, 1))[0]
    expected = numbers.size / num_bins
    return float(((counts - expected) ** 2 / expected).sum())


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
    others = [
        uniforms(StreamKey(8, "rollout", 3), 1, 1, 0, 8),
        uniforms(StreamKey(7, "evaluation", 3), 1, 1, 0, 8),
        uniforms(StreamKey(7, "rollout", 4), 1, 1, 0, 8),
        uniforms(KEY, 2, 1, 0, 8),
        uniforms(KEY, 1, 2, 0, 8),
        uniforms(KEY, 1, 1, 1, 8),
    ]
    assert all((base != other).all() for other in others)
    # "seed 1, step 11" and "seed 11, step 1" are different names.
    assert (uniforms(StreamKey(1, "a", 11), 0, 0, 0, 8) != uniforms(StreamKey(11, "a", 1), 0, 0, 0, 8)).all()


def test_numbers_are_uniform_along_positions_draws_samples_and_steps() -> None:
    along_positions = uniforms(KEY, 0, 0, 0, 20_000)
    along_draws = uniform_table(KEY, [(draw, 0, 0) for draw in range(20_000)], count=1)
    along_samples = uniform_table(KEY, [(0, sample, 0) for sample in range(20_000)], count=1)
    along_steps = np.array([uniforms(StreamKey(7, "rollout", step), 0, 0, 0, 1)[0] for step in range(5_000)])
    for numbers in (along_positions, along_draws, along_samples, along_steps):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert chi_square(numbers, 100) < far_out(100)


def test_neighbouring_streams_are_uncorrelated() -> None:
    table = uniform_table(KEY, [(draw, sample, 0) for draw in range(8) for sample in range(8)], count=4_000)
    correlation = np.corrcoef(table) - np.eye(64)
    # The correlation of n independent pairs has deviation 1/√n; 2016 pairs exceed 5.5 deviations once in 10^4 tests.
    assert abs(correlation).max() < 5.5 / 4_000**0.5
