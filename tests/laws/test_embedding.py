"""Gradients that are written where they are kept are those that autograd would return."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from posttrain.models.logprobs import token_logprobs
from posttrain.models.output_layer import OutputLayer
from posttrain.models.shared_prompt.gradients import embed, gradients_in_place

TOKENS = torch.tensor([3, 1, 3, 0, 6, 1, 1])
TARGETS = torch.tensor([2, 6, 0, 0, 5, 1, 3])


def table(padding: int | None = None) -> nn.Embedding:
    made = nn.Embedding(7, 4, padding_idx=padding, dtype=torch.float64)
    with torch.no_grad():
        made.weight.copy_(torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    return made


@pytest.fixture(autouse=True, params=[True, False], ids=["in_place", "returned"])
def in_place(request: pytest.FixtureRequest) -> Iterator[bool]:
    with gradients_in_place() if request.param else nullcontext():
        yield request.param


def mixed(rows: torch.Tensor) -> torch.Tensor:
    """Something nonlinear with another slope for every row."""
    return (rows * torch.linspace(-1, 2, len(rows), dtype=torch.float64)[:, None]).tanh()


@pytest.mark.parametrize("padding", [None, 1])
def test_the_gradient_of_an_embedding(padding: int | None) -> None:
    mine, theirs = table(padding), table(padding)
    rows = embed(mine, TOKENS)
    assert torch.equal(rows, F.embedding(TOKENS, theirs.weight))
    for _ in range(2):  # a second pass adds to the first
        mixed(embed(mine, TOKENS)).sum().backward()
        mixed(theirs(TOKENS)).sum().backward()
    torch.testing.assert_close(mine.weight.grad, theirs.weight.grad, rtol=0, atol=1e-14)


@pytest.mark.parametrize("order", ["embedding_first", "head_first"])
def test_of_a_matrix_that_is_also_the_output_matrix(order: str) -> None:
    mine, theirs = table(), table()
    losses = [
        mixed(embed(mine, TOKENS)).sum(),
        token_logprobs(mixed(embed(mine, TOKENS)), OutputLayer(mine.weight), TARGETS).sum(),
    ]
    for loss in losses if order == "embedding_first" else reversed(losses):
        loss.backward()
    logits = mixed(theirs(TOKENS)) @ theirs.weight.T
    expected = torch.log_softmax(logits, -1).gather(1, TARGETS[:, None]).sum() + mixed(theirs(TOKENS)).sum()
    expected.backward()
    torch.testing.assert_close(mine.weight.grad, theirs.weight.grad, rtol=0, atol=1e-13)


def test_no_gradient_is_written_where_none_is_asked_for() -> None:
    frozen = table()
    frozen.weight.requires_grad_(False)
    hidden = torch.ones(7, 4, dtype=torch.float64, requires_grad=True)
    (token_logprobs(hidden, OutputLayer(frozen.weight), TARGETS).sum() + embed(frozen, TOKENS).sum()).backward()
    assert frozen.weight.grad is None
    assert hidden.grad is not None
    free = table()
    with torch.no_grad():
        embed(free, TOKENS)
        token_logprobs(hidden, OutputLayer(free.weight), TARGETS)
    assert free.weight.grad is None


def test_outside_of_the_context_autograd_sees_everything(in_place: bool) -> None:
    weight = table().weight
    loss = token_logprobs(torch.ones(7, 4, dtype=torch.float64, requires_grad=True), OutputLayer(weight), TARGETS).sum()
    (found,) = torch.autograd.grad(loss, weight, allow_unused=True)
    assert (found is None) == in_place
