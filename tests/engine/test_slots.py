"""The cache of keys and values: what is written for a row is what the row sees, whatever comes, goes and moves."""

import weakref

import pytest
import torch

from posttrain.generation.decoder_steps import KeyValueSlots

LAYERS, KV_HEADS, WIDTH = 2, 1, 1


def cached(*rows: list[float]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Prefilled rows: layer l holds value + 100 l as key and its negative as value; padding is NaN."""
    time = max(len(row) for row in rows)
    keys = torch.tensor([row + [torch.nan] * (time - len(row)) for row in rows], dtype=torch.float32)
    layers = torch.stack([keys, keys + 100])[:, :, None, :, None]
    return [torch.stack([layers, -layers]).movedim(2, 0)], torch.tensor([len(row) for row in rows])


def step(slots: KeyValueSlots, *numbers: float) -> list[list[float]]:
    """Write one number a row, in every layer; what each row then sees of layer 1."""
    slots.begin_step()
    visible = slots.visible()
    new = torch.tensor(numbers, dtype=torch.float32)[:, None, None]
    slots.write(0, new, -new)
    keys, values = slots.write(1, new + 100, -new - 100)
    slots.end_step()
    seen = [keys[row, 0, visible[row], 0].tolist() for row in range(slots.num_rows)]
    assert seen == [(-values[row, 0, visible[row], 0]).tolist() for row in range(slots.num_rows)]
    return [[number - 100 for number in row] for row in seen]


@pytest.mark.parametrize("block", [1, 2, 64])
@pytest.mark.parametrize("round_rows", [False, True])
def test_a_row_sees_its_own_tokens_in_order(block: int, round_rows: bool) -> None:
    slots = KeyValueSlots(block=block, round_rows=round_rows)
    slots.add(*cached([1, 2, 3], [4]))
    assert step(slots, 5, 6) == [[1, 2, 3, 5], [4, 6]]
    slots.add(*cached([7, 8]))
    assert step(slots, 9, 10, 11) == [[1, 2, 3, 5, 9], [4, 6, 10], [7, 8, 11]]
    slots.move(torch.tensor([2]), torch.tensor([0]), 2)  # row 0 is done, row 2 takes its place
    assert step(slots, 12, 13) == [[7, 8, 11, 12], [4, 6, 10, 13]]
    slots.move(torch.tensor([], dtype=torch.long), torch.tensor([], dtype=torch.long), 1)
    slots.add(*cached([14]))  # where longer rows have been
    assert step(slots, 15, 16) == [[7, 8, 11, 12, 15], [14, 16]]


def test_rows_can_leave_all_together_and_others_begin() -> None:
    slots = KeyValueSlots(block=2)
    slots.add(*cached([1, 2, 3, 4, 5]))
    slots.clear()
    slots.add(*cached([6], [7, 8]))
    assert step(slots, 9, 10) == [[6, 9], [7, 8, 10]]


def test_padding_may_be_wider_than_any_row_that_is_added() -> None:
    # The longest prompt of a prefill may have come and gone before the last row of a shorter one is added.
    slots = KeyValueSlots(block=2)
    (keys,), lengths = cached([1, 2, 3, 4, 5], [6])
    slots.add([keys[1:]], lengths[1:])
    assert step(slots, 7) == [[6, 7]]


def test_room_for_rows_comes_in_powers_of_two_where_shapes_are_to_be_few() -> None:
    slots = KeyValueSlots(round_rows=True)
    slots.add(*cached([1], [2], [3]))
    assert slots.room[0] == 4
    slots.add(*cached([4], [5]))
    assert slots.room[0] == 8


def test_room_that_is_to_stay_where_it_is_never_shrinks() -> None:
    slots = KeyValueSlots(block=2, round_rows=True)
    slots.add(*cached([1], [2], [3], [4]))
    slots.move(torch.tensor([], dtype=torch.long), torch.tensor([], dtype=torch.long), 1)
    for number in range(3):
        step(slots, number)  # one row of four is left, and outgrows its two tokens
    assert slots.room == (4, 4)
    place = [layer.data_ptr() for layer in slots.layers], slots.times_moved
    slots.clear()
    slots.add(*cached([5], [6], [7], [8]))
    assert step(slots, 9, 10, 11, 12) == [[5, 9], [6, 10], [7, 11], [8, 12]]
    assert slots.room == (4, 4)
    assert ([layer.data_ptr() for layer in slots.layers], slots.times_moved) == place


def test_room_grows_a_layer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the whole cache would be held twice."""
    made: list[weakref.ref[torch.Tensor]] = []
    held: list[int] = []
    new_zeros = torch.Tensor.new_zeros

    def counted(self: torch.Tensor, *size: int) -> torch.Tensor:
        room = new_zeros(self, *size)
        made.append(weakref.ref(room))
        held.append(sum(each() is not None for each in made))
        return room

    monkeypatch.setattr(torch.Tensor, "new_zeros", counted)
    slots = KeyValueSlots(block=1)
    five = [torch.ones(3, 2, 5, 1, 4, 1)], torch.full((3,), 4)  # five layers
    slots.add(*five)
    assert held == [1, 2, 3, 4, 5]
    for _ in range(2):
        slots.begin_step()
        slots.end_step()
    assert held[5:] == [6] * 5  # five, and the one that is being replaced
    assert slots.times_moved == 2  # the room that was there for a first token was enough for it


def test_whoever_holds_the_layers_sees_them_after_they_have_grown() -> None:
    slots = KeyValueSlots(block=2)
    slots.add(*cached([1, 2]))
    layers, before = slots.layers, slots.times_moved
    for number in (3, 4, 5):
        step(slots, number)
    assert slots.times_moved > before
    assert layers[1][0, 0, 0, :5, 0].tolist() == [101, 102, 103, 104, 105]
