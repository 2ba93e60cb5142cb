"""Supervised learning: the mean loss over completion tokens and its gradient, however the examples are batched."""

import pytest
import torch

from posttrain.models.forward import PlainForward
from posttrain.models.policy import Policy
from posttrain.records import Example, TokenSequence
from posttrain.training.sft.sft_run import accumulate_examples, held_out_loss, learned_tokens, microbatches
from tests.support import tiny
from tests.support.tiny import tiny_policy


def spans(*parts: tuple[tuple[int, ...], bool]) -> Example:
    """An example of spans of tokens that are learned or not."""
    tokens = tuple(token for tokens, _ in parts for token in tokens)
    return Example(TokenSequence(tokens=tokens, sampled=tuple(learned for tokens, learned in parts for _ in tokens)))


EXAMPLES = [
    spans(((1, 2), False), ((3, 5), True), ((6, 7, 8), False), ((9, 5), True)),
    spans(((4,), False), ((5,), True), ((2, 2, 3), False), ((11,), True), ((7,), False), ((8, 5), True)),
    spans(((6,), False), ((7, 8, 9, 10, 5), True)),
    spans(((12, 13, 14, 15, 16, 1, 2, 3, 4), False), ((11,), True)),
]
"""4 + 4 + 5 + 1 learned tokens; 8, 8, 5 and 9 inputs, as the last token of each is only predicted."""


def alone(policy: Policy) -> torch.Tensor:
    """log π of the learned tokens, one unpadded row at a time: of every token, and then those learned."""
    rows = [tiny.plain_logprobs(policy.model, each.tokens[:1], each.tokens[1:]) for each in EXAMPLES]
    return torch.cat([row[torch.tensor(each.sampled[1:])] for row, each in zip(rows, EXAMPLES, strict=True)])


@pytest.mark.parametrize("budget", [4, 1000])
def test_entropy_and_likeliest_tokens_are_those_of_the_whole_distributions(budget: int) -> None:
    policy = tiny_policy()
    entropies, right = [], []
    for example in EXAMPLES:
        logprobs = tiny.vocab_logprobs(policy.model, example.tokens[:1], example.tokens[1:])
        learned = torch.tensor(example.sampled[1:])
        entropies.append(-(logprobs.exp() * logprobs).sum(dim=-1)[learned])
        right.append((logprobs.argmax(dim=-1) == torch.tensor(example.tokens[1:]))[learned])
    measured = accumulate_examples(policy, EXAMPLES, budget, measure_entropy=True)
    held_out = held_out_loss(policy, EXAMPLES, budget)
    assert measured["entropy"] == pytest.approx(torch.cat(entropies).mean().item(), rel=1e-9)
    assert measured["mean_token_accuracy"] == torch.cat(right).double().mean().item()
    for name in ("entropy", "mean_token_accuracy"):
        assert held_out[name] == pytest.approx(measured[name])
    assert accumulate_examples(policy, EXAMPLES, budget) == {"loss": measured["loss"]}, "only when asked"


@pytest.mark.parametrize("budget", [8, 14, 1000])
@pytest.mark.parametrize("way", ["packed", "padded", "gpt2_plain"])
def test_the_loss_and_gradient_are_those_of_the_mean_over_learned_tokens(way: str, budget: int) -> None:
    policy = tiny_policy(way if way == "gpt2_plain" else "qwen3")
    expected = -alone(policy).sum() / 14
    expected.backward()
    learner = tiny.through_its_own_forward(policy) if way == "padded" else tiny.twin(policy)
    learner.model.zero_grad()
    assert (type(learner.forward) is PlainForward) == (way != "packed")
    assert accumulate_examples(learner, EXAMPLES, budget)["loss"] == pytest.approx(expected.item(), rel=1e-13)
    assert tiny.relative_distance(tiny.flat_gradient(learner), tiny.flat_gradient(policy)) <= 1e-12


def test_log_probs_stand_in_the_order_of_the_examples() -> None:
    policy = tiny_policy()
    found = learned_tokens(policy, EXAMPLES).logprobs
    torch.testing.assert_close(found, alone(policy), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("budget", "padded", "expected"),
    [
        (13, False, [[5, 8], [8], [9]]),  # one that is too long stands alone
        (3, False, [[5], [8], [8], [9]]),
        (30, False, [[5, 8, 8, 9]]),
        (16, True, [[5, 8], [8], [9]]),  # in padded rows 5 + 8 inputs are two rows of eight
        (35, True, [[5, 8, 8], [9]]),
        (36, True, [[5, 8, 8, 9]]),
    ],
)
def test_micro_batches_hold_every_example_once_those_of_like_length_together(budget, padded, expected) -> None:
    micro_batches = microbatches(EXAMPLES, budget, padded=padded)
    assert [[example.num_inputs for example in micro] for micro in micro_batches] == expected
    assert list(microbatches([], budget)) == []


def test_held_out_loss_has_its_accuracy_and_an_interval_over_rows() -> None:
    policy = tiny_policy()
    found = held_out_loss(policy, EXAMPLES, 10)
    assert found["loss"] == pytest.approx(-alone(policy).mean().item(), rel=1e-12)
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    assert found["loss_low"] < found["loss"] < found["loss_high"]
    # Of a single row every resample is that row.
    single = held_out_loss(policy, EXAMPLES[:1], 10)
    assert (single["loss_low"], single["loss_high"]) == pytest.approx((single["loss"], single["loss"]))
