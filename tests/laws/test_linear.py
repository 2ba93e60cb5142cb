"""Layers that are packed, fused or written in place give the same products and gradients as the plain ones."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck

from posttrain.models.logprobs import token_logprobs
from posttrain.models.model_outputs import OutputLayer
from posttrain.models.shared_prompt import fused
from posttrain.models.shared_prompt.fused import GELU_TANH, SILU, embed, gated, gradients_in_place, rms_norm, rotate
from posttrain.models.shared_prompt.linear import (
    MOST_ROWS,
    SIZES,
    PackedWeight,
    dense_projection,
    for_inference,
    linear,
    projection,
)

WEIGHT = torch.randn(37, 19, generator=torch.Generator().manual_seed(0))

needs_packing = pytest.mark.skipif(not PackedWeight.serves(WEIGHT), reason="this build of torch has no oneDNN products")


@needs_packing
@pytest.mark.parametrize("rows", [1, 3, 32, 100, MOST_ROWS, MOST_ROWS + 1, 2 * MOST_ROWS + 33])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_products_are_products(rows: int, with_bias: bool) -> None:
    random = torch.Generator().manual_seed(rows)
    x, bias = torch.randn(rows, 19, generator=random), torch.randn(37, generator=random) if with_bias else None
    actual, exact = linear(x, for_inference(WEIGHT), bias), F.linear(x.double(), WEIGHT.double(), None)
    expected = exact if bias is None else exact + bias
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=2e-5)


@needs_packing
def test_packed_products_are_of_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN compiles a kernel for each number that it meets, and keeps all of them."""
    product, met = torch.ops.mkldnn._linear_pointwise, []

    def noting(x: torch.Tensor, *others: object) -> torch.Tensor:
        met.append(len(x))
        return product(x, *others)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", noting)
    packed = for_inference(WEIGHT)
    for rows in range(1, MOST_ROWS + 2):
        met.clear()
        linear(torch.zeros(rows, 19), packed)
        least = min((size for size in SIZES if size >= rows), default=MOST_ROWS)
        assert met == ([least] if rows <= MOST_ROWS else [MOST_ROWS, SIZES[0]])


@needs_packing
def test_a_packed_matrix_is_a_copy_that_does_not_follow_its_weight() -> None:
    weight = WEIGHT.clone()
    kept = for_inference(weight)
    weight.zero_()
    assert bool(linear(torch.ones(1, 19), kept).abs().sum() > 1)


def test_a_matrix_in_another_precision_stays_as_it_is() -> None:
    for weight in (WEIGHT.double(), WEIGHT.bfloat16()):
        assert for_inference(weight) is weight


