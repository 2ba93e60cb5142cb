"""A batch: weights fixed on all rollouts, then what cannot matter left out, then split as memory asks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.losses import mean_over_tokens
from posttrain.algorithms.table import build_algorithm
from posttrain.batch import Batch, CreditedGroups, completions_of, sampled_columns
from posttrain.models.forward import PlainForward
from posttrain.models.policy import Policy
from posttrain.options.training import UpdateOptions
from posttrain.records import Group
from posttrain.training.update import Objective, group_logprobs, token_view, update
from tests.support import tiny
from tests.support.tiny import batch_of, gradient_of_update, through_its_own_forward, tiny_policy, written_group

ALGORITHM = build_algorithm({"name": "dapo"})  # mean_over_tokens: 1 / number of tokens

# Two groups of three; 2 + 1 + 3 and 4 + 1 + 2 tokens, 13 in all.
GROUPS = [
    written_group((1, 2, 3), [(4, 5), (6,), (7, 8, 9)], name="a"),
    written_group((10,), [(11, 12, 13, 14), (15,), (16, 17)], name="b", draw=1),
]


def rows_of(batch: Batch) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[str, int], list[float], list[float]]]:
    """Everything about each completion: its prompt, tokens, name, and its tokens' advantages and behaviour."""
    rows, start = [], 0
    for completion, prompt, name in zip(batch.completions, batch.prompt_of, batch.names, strict=True):
        here = slice(start, start + len(completion))
        assert tuple(batch.tokens[here].tolist()) == completion
        assert len(set(batch.rollout[here].tolist())) == 1
        start = here.stop
        columns = (batch.columns.advantages[here].tolist(), batch.columns.behaviour_logprobs[here].tolist())
        rows.append((batch.prompts[prompt], completion, name, *columns))
    assert start == len(batch.tokens)
    assert batch.rollout.unique_consecutive().tolist() == list(range(len(rows)))
    return rows


def test_every_token_carries_what_its_rollout_was_given() -> None:
    batch = batch_of(GROUPS, [[1, 2, 3], [4, 5, 6]], ALGORITHM, reference_logprobs=torch.arange(13.0).double())
    assert rows_of(batch) == [
        ((1, 2, 3), (4, 5), ("a", 0), [1, 1], [-1, -1.1]),
        ((1, 2, 3), (6,), ("a", 1), [2], [-1]),
        ((1, 2, 3), (7, 8, 9), ("a", 2), [3, 3, 3], [-1, -1.1, -1.2]),
        ((10,), (11, 12, 13, 14), ("b", 0), [4, 4, 4, 4], [-1, -1.1, -1.2, -1.3]),
        ((10,), (15,), ("b", 1), [5], [-1]),
        ((10,), (16, 17), ("b", 2), [6, 6], [-1, -1.1]),
    ]
    assert batch.prompts == ((1, 2, 3), (10,))
    assert batch.columns.weights.tolist() == [1 / 13] * 13
    assert batch.columns.reference_logprobs.tolist() == list(range(13))


def test_rollouts_without_advantage_are_left_out_and_the_others_keep_their_weights_and_reference() -> None:
    reference = torch.arange(13.0).double()
    batch = batch_of(GROUPS, [[0, 2, 0], [0, 0, -1]], ALGORITHM, reference_logprobs=reference)
    kept = [(name, advantages) for _, _, name, advantages, _ in rows_of(batch)]
    assert kept == [(("a", 1), [2]), (("b", 2), [-1] * 2)]
    assert batch.columns.weights.tolist() == [1 / 13] * 3
    assert batch.columns.reference_logprobs.tolist() == [2, 11, 12]


def test_another_term_of_the_loss_keeps_rollouts_without_advantage() -> None:
    with_kl = build_algorithm({"name": "dapo", "kl": {"coefficient": 0.1}})
    assert len(batch_of(GROUPS, [[0, 2, 0], [0, 0, -1]], with_kl).completions) == 6


@pytest.mark.parametrize("keep", [False, True])
def test_unscored_rollouts_have_no_weight_and_are_not_counted(keep: bool) -> None:
    scored = torch.tensor([[True, True, False], [True, False, True]])
    batch = batch_of(GROUPS, [[1, 2, 0], [3, 0, 4]], ALGORITHM, scored=scored, keep_zero_advantages=keep)
    assert batch.names == (("a", 0), ("a", 1), ("b", 0), ("b", 2))
    assert batch.columns.weights.tolist() == [1 / 9] * 9  # 2 + 1 + 4 + 2


def test_without_any_advantage_nothing_is_left() -> None:
    batch = batch_of(GROUPS, [[0, 0, 0], [0, 0, 0]], ALGORITHM)
    assert batch.completions == batch.prompts == ()
    assert len(batch.tokens) == len(batch.columns.weights) == 0
    assert list(batch.split(100)) == []


