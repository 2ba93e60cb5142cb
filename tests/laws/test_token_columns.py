"""What is known of a token stays with the token, whichever columns there are: the fields of the record are the list."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from posttrain.algorithms.table import build_algorithm
from posttrain.algorithms.terms import LossTerm, TokenView
from posttrain.batch import Batch, CreditedGroups, TokenColumns, collate, completions_of
from posttrain.needs import Need
from posttrain.records import Group
from posttrain.training.update import Objective
from tests.support.sequences import resampled
from tests.support.tiny import gradient_of_update, tiny_policy, written_group

FIELDS = ["advantages", "weights", "behaviour_logprobs", "value_range"]
COLUMNS = [*FIELDS, "reference_logprobs", "returns", "of_another_kind"]
"""The last is one that the package does not know: nothing is declared of it."""
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
        replace(group, rollouts=tuple(resampled(r, logprobs=tuple(map(float, r.tokens))) for r in group.rollouts))
        for group in groups
    ]


def numbered_columns() -> TokenColumns:
    """Of token n column k holds 100 k + n."""
    numbers = torch.arange(NUM_TOKENS, dtype=torch.float64)
    every = {name: 100 * k + numbers for k, name in enumerate(COLUMNS)}
    return TokenColumns(**{name: every.pop(name) for name in FIELDS}, known=every)


def full_batch() -> Batch:
    return replace(completions_of(numbered_groups()), columns=numbered_columns())


def require_rows_together(batch: Batch) -> None:
    for k, name in enumerate(COLUMNS):
        torch.testing.assert_close(batch.columns.named()[name], 100 * k + batch.tokens.double(), rtol=0, atol=0)


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


def credited_groups(advantages: Tensor | None = None) -> CreditedGroups:
    columns = numbered_columns()
    columns = columns if advantages is None else replace(columns, advantages=advantages)
    return CreditedGroups(groups=numbered_groups(), scored=torch.ones(2, 3, dtype=torch.bool), columns=columns)


def collated(credited: CreditedGroups) -> Batch:
    """A batch whose weights tell which completion they are of, from 1 on."""

    def one_for_each(lengths: Tensor, scored: Tensor, *, max_completion_tokens: int) -> Tensor:
        return torch.arange(1, len(lengths) + 1, dtype=torch.float64)

    return collate(credited, one_for_each, max_completion_tokens=9, keep_zero_advantages=False)


@pytest.mark.parametrize("rows", [[0, 1], [1, 0], [1]])
def test_a_batch_has_every_column_that_its_groups_have(rows: list[int]) -> None:
    credited = credited_groups().select(rows)
    # The first completion has no advantage, and is left out of every column.
    advantages = credited.columns.advantages + 1000
    advantages[: len(credited.groups[0].rollouts[0].tokens)] = 0
    batch = collated(replace(credited, columns=replace(credited.columns, advantages=advantages)))
    left = [r.tokens for group in credited.groups for r in group.rollouts][1:]
    assert batch.completions == tuple(left)
    weights = torch.arange(2.0, len(left) + 2).repeat_interleave(torch.tensor([len(tokens) for tokens in left]))
    assert batch.columns.weights.tolist() == weights.tolist()
    for k, name in enumerate(COLUMNS):
        if name != "weights":
            offset = 100 * k + (1000 if name == "advantages" else 0)
            torch.testing.assert_close(batch.columns.named()[name], offset + batch.tokens.double(), rtol=0, atol=0)


def test_a_batch_with_nothing_left_has_its_columns_all_the_same() -> None:
    batch = collated(credited_groups(torch.zeros(NUM_TOKENS, dtype=torch.float64)))
    assert [len(batch.columns.named()[name]) for name in COLUMNS] == [0] * len(COLUMNS)


@pytest.mark.parametrize("budget", [100, 8])
def test_a_term_sees_every_column_in_the_precision_and_on_the_device_of_its_log_probs(budget: int) -> None:
    seen: list[TokenColumns] = []

    def watching(view: TokenView) -> Tensor:
        seen.append(view.columns)
        return view.logprobs

    terms = (LossTerm(name="watching", per_token=watching, needs=frozenset({Need.REFERENCE_LOGPROBS}), reported=False),)
    algorithm, policy = replace(build_algorithm({"name": "dapo"}), terms=terms), tiny_policy(dtype=torch.float32)
    batch = collated(credited_groups())
    batch = replace(batch, columns=batch.columns.map(lambda column: column / 1000))  # ratios that float32 can hold
    gradient_of_update(policy, batch, Objective(algorithm=algorithm, temperature=1.0), tokens_per_microbatch=budget)
    assert (len(seen) > 1) == (budget == 8)
    for name in COLUMNS:
        parts = [columns.named()[name] for columns in seen]
        assert {part.dtype for part in parts} == {torch.float32}
        assert torch.equal(torch.cat(parts), batch.columns.named()[name].float())
    moved = batch.columns.map(lambda column: column.to("meta"))
    assert {moved.named()[name].device.type for name in COLUMNS} == {"meta"}


@given(advantages=st.lists(st.sampled_from([0.0, 0.0, 0.5, -0.5]), min_size=NUM_TOKENS, max_size=NUM_TOKENS))
def test_a_rollout_is_informed_by_any_of_its_tokens_even_where_they_add_up_to_nothing(advantages: list[float]) -> None:
    credited = credited_groups(torch.tensor(advantages, dtype=torch.float64))
    numbers = iter(advantages)
    parts = [[[next(numbers) for _ in range(length)] for length in lengths] for lengths in LENGTHS]
    expected = [[any(part) for part in group] for group in parts]
    assert credited.informed.tolist() == expected
    assert len(collated(credited).completions) == sum(map(sum, expected))


def test_a_change_is_made_in_every_column_that_is_there_and_in_no_other() -> None:
    batch = full_batch()
    doubled = batch.columns.map(lambda column: 2 * column)
    for k, name in enumerate(COLUMNS):
        assert doubled.named()[name].tolist() == [2 * (100 * k + n) for n in range(NUM_TOKENS)]
        assert batch.columns.named()[name].tolist() == [100 * k + n for n in range(NUM_TOKENS)]
    few = completions_of(numbered_groups()).columns.map(lambda column: column + 1)
    assert (few.value_range, few.known) == (None, {})
    assert few.advantages.tolist() == [1] * NUM_TOKENS
