"""Which row of a mixture a draw is: weights to one draw in every epoch, no row twice before all came, no memory."""

from collections import Counter
from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.tasks.draw_order import DrawOrder, quotas_of
from tests.support.refusals import refused

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
