"""Supervised learning: the mean loss over completion tokens and its gradient, however the examples are batched."""

from collections.abc import Sequence

import pytest
import torch

from posttrain.models.conversation_masks import answered
from posttrain.models.forward import PlainForward
from posttrain.models.policy import Policy
from posttrain.records import Example, TokenSequence
from posttrain.training.sft.sft_run import accumulate_examples, held_out_loss, learned_tokens, microbatches
from tests.support.tiny import (
    flat_gradient,
    plain_logprobs,
    relative_distance,
    through_its_own_forward,
    tiny_policy,
    twin,
)

PARTS = [
    ((1, 2, 3), (4, 5)),
    ((6,), (7, 8, 9, 10, 5)),
    ((11, 12, 13, 14, 15, 16), (11,)),
    ((2, 3), (17, 18, 5)),
]
EXAMPLES = [
    answered(prompt, completion) for prompt, completion in PARTS
]  # 4, 5, 6 and 4 inputs: the last token of each is only predicted


def expected_loss(policy: Policy) -> torch.Tensor:
    """-(1/11) Σ log π over the 2 + 5 + 1 + 3 completion tokens, one unpadded row at a time."""
    rows = [plain_logprobs(policy.model, prompt, completion) for prompt, completion in PARTS]
    return -torch.cat(rows).sum() / 11


@pytest.mark.parametrize("family", ["qwen3", "gpt2_plain"])
@pytest.mark.parametrize("budget", [4, 9, 1000])
def test_the_gradient_is_that_of_the_mean_over_completion_tokens(family: str, budget: int) -> None:
    policy = tiny_policy(family)
    expected = expected_loss(policy)
    expected.backward()
    learner = twin(policy)
    learner.model.zero_grad()
    measured = accumulate_examples(learner, EXAMPLES, budget, measure_entropy=True)
    assert measured["loss"] == pytest.approx(expected.item(), rel=1e-12)
    assert relative_distance(flat_gradient(learner), flat_gradient(policy)) <= 1e-12


@pytest.mark.parametrize("budget", [4, 1000])
def test_entropy_and_likeliest_tokens_are_those_of_the_whole_distributions(budget: int) -> None:
    policy = tiny_policy()
    entropies, right = [], []
    for example in EXAMPLES:
        logprobs = policy.model(torch.tensor([example.tokens])).logits[0].log_softmax(dim=-1)[:-1]
        learned = torch.tensor(example.sampled[1:])
        entropies.append(-(logprobs.exp() * logprobs).sum(dim=-1)[learned])
        right.append((logprobs.argmax(dim=-1) == torch.tensor(example.tokens[1:]))[learned])
    measured = accumulate_examples(policy, EXAMPLES, budget, measure_entropy=True)
    held_out = held_out_loss(policy, EXAMPLES, budget)
    assert measured["entropy"] == pytest.approx(torch.cat(entropies).mean().item(), rel=1e-9)
    assert measured["mean_token_accuracy"] == torch.cat(right).double().mean().item()
    assert (held_out.entropy, held_out.accuracy) == pytest.approx(
        (measured["entropy"], measured["mean_token_accuracy"])
    )
    assert accumulate_examples(policy, EXAMPLES, budget) == {"loss": measured["loss"]}, "only when asked"


def test_gradients_add_up_over_calls() -> None:
    policy = tiny_policy()
    accumulate_examples(policy, EXAMPLES, 1000)
    once = flat_gradient(policy)
    accumulate_examples(policy, EXAMPLES, 1000)
    assert relative_distance(flat_gradient(policy), 2 * once) <= 1e-12


def learned_logprobs(policy: Policy, examples: Sequence[Example]) -> torch.Tensor:
    logprobs = learned_tokens(policy, examples).logprobs
    assert logprobs is not None
    return logprobs


@pytest.mark.parametrize("budget", [4, 9, 1000])
def test_the_held_out_loss_is_the_same_number_without_a_gradient(budget: int) -> None:
    policy = tiny_policy()
    assert held_out_loss(policy, EXAMPLES, budget).loss == pytest.approx(expected_loss(policy).item(), rel=1e-12)
    assert all(parameter.grad is None for parameter in policy.model.parameters())


def test_log_probs_stand_in_the_order_of_the_examples() -> None:
    policy = tiny_policy()
    expected = torch.cat([plain_logprobs(policy.model, prompt, completion) for prompt, completion in PARTS])
    torch.testing.assert_close(learned_logprobs(policy, EXAMPLES), expected, rtol=0, atol=1e-12)