def layers(*biased: bool, frozen: bool = False) -> list[nn.Linear]:
    """Linear layers of one input, of 3, 5 and 7 outputs, some with a bias."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = [nn.Linear(4, 3 + 2 * i, bias=bias, dtype=torch.float64) for i, bias in enumerate(biased)]
    return [layer.requires_grad_(not frozen) for layer in made]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    numbers = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return numbers.requires_grad_()


X = random(6, 4, seed=1).detach()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "biased", [(False,), (True,), (False, False, False), (True, True), (True, False, True), (True, False, False)]
)
def test_layers_side_by_side_give_what_each_gives(biased: tuple[bool, ...], frozen: bool) -> None:
    modules = layers(*biased, frozen=frozen)
    expected = torch.cat([module(X) for module in modules], dim=1)
    weight = dense_projection(modules, torch.float64)
    for each in (weight, weight.owned(), weight.for_inference()):
        torch.testing.assert_close(each.product(X), expected, rtol=0, atol=1e-14)


def test_trained_layers_are_one_product_whose_gradient_is_theirs() -> None:
    modules, others = layers(True, True, True), layers(True, True, True)
    weight = dense_projection(modules, torch.float64)
    assert len(weight.parts) == 1
    (weight.product(X).tanh() ** 2).sum().backward()
    (torch.cat([other(X) for other in others], dim=1).tanh() ** 2).sum().backward()
    for mine, theirs in zip(modules, others, strict=True):
        torch.testing.assert_close(mine.weight.grad, theirs.weight.grad, rtol=0, atol=1e-13)
        torch.testing.assert_close(mine.bias.grad, theirs.bias.grad, rtol=0, atol=1e-13)


@needs_packing
def test_frozen_layers_are_joined_where_they_are_packed() -> None:
    modules = [layer.float() for layer in layers(True, True, frozen=True)]
    weight = dense_projection(modules, torch.float32).for_inference()
    assert [type(part.matrix) for part in weight.parts] == [PackedWeight]
    expected = torch.cat([module(X.float()) for module in modules], dim=1)
    torch.testing.assert_close(weight.product(X.float()), expected, rtol=0, atol=1e-6)


def test_layers_of_which_some_are_frozen_stay_apart() -> None:
    trained, frozen = layers(True, True)
    frozen.requires_grad_(False)
    weight = dense_projection([trained, frozen], torch.float64)
    assert [part.matrix.data_ptr() for part in weight.parts] == [trained.weight.data_ptr(), frozen.weight.data_ptr()]


def test_of_what_is_trained_a_copy_is_owned() -> None:
    (layer,) = layers(True)
    kept = dense_projection([layer], torch.float64).owned()
    before = kept.product(X)
    with torch.no_grad():
        layer.weight.add_(1)
        layer.bias.add_(1)
    assert torch.equal(kept.product(X), before)


def test_frozen_layers_are_never_copied() -> None:
    modules = layers(True, True, frozen=True)
    weight = dense_projection(modules, torch.float64)
    for each in (weight, weight.owned()):
        for part, module in zip(each.parts, modules, strict=True):
            assert part.matrix is module.weight
            assert part.bias is module.bias


@pytest.mark.parametrize("frozen", [False, True])
def test_what_keeps_its_address_takes_over_new_numbers(frozen: bool) -> None:
    modules = layers(True, True, frozen=frozen)
    kept = dense_projection(modules, torch.float64).owned()
    addresses = [part.matrix.data_ptr() for part in kept.parts]
    with torch.no_grad():
        for module in modules:
            module.weight = nn.Parameter(module.weight + 1, requires_grad=not frozen)  # not even where it was
            module.bias.add_(1)
    kept.take_over(dense_projection(modules, torch.float64))
    assert addresses == [part.matrix.data_ptr() for part in kept.parts]
    torch.testing.assert_close(kept.product(X), torch.cat([m(X) for m in modules], dim=1), rtol=0, atol=1e-14)


@pytest.mark.parametrize("biased", [(False,), (True, True), (True, False, True)])
def test_gathered_layers_have_the_products_and_gradients_of_joined_ones(biased: tuple[bool, ...]) -> None:
    """Also where one is frozen."""
    modules, others = layers(*biased), layers(*biased)
    for each in (modules, others):
        each[-1].weight.requires_grad_(len(biased) == 1)
    inputs = [X.clone().requires_grad_() for _ in range(2)]
    gathered = projection(modules, torch.float64, keeps_copies=False)
    (gathered.product(inputs[0]).tanh() ** 2).sum().backward()
    (torch.cat([other(inputs[1]) for other in others], dim=1).tanh() ** 2).sum().backward()
    for mine, theirs in zip([*inputs[:1], *parameters(modules)], [*inputs[1:], *parameters(others)], strict=True):
        if theirs.grad is None:
            assert mine.grad is None
        else:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-13)


@pytest.mark.parametrize("keeps_copies", [False, True])
def test_gathered_layers_keep_nothing_but_parameters_for_the_backward_pass(keeps_copies: bool) -> None:
    """Else the copies of all layers together are the whole model again, in the type of the products."""
    modules, kept = layers(True, True), list[torch.Tensor]()
    x = X.bfloat16().requires_grad_()  # of weights in float64

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        product = projection(modules, torch.bfloat16, keeps_copies=keeps_copies).product(x)
    copies = {each.data_ptr() for each in kept} - {each.data_ptr() for each in (x, *parameters(modules))}
    assert bool(copies) == keeps_copies
    product.sum().backward()
    assert [each.grad.dtype for each in parameters(modules)] == [torch.float64] * 4


def parameters(modules: list[nn.Linear]) -> list[nn.Parameter]:
    return [parameter for module in modules for parameter in module.parameters()]


def angles(tokens: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin, [token 1 width], of as many different angles."""
    theta = torch.arange(1, tokens * half + 1, dtype=torch.float64).view(tokens, 1, half) / 3
    return theta.cos().repeat(1, 1, 2), torch.cat([-theta.sin(), theta.sin()], dim=-1)


