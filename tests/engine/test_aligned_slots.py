"""The cache of any model: what is written for a row is what it sees, in order, ending in the newest column."""

import itertools

import numpy as np
import pytest
import torch

from posttrain.generation.model_steps import AlignedSlots, RowTokens, chunks

SHAPES = ((1, 2), (3, 1))
"""Heads and width of the keys and of the values of a layer: unequal, as in compressed attention."""


def cached(*rows: list[float]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Keys and values of two layers; layer l holds value + 100 l as key and its negative as value, padding 9999."""
    time = max(len(row) for row in rows)
    padded = [row + [9999.0] * (time - len(row)) for row in rows]
    numbers = torch.tensor(padded, dtype=torch.float32)[:, None, :, None]
    both = [sign * (numbers + 100 * layer) for layer in (0, 1) for sign in (1, -1)]
    shapes = itertools.cycle(SHAPES)
    tensors = [each.expand(-1, heads, -1, width) for each, (heads, width) in zip(both, shapes, strict=False)]
    return tensors, torch.tensor([len(row) for row in rows])


def step(slots: AlignedSlots, *numbers: float) -> list[list[float]]:
    """Write one number a row in both layers; what each row then sees of the second."""
    positions = slots.begin_step()
    visible = slots.visible()
    new = torch.tensor(numbers, dtype=torch.float32)[:, None, None, None]
    for layer in (0, 1):
        key, value = ((new + 100 * layer).expand(-1, h, 1, w) for h, w in SHAPES)
        keys, values = slots.write(layer, key, -value)
    slots.end_step()
    seen = [keys[row, 0, visible[row], 1].tolist() for row in range(slots.num_rows)]
    assert seen == [(-values[row, 2, visible[row], 0]).tolist() for row in range(slots.num_rows)]
    assert positions.tolist() == [len(row) - 1 for row in seen]
    assert visible[:, -1].all()  # all rows end in one column
    for row in visible:
        assert row.long().diff().ge(0).all()  # and nothing is missing between a row's first token and its last
    assert visible.any(dim=0).all()  # no column is read for nobody
    return [[number - 100 for number in row] for row in seen]


@pytest.mark.parametrize("block", [1, 2, 64])
def test_a_row_sees_its_own_tokens_in_order(block: int) -> None:
    slots = AlignedSlots(block=block)
    slots.add(*cached([1, 2, 3], [4]))
    assert step(slots, 5, 6) == [[1, 2, 3, 5], [4, 6]]
    slots.add(*cached([7, 8]))
    assert step(slots, 9, 10, 11) == [[1, 2, 3, 5, 9], [4, 6, 10], [7, 8, 11]]
    slots.move(torch.tensor([2]), torch.tensor([0]), 2)  # row 0 is done, row 2 takes its place
    assert step(slots, 12, 13) == [[7, 8, 11, 12], [4, 6, 10, 13]]
    slots.add(*cached([20, 21, 22, 23, 24, 25, 26]))  # longer than all that is there
    assert step(slots, 14, 15, 27) == [[7, 8, 11, 12, 14], [4, 6, 10, 13, 15], [20, 21, 22, 23, 24, 25, 26, 27]]
    slots.move(torch.tensor([], dtype=torch.long), torch.tensor([], dtype=torch.long), 0)
    slots.add(*cached([1], [2, 3]))
    assert step(slots, 4, 5) == [[1, 4], [2, 3, 5]]


@pytest.mark.parametrize("block", [1, 3, 64])
def test_whatever_comes_goes_and_moves(block: int) -> None:
    dice, slots, rows = np.random.default_rng(block), AlignedSlots(block=block), []
    numbers = itertools.count(1.0)
    for _ in range(150):
        if len(rows) < 5 and dice.random() < 0.4:
            new = [list(itertools.islice(numbers, int(dice.integers(1, 9)))) for _ in range(dice.integers(1, 3))]
            slots.add(*cached(*new))
            rows += new
        elif rows and dice.random() < 0.3:
            gone = int(dice.integers(len(rows)))
            last = len(rows) - 1
            moved = [last] if gone < last else []
            slots.move(
                torch.tensor(moved, dtype=torch.long), torch.tensor([gone][: len(moved)], dtype=torch.long), last
            )
            rows[gone] = rows[last]
            rows.pop()
        if rows:
            written = list(itertools.islice(numbers, len(rows)))
            for row, number in zip(rows, written, strict=True):
                row.append(number)
            assert step(slots, *written) == rows


def test_the_room_does_not_outgrow_the_longest_row_while_rows_come_and_go() -> None:
    slots = AlignedSlots(block=4)
    slots.add(*cached([1], [2]))
    for number in range(200):  # a row of one token takes the place of the older one every other step
        step(slots, number, number)
        if number % 2:
            slots.move(torch.tensor([1]), torch.tensor([0]), 1)
            slots.add(*cached([3]))
    assert slots.begin_step().max() <= 5
    assert slots.visible().shape[1] <= 6
    assert max(each.shape[2] for each in slots._storage) <= 12


def test_what_is_written_takes_the_type_of_what_is_cached() -> None:
    slots = AlignedSlots()
    keys, lengths = cached([1, 2])
    slots.add([each.bfloat16() for each in keys], lengths)
    slots.begin_step()
    written = [torch.full((1, heads, 1, width), 1.0) for heads, width in SHAPES]
    assert {each.dtype for each in slots.write(0, *written)} == {torch.bfloat16}


def test_without_a_cache_rows_are_their_tokens() -> None:
    rows = RowTokens()
    rows.add([torch.tensor([[1, 2, 0], [3, 4, 5]])], torch.tensor([2, 3]))
    rows.add([torch.tensor([[6]])], torch.tensor([1]))
    assert rows.rows == [(1, 2), (3, 4, 5), (6,)]
    rows.move(torch.tensor([2]), torch.tensor([0]), 2)
    assert rows.rows == [(6,), (3, 4, 5)]


def test_rows_of_like_length_go_through_the_model_together() -> None:
    lengths = (4, 3, 1, 40, 5, 1, 5)
    assert list(chunks(lengths, 20)) == [[2, 5], [1, 0, 4, 6], [3]]  # four rows of 5; 40 alone
    assert list(chunks(lengths, 15)) == [[2, 5], [1, 0, 4], [6], [3]]
    assert list(chunks((3, 6, 7), 100)) == [[0, 1], [2]]  # 7 beside 3 would be more padding than tokens