@pytest.mark.parametrize("name", ["grpo", "gspo", "dapo", "dr_grpo", "cispo", "rloo"])
def test_leaving_out_what_has_no_advantage_changes_no_gradient(name: str) -> None:
    algorithm, policy = build_algorithm({"name": name}), tiny_policy()
    advantages = [[0.5, 0, -0.5], [0, 0, 0]]
    objective = Objective(algorithm=algorithm, temperature=1.0)
    batches = [batch_of(GROUPS, advantages, algorithm, **more) for more in ({}, {"keep_zero_advantages": True})]
    (less, few), (more, all_of) = (gradient_of_update(policy, batch, objective) for batch in batches)
    assert (few["tokens/trained"], all_of["tokens/trained"]) == (5, 13)
    assert few["loss"] == pytest.approx(all_of["loss"], abs=1e-12)
    assert less.norm() > 1e-3
    assert tiny.relative_distance(less, more) <= 1e-12


FEW = st.integers(1, 9)
# Of each group: tokens of its prompt, and of its completions; all groups are of one size.
LENGTHS = st.integers(1, 4).flatmap(
    lambda n: st.lists(st.tuples(FEW, st.lists(FEW, min_size=n, max_size=n)), min_size=1, max_size=4)
)


def batch_of_lengths(lengths: list[tuple[int, list[int]]]) -> tuple[list[Group], Batch]:
    """Groups with prompts and completions of these lengths, and the batch that they make."""
    groups = [
        written_group(range(prompt), [[i] * length for i, length in enumerate(completions)], name=str(draw), draw=draw)
        for draw, (prompt, completions) in enumerate(lengths)
    ]
    size = len(groups[0].rollouts)
    advantages = torch.arange(1.0, len(groups) * size + 1).view(-1, size).tolist()
    return groups, batch_of(groups, advantages, ALGORITHM)


@given(lengths=LENGTHS, budget=st.integers(2, 40))
def test_micro_batches_hold_every_completion_once_within_the_budget(lengths, budget) -> None:
    groups, batch = batch_of_lengths(lengths)
    micro_batches = list(batch.split(budget))
    assert [row for micro in micro_batches for row in rows_of(micro)] == rows_of(batch)
    assert torch.equal(torch.cat([micro.columns.weights for micro in micro_batches]), batch.columns.weights)
    for micro in micro_batches:
        cost = sum(map(len, micro.prompts)) + len(micro.tokens)
        assert cost <= budget or len(micro.completions) == 1  # one that is too long stands alone
    # A group is in two micro-batches only where it does not fit into one.
    for group in groups:
        holders = [micro for micro in micro_batches if any(owner == group.prompt.id for owner, _ in micro.names)]
        cost = len(group.prompt.tokens) + sum(len(rollout.tokens) for rollout in group.rollouts)
        assert len(holders) == 1 or cost > budget


@given(lengths=LENGTHS, budget=st.integers(2, 40))
def test_padded_micro_batches_count_every_prompt_and_the_padding(lengths, budget: int) -> None:
    _, batch = batch_of_lengths(lengths)
    micro_batches = list(batch.split(budget, padded=True))
    assert [row for micro in micro_batches for row in rows_of(micro)] == rows_of(batch)
    for micro in micro_batches:
        widest = max(len(prompt) + len(tokens) for prompt, tokens, *_ in rows_of(micro))
        assert widest * len(micro.completions) <= budget or len(micro.completions) == 1


@pytest.mark.parametrize(
    ("padded", "sizes"),
    [
        # Prompt and completions: 3 + 6 and 1 + 7 tokens.
        # 8: of group a 3 + 2 + 1, then 3 + 3; b fits whole.  5: 3 + 2 | 3 + 1 | 3 + 3 | 1 + 4 | 1 + 1 + 2
        (False, {17: [6], 16: [3, 3], 9: [3, 3], 8: [2, 1, 3], 5: [1, 1, 1, 1, 2]}),
        # Rows of 5, 4, 6 and 5, 2, 3 tokens.
        # 17: 5 + 4 as two of 5, and a third of 6 would make 18; then 6 + 5 as two of 6; 2 + 3.
        # 10: two of 5; 6 alone; two of 5; 3.
        (True, {36: [6], 18: [3, 3], 17: [2, 2, 2], 10: [2, 1, 2, 1], 6: [1, 1, 1, 1, 2]}),
    ],
)
def test_micro_batches_are_filled_before_the_next_is_begun(padded: bool, sizes: dict[int, list[int]]) -> None:
    batch = batch_of(GROUPS, [[1, 2, 3], [4, 5, 6]], ALGORITHM)
    made = {budget: [len(micro.completions) for micro in batch.split(budget, padded=padded)] for budget in sizes}
    assert made == sizes


