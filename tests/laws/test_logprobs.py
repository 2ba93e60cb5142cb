"""Log-probs in chunks: the values and gradients of log_softmax and gather, without the memory of all logits.

Of every kind of output layer: as it is, with a bias, soft-capped, scaled, all at once.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.models import logprobs
from posttrain.models.logprobs import NextTokens, full_kl, token_entropies, token_logprobs
from posttrain.models.model_outputs import OutputLayer
from posttrain.models.shared_prompt.fused import gradients_in_place

ROWS, WIDTH, VOCAB = 11, 4, 7


def random(*shape: int, seed: int) -> torch.Tensor:
    numbers = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return numbers.requires_grad_()


HIDDEN, HEAD, BIAS = random(ROWS, WIDTH, seed=0), random(VOCAB, WIDTH, seed=1), random(VOCAB, seed=4)
TARGETS = torch.arange(ROWS) * 3 % VOCAB


@pytest.fixture(
    params=[(1, 1), (VOCAB, 1), (4 * VOCAB, 1), (12, 4), (33, 100), (1 << 23, 1)],
    ids=["entries", "rows", "four_rows", "tiles_of_4_by_3", "three_columns", "all"],
)
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held at a time: an entry, a row, four rows and three left over, tiles with some left over both ways."""
    elements, rows = request.param
    hold_at_a_time(monkeypatch, elements)
    monkeypatch.setattr(logprobs, "TILE_ROWS", rows)


def hold_at_a_time(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    for limit in ("TILE_ELEMENTS", "CHUNK_ELEMENTS"):
        monkeypatch.setattr(logprobs, limit, elements)


Make = Callable[[torch.Tensor, torch.Tensor], OutputLayer]
KINDS: dict[str, Make] = {
    "plain": lambda head, bias: OutputLayer(head),
    "bias": OutputLayer,
    "soft_cap": lambda head, bias: OutputLayer(head, soft_cap=1.5),  # logits are a few: most are bent
    "scale": lambda head, bias: OutputLayer(head, scale=0.4),
    "twice": lambda head, bias: OutputLayer(head, scale=2.0),
    "all": lambda head, bias: OutputLayer(head, bias, soft_cap=1.5, scale=0.4),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def dense(kind: str, hidden: torch.Tensor, head: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """All logits, from the equation alone."""
    z = hidden @ head.T
    if kind in ("bias", "all"):
        z = z + bias
    z = z * {"scale": 0.4, "all": 0.4, "twice": 2.0}.get(kind, 1.0)
    return 1.5 * torch.tanh(z / 1.5) if kind in ("soft_cap", "all") else z


def assert_same_gradients(
    actual: torch.Tensor, expected: torch.Tensor, inputs: tuple[torch.Tensor, ...], atol: float
) -> None:
    weights = torch.linspace(-1, 2, ROWS, dtype=torch.float64)  # a gradient of its own for each row
    both = (torch.autograd.grad(weights @ each, inputs, allow_unused=True) for each in (actual, expected))
    for mine, theirs in zip(*both, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=atol)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_log_probs_and_their_gradients_are_those_of_log_softmax(kind: str, temperature: float) -> None:
    actual = token_logprobs(HIDDEN, KINDS[kind](HEAD, BIAS), TARGETS, temperature=temperature)
    logprobs = torch.log_softmax(dense(kind, HIDDEN, HEAD, BIAS) / temperature, -1)
    expected = logprobs.gather(1, TARGETS[:, None])[:, 0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)
    assert_same_gradients(actual, expected, (HIDDEN, HEAD, BIAS), 1e-13)


def test_their_gradients_are_finite_differences(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_at_a_time(monkeypatch, 4 * VOCAB)

    def logprobs(*inputs: torch.Tensor) -> torch.Tensor:
        return token_logprobs(inputs[0], KINDS[kind](*inputs[1:]), TARGETS, temperature=0.7)

    assert gradcheck(logprobs, (HIDDEN, HEAD, BIAS))


@pytest.mark.usefixtures("tiles")
def test_an_output_matrix_that_is_not_trained_changes_no_other_gradient(kind: str) -> None:
    weights = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    trained, frozen = KINDS[kind](HEAD, BIAS), KINDS[kind](HEAD.detach(), BIAS)
    inputs = (HIDDEN,) if trained.bias is None else (HIDDEN, BIAS)
    expected = torch.autograd.grad(weights @ token_logprobs(HIDDEN, trained, TARGETS), inputs)
    actual = torch.autograd.grad(weights @ token_logprobs(HIDDEN, frozen, TARGETS), inputs)
    assert all(map(torch.equal, actual, expected))


@pytest.mark.usefixtures("tiles")
def test_a_gradient_written_in_place_is_the_one_that_autograd_returns(kind: str) -> None:
    weights = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    parameter = torch.nn.Parameter(HEAD.detach().clone())
    with gradients_in_place():
        loss = weights @ token_logprobs(HIDDEN, KINDS[kind](parameter, BIAS), TARGETS)
    loss.backward()
    (expected,) = torch.autograd.grad(weights @ token_logprobs(HIDDEN, KINDS[kind](HEAD, BIAS), TARGETS), HEAD)
    torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=1e-13)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_the_full_kl_and_its_gradient_are_those_of_the_sum(kind: str, temperature: float) -> None:
    others = random(ROWS, WIDTH, seed=2).detach(), random(VOCAB, WIDTH, seed=3).detach(), BIAS.detach().flip(0)
    reference = NextTokens(others[0], KINDS[kind](others[1], others[2]))
    actual = full_kl(HIDDEN, KINDS[kind](HEAD, BIAS), reference, temperature=temperature)
    policy = torch.softmax(dense(kind, HIDDEN, HEAD, BIAS) / temperature, -1)
    other = torch.softmax(dense(kind, *others) / temperature, -1)
    expected = (policy * (policy / other).log()).sum(-1)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)
    assert_same_gradients(actual, expected, (HIDDEN, HEAD, BIAS), 1e-12)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_entropy_is_minus_the_expected_log_prob(kind: str, temperature: float) -> None:
    policy = torch.softmax(dense(kind, HIDDEN, HEAD, BIAS) / temperature, -1)
    actual = token_entropies(HIDDEN, KINDS[kind](HEAD, BIAS), temperature=temperature)
    expected = -(policy * policy.log()).sum(-1)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)
    assert_same_gradients(actual, expected, (HIDDEN, HEAD, BIAS), 1e-12)


def test_in_bfloat16_they_are_right_to_its_own_precision(kind: str) -> None:
    # A product of bfloat16 errs by 2^-9 of its size, here 2 at most; bias, scale and cap are applied in float32.
    hidden, head, bias = (random(*shape, seed=i).detach() / 2 for i, shape in enumerate([(64, 8), (300, 8), (300,)]))
    rounded = [each.bfloat16() for each in (hidden, head, bias)]
    exact = torch.log_softmax(dense(kind, *(each.double() for each in rounded)), -1)[:, 7]
    actual = token_logprobs(rounded[0], KINDS[kind](*rounded[1:]), torch.full((64,), 7))
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), exact, rtol=0, atol=2e-2)


