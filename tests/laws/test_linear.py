"""A matrix packed in another order gives the same products."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from posttrain.models.shared_prompt.linear import (
    MOST_ROWS,
    SIZES,
    DenseWeight,
    PackedWeight,
    dense_projection,
    for_inference,
    linear,
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
        assert met == ([least] if rows <= MOST_ROWS else [MOST_ROWS, 1])


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


X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "biased",
    [(False,), (True,), (False, False, False), (True, True), (True, False, True), (True, False, False)],
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
    assert isinstance(weight, DenseWeight)
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
    assert isinstance(weight, DenseWeight)
    assert [type(part.matrix) for part in weight.parts] == [PackedWeight]
    expected = torch.cat([module(X.float()) for module in modules], dim=1)
    torch.testing.assert_close(weight.product(X.float()), expected, rtol=0, atol=1e-6)


def test_layers_of_which_some_are_frozen_stay_apart() -> None:
    trained, frozen = layers(True, True)
    frozen.requires_grad_(False)
    weight = dense_projection([trained, frozen], torch.float64)
    assert isinstance(weight, DenseWeight)
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
        assert isinstance(each, DenseWeight)
        assert all(part.matrix is module.weight for part, module in zip(each.parts, modules, strict=True))
        assert all(part.bias is module.bias for part, module in zip(each.parts, modules, strict=True))


@pytest.mark.parametrize("frozen", [False, True])
def test_what_keeps_its_address_takes_over_new_numbers(frozen: bool) -> None:
    modules = layers(True, True, frozen=frozen)
    kept = dense_projection(modules, torch.float64).owned()
    assert isinstance(kept, DenseWeight)
    addresses = [part.matrix.data_ptr() for part in kept.parts]
    with torch.no_grad():
        for module in modules:
            module.weight = nn.Parameter(module.weight + 1, requires_grad=not frozen)  # not even where it was
            module.bias.add_(1)
    kept.take_over(dense_projection(modules, torch.float64))
    assert addresses == [part.matrix.data_ptr() for part in kept.parts]
    torch.testing.assert_close(kept.product(X), torch.cat([m(X) for m in modules], dim=1), rtol=0, atol=1e-14)
