"""The caches of decoding: what is written for a row is what the row sees, whatever comes, goes and moves.

Keys and values of the shared-prompt pass; aligned rows of any model, which end in the newest column; rows without a
cache; and padded steps of fixed shapes, whose capture itself needs a GPU.
"""

import itertools
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from posttrain.generation import in_process as engines
from posttrain.generation.decoder_steps import KeyValueSlots, StaticSteps
from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.model_steps import AlignedSlots, RowTokens, chunks
from posttrain.models.loading.new_model import new_model, new_tokenizer
from posttrain.models.policy import Policy, as_policy
from posttrain.options.model import NewModelOptions
from posttrain.records import Prompt
from tests.support.tiny import request

SHAPES = True
SHAPES = ((1, 2), (3, 1))
"""Heads and width of the keys and of the values of an aligned layer: unequal, as in compressed attention."""
Slots = KeyValueSlots | AlignedSlots
NONE = torch.tensor([], dtype=torch.long)


def cached(slots: Slots, *rows: list[float]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Prefilled rows of two layers: layer l holds value + 100 l as key and its negative as value, padding 9999."""
    time = max(len(row) for row in rows)
    numbers = torch.tensor([row + [9999.0] * (time - len(row)) for row in rows], dtype=torch.float32)
    lengths = torch.tensor([len(row) for row in rows])
    if isinstance(slots, KeyValueSlots):
        layers = torch.stack([numbers, numbers + 100])[:, :, None, :, None]
        return [torch.stack([layers, -layers]).movedim(2, 0)], lengths
    both = [sign * (numbers[:, None, :, None] + 100 * layer) for layer in (0, 1) for sign in (1, -1)]
    shapes = itertools.cycle(SHAPES)
    return [each.expand(-1, heads, -1, width) for each, (heads, width) in zip(both, shapes, strict=False)], lengths


def step(slots: Slots, *numbers: float) -> list[list[float]]:
    """Write one number a row in both layers; what each row then sees of the second."""
    positions = slots.begin_step()
    visible = slots.visible()
    if isinstance(slots, KeyValueSlots):
        new = torch.tensor(numbers, dtype=torch.float32)[:, None, None]
        slots.write(0, new, -new)
        keys, values = slots.write(1, new + 100, -new - 100)
    else:
        new = torch.tensor(numbers, dtype=torch.float32)[:, None, None, None]
        for layer in (0, 1):
            key, value = ((new + 100 * layer).expand(-1, h, 1, w) for h, w in SHAPES)
            keys, values = slots.write(layer, key, -value)
    slots.end_step()
    seen = [keys[row, 0, visible[row], -1].tolist() for row in range(slots.num_rows)]
    assert seen == [(-values[row, -1, visible[row], 0]).tolist() for row in range(slots.num_rows)]
    if isinstance(slots, AlignedSlots):
        assert positions.tolist() == [len(row) - 1 for row in seen]
        assert visible[:, -1].all(), "all rows end in one column"
        assert visible.long().diff(dim=1).ge(0).all(), "nothing is missing between a row's first token and its last"
        assert visible.any(dim=0).all(), "no column is read for nobody"
    return [[number - 100 for number in row] for row in seen]


@pytest.mark.parametrize("block", [1, 2, 64])
@pytest.mark.parametrize(
    "made", [KeyValueSlots, lambda block: KeyValueSlots(block=block, round_rows=True), AlignedSlots]
)
def test_a_row_sees_its_own_tokens_in_order(made: Callable[..., Slots], block: int) -> None:
    slots = made(block=block)
    slots.add(*cached(slots, [1, 2, 3], [4]))
    assert step(slots, 5, 6) == [[1, 2, 3, 5], [4, 6]]
    slots.add(*cached(slots, [7, 8]))
    assert step(slots, 9, 10, 11) == [[1, 2, 3, 5, 9], [4, 6, 10], [7, 8, 11]]
    slots.move(torch.tensor([2]), torch.tensor([0]), 2)  # row 0 is done, row 2 takes its place
    assert step(slots, 12, 13) == [[7, 8, 11, 12], [4, 6, 10, 13]]
    slots.add(*cached(slots, [20, 21, 22, 23, 24, 25, 26]))  # longer than all that is there
    assert step(slots, 14, 15, 27) == [[7, 8, 11, 12, 14], [4, 6, 10, 13, 15], [20, 21, 22, 23, 24, 25, 26, 27]]
    slots.move(NONE, NONE, 1)
    slots.add(*cached(slots, [14]))  # where longer rows have been
    assert step(slots, 15, 16) == [[7, 8, 11, 12, 14, 15], [14, 16]]


@pytest.mark.parametrize("block", [1, 3, 64])
@pytest.mark.parametrize("made", [KeyValueSlots, AlignedSlots])
def test_whatever_comes_goes_and_moves(made: Callable[..., Slots], block: int) -> None:
    dice, slots, rows = np.random.default_rng(block), made(block=block), []
    numbers = itertools.count(1.0)
    for _ in range(150):
        if len(rows) < 5 and dice.random() < 0.4:
            new = [list(itertools.islice(numbers, int(dice.integers(1, 9)))) for _ in range(dice.integers(1, 3))]
            slots.add(*cached(slots, *new))
            rows += new
        elif len(rows) > 1 and dice.random() < 0.3:
            gone, last = int(dice.integers(len(rows))), len(rows) - 1
            moved = (torch.tensor([last]), torch.tensor([gone])) if gone < last else (NONE, NONE)
            slots.move(*moved, last)
            rows[gone] = rows[last]
            rows.pop()
        if rows:
            written = list(itertools.islice(numbers, len(rows)))
            for row, number in zip(rows, written, strict=True):
                row.append(number)
            assert step(slots, *written) == rows


def test_rows_can_leave_all_together_and_others_begin() -> None:
    slots = KeyValueSlots(block=2)
    slots.add(*cached(slots, [1, 2, 3, 4, 5]))
    slots.clear()
    slots.add(*cached(slots, [6], [7, 8]))
    assert step(slots, 9, 10) == [[6, 9], [7, 8, 10]]
    aligned = AlignedSlots(block=2)
    aligned.add(*cached(aligned, [1, 2, 3, 4, 5]))
    aligned.move(NONE, NONE, 0)
    aligned.add(*cached(aligned, [6], [7, 8]))
    assert step(aligned, 9, 10) == [[6, 9], [7, 8, 10]]


def test_padding_may_be_wider_than_any_row_that_is_added() -> None:
    # The longest prompt of a prefill may have come and gone before the last row of a shorter one is added.
    slots = KeyValueSlots(block=2)
    (keys,), lengths = cached(slots, [1, 2, 3, 4, 5], [6])
    slots.add([keys[1:]], lengths[1:])
    assert step(slots, 7) == [[6, 7]]


def test_room_for_few_shapes_comes_in_powers_of_two_and_never_shrinks() -> None:
    slots = KeyValueSlots(block=2, round_rows=True)
    slots.add(*cached(slots, [1], [2], [3]))
    assert slots.room[0] == 4
    slots.move(NONE, NONE, 1)
    for number in range(3):
        step(slots, number)  # one row of four is left, and outgrows its two tokens
    assert slots.room == (4, 4)
    place = [layer.data_ptr() for layer in slots.layers], slots.times_moved
    slots.clear()
    slots.add(*cached(slots, [5], [6], [7], [8]))
    assert step(slots, 9, 10, 11, 12) == [[5, 9], [6, 10], [7, 11], [8, 12]]
    assert ([layer.data_ptr() for layer in slots.layers], slots.times_moved) == place
    slots.add(*cached(slots, [4]))
    assert slots.room[0] == 8


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
    slots.add([torch.ones(3, 2, 5, 1, 4, 1)], torch.full((3,), 4))  # five layers
    assert held == [1, 2, 3, 4, 5]
    for _ in range(2):
        slots.begin_step()
        slots.end_step()
    assert held[5:] == [6] * 5  # five, and the one that is being replaced
    assert slots.times_moved == 2  # the room that was there for a first token was enough for it


def test_whoever_holds_the_layers_sees_them_after_they_have_grown() -> None:
    slots = KeyValueSlots(block=2)
    slots.add(*cached(slots, [1, 2]))
    layers, before = slots.layers, slots.times_moved
    for number in (3, 4, 5):
        step(slots, number)
    assert slots.times_moved > before
    assert layers[1][0, 0, 0, :5, 0].tolist() == [101, 102, 103, 104, 105]


def test_aligned_room_does_not_outgrow_the_longest_row_while_rows_come_and_go() -> None:
    slots = AlignedSlots(block=4)
    slots.add(*cached(slots, [1], [2]))
    for number in range(200):  # a row of one token takes the place of the older one every other step
        step(slots, number, number)
        if number % 2:
            slots.move(torch.tensor([1]), torch.tensor([0]), 1)
            slots.add(*cached(slots, [3]))
    assert slots.begin_step().max() <= 5
    assert slots.visible().shape[1] <= 6
    assert max(each.shape[2] for each in slots._storage) <= 12


def test_what_is_written_takes_the_type_of_what_is_cached() -> None:
    slots = AlignedSlots()
    keys, lengths = cached(slots, [1, 2])
    slots.add([each.bfloat16() for each in keys], lengths)
    slots.begin_step()
    written = [torch.full((1, heads, 1, width), 1.0) for heads, width in SHAPES]
    assert {each.dtype for each in slots.write(0, *written)} == {torch.bfloat16}


def test_without_a_cache_rows_are_their_tokens_and_those_of_like_length_go_through_the_model_together() -> None:
    rows = RowTokens()
    rows.add([torch.tensor([[1, 2, 0], [3, 4, 5]])], torch.tensor([2, 3]))
    rows.add([torch.tensor([[6]])], torch.tensor([1]))
    assert rows.rows == [(1, 2), (3, 4, 5), (6,)]
    rows.move(torch.tensor([2]), torch.tensor([0]), 2)
    assert rows.rows == [(6,), (3, 4, 5)]
    lengths = (4, 3, 1, 40, 5, 1, 5)
    assert list(chunks(lengths, 20)) == [[2, 5], [1, 0, 4, 6], [3]]  # four rows of 5; 40 alone
    assert list(chunks(lengths, 15)) == [[2, 5], [1, 0, 4], [6], [3]]
    assert list(chunks((3, 6, 7), 100)) == [[0, 1], [2]]  # 7 beside 3 would be more padding than tokens


def sharp_policy(device: str = "cpu") -> Policy:
    """Far from uniform, so that a wrong cache changes tokens."""
    shape = NewModelOptions(hidden_size=16, mlp_size=24, num_layers=2, num_heads=2, num_kv_heads=1, max_positions=600)
    tokenizer = new_tokenizer()
    model = new_model(shape, tokenizer, seed=0).double()
    for parameter in model.parameters():
        parameter.data.mul_(8)
    return as_policy(model.to(device), tokenizer)


def sampled(policy: Policy, *, max_rows: int) -> list[tuple[int, ...]]:
    """From prompts of up to 240 tokens: completions cross the 256-token width of the first shape."""
    prompts = [
        Prompt(id=str(i), text="", tokens=tuple((7 * i + j) % 300 + 5 for j in range(length)))
        for i, length in enumerate((3, 240, 9, 1, 30))
    ]
    groups = sample_groups(InProcessEngine(policy, max_rows=max_rows), prompts, request(3, 40))
    return [rollout.tokens for group in groups for rollout in group.rollouts]


class WarmedUp(StaticSteps):
    """Runs a step twice before it is first used, as a capture does; the cache must be left as the step leaves it."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.prepare = lambda compute: [compute(), compute()] and compute


@pytest.mark.parametrize("steps", [StaticSteps, WarmedUp])
@pytest.mark.parametrize("max_rows", [15, 4])
def test_padded_steps_of_fixed_shapes_sample_the_same_completions(max_rows, steps, monkeypatch):
    policy = sharp_policy()
    expected = sampled(policy, max_rows=max_rows)
    monkeypatch.setattr(engines, "steps_for", steps)
    assert sampled(policy, max_rows=max_rows) == expected


@pytest.mark.gpu
def test_captured_steps_sample_what_the_cpu_samples():
    torch.backends.cuda.matmul.allow_tf32 = False
    assert sampled(sharp_policy("cuda"), max_rows=15) == sampled(sharp_policy(), max_rows=15)
