"""Supervised learning: the mean loss over completion tokens and its gradient, however the examples are batched."""

import pytest
import torch

from posttrain.models.policy import Policy
from posttrain.models.conversation_masks import answered
from posttrain.records import Example
from posttrain.training.sft.supervised import accumulate, held_out_loss, learned_logprobs, microbatches
from tests.support.tiny import flat_gradient, plain_logprobs, relative_distance, tiny_policy, twin

PARTS = [
    ((1, 2, 3), (4, 5)),
    ((6,), (7, 8, 9, 10, 5)),
    ((11, 12, 13, 14, 15, 16), (11,)),
    ((2, 3), (17, 18, 5)),
]
EXAMPLES = [answered(prompt, completion) for prompt, completion in PARTS]  # 4, 5, 6 and 4 inputs: the last token of each is only predicted


def expected_loss(policy: Policy) -> torch.Tensor:
    """-(1/11) Σ log π over the 2 + 5 + 1 + 3 completion tokens, one unpadded row at a time."""
    rows = [plain_logprobs(policy.model, prompt, completion) for prompt, completion in PARTS]
    return -torch.cat(rows).sum() / 11


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize("budget", [4, 9, 1000])
def test_the_gradient_is_that_of_the_mean_over_completion_tokens(family: str, budget: int) -> None:
    policy = tiny_policy(family)
    expected = expected_loss(policy)
    expected.backward()
    learner = twin(policy)
    learner.model.zero_grad()
    assert accumulate(learner, EXAMPLES, budget) == pytest.approx(expected.item(), rel=1e-12)
    assert relative_distance(flat_gradient(learner), flat_gradient(policy)) <= 1e-12


def test_gradients_add_up_over_calls() -> None:
    policy = tiny_policy()
    accumulate(policy, EXAMPLES, 1000)
    once = flat_gradient(policy)
    accumulate(policy, EXAMPLES, 1000)
    assert relative_distance(flat_gradient(policy), 2 * once) <= 1e-12


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
