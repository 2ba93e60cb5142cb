"""What is known of a token stays with the token, whichever columns there are: the fields of the record are the list."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.batch import Batch, CreditedGroups, TokenColumns, collate, completions_of
from posttrain.records import Group
from tests.support.tiny import written_group

COLUMNS = [field.name for field in fields(TokenColumns)]
LENGTHS = [[2, 1, 3], [4, 1, 2]]
NUM_TOKENS = 13


def numbered_groups() -> list[Group]:
    """Groups whose completion tokens are 0, 1, 2, ... throughout, each with a log μ that says the same."""
    tokens = iter(range(NUM_TOKENS))
    groups = [
        written_group((20 + i,), [[next(tokens) for _ in range(length)] for length in lengths], name=str(i), draw=i)
        for i, lengths in enumerate(LENGTHS)
    ]
    return [
        replace(group, rollouts=tuple(replace(r, logprobs=tuple(map(float, r.tokens))) for r in group.rollouts))
        for group in groups
    ]


def full_batch() -> Batch:
    """A batch with every column: of token n column k holds 100 k + n."""
    numbers = torch.arange(NUM_TOKENS, dtype=torch.float64)
    columns = TokenColumns(**{name: 100 * k + numbers for k, name in enumerate(COLUMNS)})
    return replace(completions_of(numbered_groups()), columns=columns)


def require_rows_together(batch: Batch) -> None:
    for k, name in enumerate(COLUMNS):
        torch.testing.assert_close(getattr(batch.columns, name), 100 * k + batch.tokens.double(), rtol=0, atol=0)


@given(rows=st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True))
def test_a_selection_takes_every_column_of_a_token_along(rows: list[int]) -> None:
    chosen = full_batch().select(rows)
    assert [min(completion) for completion in chosen.completions] == [(0, 2, 3, 6, 10, 11)[row] for row in rows]
    require_rows_together(chosen)


@given(budget=st.integers(2, 20))
def test_a_split_takes_every_column_of_a_token_along(budget: int) -> None:
    micro_batches = list(full_batch().split(budget))
    assert torch.cat([micro.tokens for micro in micro_batches]).tolist() == list(range(NUM_TOKENS))
    for micro in micro_batches:
        require_rows_together(micro)


def credited_groups() -> CreditedGroups:
    """Groups with all that is known per token: of token n column k holds 100 k + n, from 1 on."""
    numbers = torch.arange(NUM_TOKENS, dtype=torch.float64)
    names = [field.name for field in fields(CreditedGroups) if field.name not in ("groups", "scored")]
    columns = {name: 100 * (1 + names.index(name)) + numbers for name in names}
    return CreditedGroups(groups=numbered_groups(), scored=torch.ones(2, 3, dtype=torch.bool), **columns)


def one_for_each(lengths: torch.Tensor, scored: torch.Tensor, *, max_completion_tokens: int) -> torch.Tensor:
    """A weight that tells which completion it is of, from 1 on."""
    return torch.arange(1, len(lengths) + 1, dtype=torch.float64)


@pytest.mark.parametrize("rows", [[0, 1], [1, 0], [1]])
def test_a_batch_has_every_column_that_its_groups_have(rows: list[int]) -> None:
    credited = credited_groups().select(rows)
    # The first completion has no advantage, and is left out of every column.
    advantages = torch.where(
        torch.arange(len(credited.advantages)) < len(credited.groups[0].rollouts[0].tokens), 0.0, 1
    )
    credited = replace(credited, advantages=advantages * credited.advantages)
    batch = collate(credited, one_for_each, max_completion_tokens=9, keep_zero_advantages=False)
    left = [r.tokens for group in credited.groups for r in group.rollouts][1:]
    assert batch.completions == tuple(left)
    offsets = {"advantages": 100, "reference_logprobs": 200, "values": 300, "returns": 400, "behaviour_logprobs": 0}
    assert {*offsets, "weights"} == {*COLUMNS}
    for name, offset in offsets.items():
        torch.testing.assert_close(getattr(batch.columns, name), offset + batch.tokens.double(), rtol=0, atol=0)
    weights = torch.arange(2.0, len(left) + 2).repeat_interleave(torch.tensor([len(tokens) for tokens in left]))
    assert batch.columns.weights.tolist() == weights.tolist()


def test_a_batch_with_nothing_left_has_its_columns_all_the_same() -> None:
    credited = credited_groups()
    credited = replace(credited, advantages=torch.zeros_like(credited.advantages))
    batch = collate(credited, one_for_each, max_completion_tokens=9, keep_zero_advantages=False)
    assert [len(getattr(batch.columns, name)) for name in COLUMNS] == [0] * len(COLUMNS)


def test_a_change_is_made_in_every_column_that_is_there_and_in_no_other() -> None:
    batch = full_batch()
    doubled = batch.columns.map(lambda column: 2 * column)
    for k, name in enumerate(COLUMNS):
        assert getattr(doubled, name).tolist() == [2 * (100 * k + n) for n in range(NUM_TOKENS)]
        assert getattr(batch.columns, name).tolist() == [100 * k + n for n in range(NUM_TOKENS)]
    few = completions_of(numbered_groups()).columns.map(lambda column: column + 1)
    assert few.reference_logprobs is few.values is few.returns is None
    assert few.advantages.tolist() == [1] * NUM_TOKENS