class Largest(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("tile_rows", [8, 4096])
def test_the_logits_of_all_rows_are_never_held_forward_or_backward(monkeypatch, kind, tile_rows) -> None:
    rows, vocab, width = 64, 300, 3
    hold_at_a_time(monkeypatch, 8 * vocab)
    monkeypatch.setattr(logprobs, "TILE_ROWS", tile_rows)
    hidden, head, bias = random(rows, width, seed=0), random(vocab, width, seed=1), random(vocab, seed=2)
    targets, layer = torch.arange(rows), KINDS[kind](head, bias)
    for compute in (
        lambda: token_logprobs(hidden, layer, targets),
        lambda: full_kl(hidden, layer, NextTokens(hidden.detach() + 1, KINDS[kind](head.detach(), bias.detach()))),
    ):
        with Largest() as seen:
            compute().sum().backward()
        assert 7 * vocab < seen.elements <= 8 * vocab  # an eighth of rows × vocabulary
    with Largest() as seen:
        token_entropies(hidden, layer)
    assert seen.elements == 8 * vocab


def test_where_not_even_a_row_fits_one_is_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    hold_at_a_time(monkeypatch, 1)
    with Largest() as seen:
        token_entropies(random(64, 1, seed=0), OutputLayer(random(300, 1, seed=1)))
    assert seen.elements == 300


def test_bfloat16_logits_are_normalised_in_float32() -> None:
    # Two hidden units of one: logits (2, 2, ..., 2), so every log-prob is -log 300 = -5.70378; in bfloat16, -5.6875.
    hidden, head = torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(300, 2, dtype=torch.bfloat16)
    actual = token_logprobs(hidden, OutputLayer(head), torch.tensor([0, 299]))
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, torch.full((2,), -5.7037825), rtol=0, atol=1e-6)