def assert_is(layer: Callable[[], torch.Tensor], expected: torch.Tensor) -> None:
    """Where gradients are recorded and where they are not."""
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            torch.testing.assert_close(layer(), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("weight_shape", [(6,), (3, 6)])
def test_rms_norm_is_its_formula(weight_shape: tuple[int, ...]) -> None:
    x, weight = random(4, 3, 6), random(*weight_shape, seed=1)
    expected = weight * x / (x.square().sum(-1, keepdim=True) / 6 + 0.1).sqrt()
    assert_is(lambda: rms_norm(x, weight, 0.1), expected)


def test_rotation_turns_each_pair_as_a_complex_number() -> None:
    x, (cos, sin) = random(5, 2, 8), angles(5, 4)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.complex(cos[..., :4], sin[..., 4:])
    assert_is(lambda: rotate(x, cos, sin), torch.cat([turned.real, turned.imag], dim=-1))


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + (-x).exp())


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Hendrycks & Gimpel 2016, arXiv:1606.08415, §2."""
    return x / 2 * (1 + ((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh())


@pytest.mark.parametrize(("activation", "formula"), [(SILU, silu), (GELU_TANH, gelu_tanh)])
def test_the_gated_activation_is_its_formula(activation: fused.Activation, formula: Callable) -> None:
    gate_up = random(5, 6)
    assert_is(lambda: gated(gate_up, activation), formula(gate_up[:, :3]) * gate_up[:, 3:])


@pytest.mark.parametrize(
    ("layer", "shapes"),
    [
        (lambda x, weight: rms_norm(x, weight, 0.1), [(4, 3, 6), (6,)]),
        (lambda x, weight: rms_norm(x, weight, 0.1), [(4, 3, 6), (3, 6)]),
        (lambda x: rotate(x, *angles(3, 2)), [(3, 2, 4)]),
        (lambda x: rotate(x, *angles(5, 2)), [(5, 2, 8)]),  # the first half of each head
        (lambda x: gated(x, SILU), [(5, 6)]),
        (lambda x: gated(x, GELU_TANH), [(5, 6)]),
    ],
)
def test_gradients_are_finite_differences(layer: Callable[..., torch.Tensor], shapes: list[tuple[int, ...]]) -> None:
    assert gradcheck(layer, tuple(random(*shape, seed=seed) for seed, shape in enumerate(shapes)))


def test_a_head_may_be_turned_in_its_first_part_alone() -> None:
    x, (cos, sin) = random(5, 2, 8), angles(5, 2)
    out = rotate(x, cos, sin)
    assert torch.equal(out[..., 4:], x[..., 4:])
    assert torch.equal(out[..., :4], rotate(x[..., :4], cos, sin))


def test_a_norm_of_bfloat16_is_rounded_once_before_its_weight_and_once_after() -> None:
    # As the model's own norm does it; were the mean taken in bfloat16, the first would be .4 % off.
    x, weight = random(64, 96).bfloat16().detach(), random(96, seed=1).bfloat16().detach()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            actual = rms_norm(x, weight, 1e-6)
        assert actual.dtype == torch.bfloat16
        assert torch.equal(actual, exact.bfloat16() * weight)


def test_the_gradient_of_a_norm_of_bfloat16_is_off_by_its_rounding_alone() -> None:
    x, weight = random(64, 96).bfloat16().detach().requires_grad_(), random(96, seed=1).bfloat16().detach()
    grad = random(64, 96, seed=2).bfloat16().detach()
    rms_norm(x, weight, 1e-6).backward(grad)
    exact = x.detach().double().requires_grad_()
    (exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()).backward(grad.double())
    assert (x.grad.double() - exact.grad).norm() <= 2**-8 * exact.grad.norm()


def test_no_layer_writes_into_what_it_is_given() -> None:
    x, weight, (cos, sin) = random(5, 2, 8), random(8, seed=1), angles(5, 4)
    gate_up = random(5, 6, seed=2)
    given = [tensor.detach().clone() for tensor in (x, weight, cos, sin, gate_up)]
    out = rms_norm(x, weight, 0.1).sum() + rotate(x, cos, sin).square().sum() + gated(gate_up, SILU).sum()
    out.backward()
    for before, after in zip(given, (x, weight, cos, sin, gate_up), strict=True):
        assert torch.equal(before, after.detach())


TOKENS = torch.tensor([3, 1, 3, 0, 6, 1, 1])
TARGETS = torch.tensor([2, 6, 0, 0, 5, 1, 3])


def table(padding: int | None = None) -> nn.Embedding:
    made = nn.Embedding(7, 4, padding_idx=padding, dtype=torch.float64)
    made.weight = nn.Parameter(random(7, 4).detach().clone())
    return made


@pytest.fixture(params=[True, False], ids=["in_place", "returned"])
def in_place(request: pytest.FixtureRequest) -> Iterator[bool]:
    with gradients_in_place() if request.param else nullcontext():
        yield request.param


def mixed(rows: torch.Tensor) -> torch.Tensor:
    """Something nonlinear with another slope for every row."""
    return (rows * torch.linspace(-1, 2, len(rows), dtype=torch.float64)[:, None]).tanh()


@pytest.mark.usefixtures("in_place")
@pytest.mark.parametrize("padding", [None, 1])
def test_the_gradient_of_an_embedding(padding: int | None) -> None:
    mine, theirs = table(padding), table(padding)
    rows = embed(mine, TOKENS)
    assert torch.equal(rows, F.embedding(TOKENS, theirs.weight))
    for _ in range(2):  # a second pass adds to the first
        mixed(embed(mine, TOKENS)).sum().backward()
        mixed(theirs(TOKENS)).sum().backward()
    torch.testing.assert_close(mine.weight.grad, theirs.weight.grad, rtol=0, atol=1e-14)


@pytest.mark.usefixtures("in_place")
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


@pytest.mark.usefixtures("in_place")
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