def test_some_completions_keep_their_prompts_in_order_and_all_begin_without_a_weight() -> None:
    groups = [written_group((draw, 9), [(1,), (2,)], name=str(draw), draw=draw) for draw in range(17)]
    whole = completions_of(groups)
    chosen = whole.select([2, 3, 17, 32])  # of prompts 1, 8 and 16, which a set of numbers gives in another order
    assert chosen.prompts == ((1, 9), (8, 9), (16, 9))
    assert chosen.prompt_of == (0, 0, 1, 2)
    for column in (whole.columns.advantages, whole.columns.weights):
        assert column.tolist() == [0.0] * 34


class CountedForward(PlainForward):
    """Notes how many tokens go through the model at a time."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.model, policy.compute_dtype)
        self.sizes: list[int] = []

    def completion_hidden(self, *given: Any) -> torch.Tensor:
        handle = self.model.model.embed_tokens.register_forward_hook(
            lambda module, tokens, out: self.sizes.append(tokens[0].numel())
        )
        try:
            return super().completion_hidden(*given)
        finally:
            handle.remove()


def test_the_models_own_pass_keeps_to_the_budget_with_long_prompts() -> None:
    """Prompts of 20 and three completions of up to 4: a group is 20 + 7 tokens where it is shared, 72 here."""
    policy = through_its_own_forward(tiny_policy())
    forward = CountedForward(policy)
    policy = replace(policy, forward=forward)
    groups = [written_group(range(20), [(1, 2, 3, 4), (5,), (6, 7)], name=str(draw), draw=draw) for draw in range(2)]
    batch = batch_of(groups, [[1, 2, 3]] * 2, ALGORITHM)
    objective = Objective(algorithm=ALGORITHM, temperature=1.0)
    optimizer, options = torch.optim.SGD(policy.model.parameters(), lr=0.0), UpdateOptions(tokens_per_microbatch=48)
    for reading in (
        lambda: [token_view(policy, micro, objective) for micro in batch.split(48, padded=policy.forward.padded)],
        lambda: group_logprobs(policy, groups, temperature=1.0, max_tokens=48),
        lambda: update(policy, optimizer, batch, objective, options, 0.0),
    ):
        forward.sizes.clear()
        reading()
        assert forward.sizes == [2 * 23, 2 * 23, 2 * 21]  # the last token of a completion predicts nothing


@pytest.mark.parametrize("name", ["grpo", "gspo", "dapo"])
@pytest.mark.parametrize("budget", [16, 8, 5, 2])
@pytest.mark.parametrize("own_forward", [False, True])
def test_how_a_batch_is_split_changes_no_gradient(name: str, budget: int, own_forward: bool) -> None:
    algorithm, policy = build_algorithm({"name": name}), tiny_policy()
    policy = through_its_own_forward(policy) if own_forward else policy
    batch = batch_of(GROUPS, [[1, -2, 3], [-4, 5, 6]], algorithm)
    objective = Objective(algorithm=algorithm, temperature=0.8)
    whole, one = gradient_of_update(policy, batch, objective)
    split, several = gradient_of_update(tiny.twin(policy), batch, objective, tokens_per_microbatch=budget)
    assert several["num_micro_batches"] > one["num_micro_batches"] == 1
    assert several["loss"] == pytest.approx(one["loss"], abs=1e-12)
    assert tiny.relative_distance(split, whole) <= 1e-12


def test_some_groups_take_their_reference_with_them() -> None:
    columns = replace(
        sampled_columns(GROUPS),
        advantages=torch.tensor([1.0, 1, 2, 3, 3, 3, 4, 4, 4, 4, 5, 6, 6]).double(),
        known={"reference_logprobs": torch.arange(13.0).double()},
    )
    scored = torch.tensor([[True, True, True], [True, False, True]])
    chosen = CreditedGroups(groups=GROUPS, scored=scored, columns=columns).select([1, 0])
    assert [group.prompt.id for group in chosen.groups] == ["b", "a"]
    assert chosen.columns.advantages.tolist() == [4, 4, 4, 4, 5, 6, 6, 1, 1, 2, 3, 3, 3]
    assert chosen.scored.tolist() == [[True, False, True], [True, True, True]]
    assert chosen.columns.reference_logprobs.tolist() == [6, 7, 8, 9, 10, 11, 12, 0, 1, 2, 3, 4, 5]


def test_the_weights_are_those_of_all_rollouts_of_the_update() -> None:
    # The rule sees every rollout, also those that are about to be left out.
    seen: list[list[int]] = []

    def watching(lengths: torch.Tensor, scored: torch.Tensor, *, max_completion_tokens: int) -> torch.Tensor:
        seen.append(lengths.tolist())
        return mean_over_tokens(lengths, scored, max_completion_tokens=max_completion_tokens)

    fields = {name: getattr(ALGORITHM, name) for name in Algorithm.__dataclass_fields__}
    batch_of(GROUPS, [[0, 2, 0], [0, 0, -1]], Algorithm(**{**fields, "token_weights": watching}))
    assert seen == [[2, 1, 3, 4, 1, 2]]