def test_micro_batches_hold_every_example_once_those_of_like_length_together() -> None:
    # 4 + 4 | 5 | 6 within nine inputs; one that is too long stands alone.
    shapes = [[example.num_inputs for example in micro] for micro in microbatches(EXAMPLES, 9)]
    assert shapes == [[4, 4], [5], [6]]
    assert [[e.num_inputs for e in micro] for micro in microbatches(EXAMPLES, 3)] == [[4], [4], [5], [6]]
    assert [[e.num_inputs for e in micro] for micro in microbatches(EXAMPLES, 19)] == [[4, 4, 5, 6]]
    assert list(microbatches([], 9)) == []
    # In padded rows 4 + 5 inputs are two rows of five, and all four are four rows of six.
    for budget, expected in ((9, [[4, 4], [5], [6]]), (19, [[4, 4, 5], [6]]), (24, [[4, 4, 5, 6]])):
        assert [[e.num_inputs for e in m] for m in microbatches(EXAMPLES, budget, padded=True)] == expected


# Rows of several learned spans


def spans(*parts: tuple[tuple[int, ...], bool]) -> Example:
    """An example of spans of tokens that are learned or not."""
    tokens = tuple(token for tokens, _ in parts for token in tokens)
    return Example(TokenSequence(tokens=tokens, sampled=tuple(learned for tokens, learned in parts for _ in tokens)))


TURNS = [
    spans(((1, 2), False), ((3, 5), True), ((6, 7, 8), False), ((9, 5), True)),
    spans(((4,), False), ((5,), True), ((2, 2, 3), False), ((11,), True), ((7,), False), ((8, 5), True)),
    spans(((6,), False), ((7, 8, 9, 10, 5), True)),
    spans(((12, 13, 14, 15, 16, 1, 2, 3, 4), False), ((11,), True)),
]  # 4 + 4 + 5 + 1 learned tokens


def each_row_alone(policy: Policy) -> torch.Tensor:
    """-(1/14) Σ log π over learned tokens, one unpadded row at a time: of every token, and then those learned."""
    found = []
    for example in TURNS:
        logprobs = plain_logprobs(policy.model, example.tokens[:1], example.tokens[1:])
        found.append(logprobs[torch.tensor(example.sampled[1:])])
    return -torch.cat(found).sum() / 14


@pytest.mark.parametrize("budget", [8, 14, 1000])
@pytest.mark.parametrize("way", ["packed", "padded"])
def test_packed_rows_have_the_loss_and_gradient_of_rows_alone_to_the_last_bits(way: str, budget: int) -> None:
    policy = tiny_policy("qwen3")
    expected = each_row_alone(policy)
    expected.backward()
    learner = twin(policy) if way == "packed" else through_its_own_forward(policy)
    learner.model.zero_grad()
    assert type(learner.forward) is not PlainForward or way == "padded"
    assert accumulate_examples(learner, TURNS, budget)["loss"] == pytest.approx(expected.item(), rel=1e-13)
    assert relative_distance(flat_gradient(learner), flat_gradient(policy)) <= 1e-12


def test_a_padded_family_with_absolute_positions_has_them_too() -> None:
    policy = tiny_policy("gpt2_plain")
    expected = each_row_alone(policy)
    expected.backward()
    learner = twin(policy)
    learner.model.zero_grad()
    assert accumulate_examples(learner, TURNS, 1000)["loss"] == pytest.approx(expected.item(), rel=1e-13)
    assert relative_distance(flat_gradient(learner), flat_gradient(policy)) <= 1e-12


def test_the_loss_is_no_mean_of_the_means_of_micro_batches() -> None:
    # Of micro-batches with 1 and 13 learned tokens the mean of means is another number.
    policy = tiny_policy()
    few, many = [TURNS[3]], TURNS[:3]
    alone = [accumulate_examples(policy, part, 1000)["loss"] for part in (few, many)]
    assert accumulate_examples(policy, TURNS, 8)["loss"] == pytest.approx((alone[0] + 13 * alone[1]) / 14, rel=1e-12)
    assert abs(sum(alone) / 2 - (alone[0] + 13 * alone[1]) / 14) > 1e-3


def test_other_rows_in_the_batch_change_nothing_of_a_row() -> None:
    policy = tiny_policy()
    alone = learned_logprobs(policy, [TURNS[0]])
    other = [spans(((20, 21, 22), False), ((23,), True)), TURNS[0]]
    torch.testing.assert_close(learned_logprobs(policy, other)[1:], alone, rtol=0, atol=1e-14)


def test_held_out_loss_has_its_accuracy_and_an_interval_over_rows() -> None:
    policy = tiny_policy()
    found = held_out_loss(policy, TURNS, 10)
    assert found.loss == pytest.approx(each_row_alone(policy).item(), rel=1e-12)
    likeliest = 0
    for example in TURNS:
        logits = policy.model(input_ids=torch.tensor([example.tokens])).logits[0, :-1]
        right = logits.argmax(-1) == torch.tensor(example.tokens[1:])
        likeliest += int((right & torch.tensor(example.sampled[1:])).sum())
    assert found.accuracy == likeliest / 14
    low, high = found.interval
    assert low < found.loss < high
    # Of a single row every resample is that row.
    single = held_out_loss(policy, TURNS[:1], 10)
    assert single.interval == pytest.approx((single.loss, single.loss))