def test_the_bfloat16_gradient_of_the_output_matrix_does_not_stand_still_over_many_chunks(monkeypatch) -> None:
    # Row after row the same: onehot - softmax = (1/2, -1/2), times h = 1, so 2,000 rows give (1000, -1000).
    # Added up in bfloat16, halves are lost once the sum is 128, where numbers are 1 apart.
    hold_at_a_time(monkeypatch, 2)
    hidden, head = torch.ones(2000, 1), torch.ones(2, 1, dtype=torch.bfloat16, requires_grad=True)
    token_logprobs(hidden, OutputLayer(head), torch.zeros(2000, dtype=torch.long)).sum().backward()
    torch.testing.assert_close(head.grad.float(), torch.tensor([[1000.0], [-1000.0]]), rtol=2**-8, atol=0)


def test_the_bfloat16_gradient_of_the_full_kl_does_not_stand_still_over_many_chunks(monkeypatch) -> None:
    # KL(p‖1/2) of p = softmax(1/2, -1/2); its slope in logit v is p_v (ln 2p_v - KL), and every row adds the same.
    hold_at_a_time(monkeypatch, 2)
    hidden, head = torch.ones(2000, 1), torch.tensor([[0.5], [-0.5]], dtype=torch.bfloat16, requires_grad=True)
    reference = NextTokens(torch.ones(2000, 1), OutputLayer(torch.zeros(2, 1, dtype=torch.bfloat16)))
    full_kl(hidden, OutputLayer(head), reference).sum().backward()
    p = torch.softmax(torch.tensor([0.5, -0.5]), 0)
    slope = p * ((2 * p).log() - (p * (2 * p).log()).sum())
    torch.testing.assert_close(head.grad.float()[:, 0], 2000 * slope, rtol=0.02, atol=0)


def test_logits_that_would_overflow_in_float32_are_no_obstacle_wherever_the_largest_stands() -> None:
    # exp(89) is beyond float32.  Of logits (0, 200, 199) the log-probs are -200 - x, -x, -1 - x with x = log(1 + e^-1).
    hidden, head = torch.ones(3, 1), torch.tensor([[0.0], [200.0], [199.0]])
    for order in ([0, 1, 2], [1, 2, 0], [2, 0, 1]):
        actual = token_logprobs(hidden, OutputLayer(head[order]), torch.arange(3))
        expected = torch.tensor([-200.0, 0.0, -1.0])[order] - math.log1p(math.exp(-1))
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)


def test_the_gradient_of_hidden_states_does_not_stand_still_over_a_large_bfloat16_vocabulary(monkeypatch) -> None:
    # From h = 0 every token has π = 2^-12, so d log π_0 / dh = W_0 - mean W = 2^-12 - 1 if W_0 = 0 and the others are 1
    # Tiles of two tokens add -2^-11 each: in bfloat16 the sum stands still at -2^-3, where numbers are 2^-10 apart.
    hold_at_a_time(monkeypatch, 2)
    head = torch.ones(4096, 1, dtype=torch.bfloat16)
    head[0] = 0
    hidden = torch.zeros(1, 1, requires_grad=True)
    token_logprobs(hidden, OutputLayer(head), torch.tensor([0])).sum().backward()
    assert hidden.grad.item() == pytest.approx(-(1 - 2**-12), rel=1e-6)


def test_a_layer_takes_over_another_s_matrix_and_its_bias_and_stays_where_it_is() -> None:
    first, second = (OutputLayer(random(VOCAB, 3, seed=seed), random(VOCAB, seed=seed + 1)) for seed in (1, 5))
    matrix, bias = first.matrix, first.bias
    with torch.no_grad():
        first.take_over(second)
    assert first.matrix is matrix
    assert first.bias is bias
    assert torch.equal(matrix, second.matrix)
    assert torch.equal(bias, second.bias)
    without = OutputLayer(random(VOCAB, 3, seed=7))
    with torch.no_grad():
        without.take_over(second)
    assert without.bias is None
    assert torch.equal(without.matrix, second.matrix)
