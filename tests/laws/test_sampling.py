"""Laws of drawing tokens: right frequencies, right log-probs, right cuts, and no row that looks at another."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.errors import RunError
from posttrain.generation.request import StreamKey
from posttrain.generation.sampling import (
    SMALL_VOCAB,
    first_exceeding,
    invert,
    invert_by_blocks,
    keep,
    require_finite,
    sample,
)
from posttrain.options.rollout import SamplingParams
from tests.support.refusals import refused
from tests.support.streams import uniforms

LARGEST_UNIFORM = 1 - 2**-53
SEEDS = st.integers(0, 2**32 - 1)
CUTS = [
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.7),
    SamplingParams(min_p=0.3),
    SamplingParams(top_k=5, top_p=0.8, min_p=0.1, temperature=1.7),
]


def random_logits(seed: int, rows: int, vocab: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def random_uniform(seed: int, rows: int) -> torch.Tensor:
    return torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))


def twin(weights: torch.Tensor, uniform: torch.Tensor) -> list[int]:
    """The definition, row by row: the first token whose cumulative weight exceeds u of the total."""
    tokens = []
    for row, u in zip(weights.double().numpy(), uniform.tolist(), strict=True):
        cumulative = np.cumsum(row)
        tokens.append(int(np.argmax(cumulative > u * cumulative[-1])))
    return tokens


def kept_by_definition(probabilities: list[float], sampling: SamplingParams) -> set[int]:
    """Top-k, then top-p among these, then min-p: walk down from the likeliest token, lower ids first among equals."""
    order = sorted(range(len(probabilities)), key=lambda token: (-probabilities[token], token))
    order = order[: sampling.top_k or len(order)]
    if sampling.top_p < 1:
        left, mass, kept = sum(probabilities[token] for token in order), 0.0, []
        for token in order:
            if mass >= sampling.top_p * left:
                break
            kept.append(token)
            mass += probabilities[token]
        order = kept
    return {token for token in order if probabilities[token] >= sampling.min_p * max(probabilities)}


@pytest.mark.parametrize("sampling", [*(SamplingParams(temperature=heat) for heat in (0.6, 1.0, 2.0)), *CUTS])
def test_tokens_come_as_often_as_their_distribution_says(sampling: SamplingParams) -> None:
    logits = random_logits(0, 1, 12)
    num_draws = 20_000
    uniform = torch.from_numpy(uniforms(StreamKey(0, "test", 0), 0, 0, 0, num_draws))
    drawn = sample(logits.expand(num_draws, -1), uniform, sampling).tokens
    probabilities = torch.softmax(logits[0] / sampling.temperature, 0)
    kept = sorted(kept_by_definition(probabilities.tolist(), sampling))
    assert set(drawn.tolist()) <= set(kept)
    expected = num_draws * probabilities[kept] / probabilities[kept].sum()
    counts = torch.bincount(drawn, minlength=12)[kept]
    # Chi-square with at most 11 degrees of freedom exceeds 48 once in 10^6 times.
    assert ((counts - expected) ** 2 / expected).sum() < 48


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(greedy=True), *CUTS])
@pytest.mark.parametrize("vocab", [17, 3000])
def test_a_row_is_the_same_alone_in_any_order_and_among_any_others(sampling: SamplingParams, vocab: int) -> None:
    logits, uniform = random_logits(1, 40, vocab), random_uniform(1, 40)
    together = sample(logits, uniform, sampling)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    permuted = sample(logits[order], uniform[order], sampling)
    assert torch.equal(permuted.tokens, together.tokens[order])
    torch.testing.assert_close(permuted.logprobs, together.logprobs[order], rtol=0, atol=1e-14)
    for row in range(40):
        alone = sample(logits[row : row + 1], uniform[row : row + 1], sampling)
        assert alone.tokens[0] == together.tokens[row]
        torch.testing.assert_close(alone.logprobs[0], together.logprobs[row], rtol=0, atol=1e-14)


@pytest.mark.parametrize(("entries", "at_once"), [(900, [3, 3, 1]), (100, [1] * 7), (2100, [7])])
def test_as_many_rows_are_handled_at_once_as_there_is_room_for_and_one_at_least(monkeypatch, entries, at_once) -> None:
    handled: list[int] = []

    def counted(weights: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        handled.append(len(weights))
        return invert(weights, uniform)

    monkeypatch.setattr("posttrain.generation.sampling.ENTRIES_AT_ONCE", entries)
    monkeypatch.setattr("posttrain.generation.sampling.invert", counted)
    logits, uniform = random_logits(3, 7, 300), random_uniform(3, 7)
    for sampling in (SamplingParams(), SamplingParams(top_k=9)):
        handled.clear()
        pieces = sample(logits, uniform, sampling)
        assert handled == at_once
        with monkeypatch.context() as patch:
            patch.setattr("posttrain.generation.sampling.ENTRIES_AT_ONCE", 10**9)
            torch.testing.assert_close(pieces, sample(logits, uniform, sampling), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("vocab", "by_blocks"), [(SMALL_VOCAB, 0), (SMALL_VOCAB + 1, 1)])
def test_a_large_vocabulary_alone_is_searched_by_blocks(monkeypatch, vocab, by_blocks) -> None:
    seen: list[int] = []

    def counted(weights: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(weights.shape[1])
        return invert_by_blocks(weights, uniform)

    monkeypatch.setattr("posttrain.generation.sampling.invert_by_blocks", counted)
    invert(torch.ones(2, vocab), random_uniform(0, 2))
    assert seen == [vocab] * by_blocks


@given(seed=SEEDS, vocab=st.integers(1, 700), rows=st.integers(1, 5))
def test_two_levels_and_one_cumulative_sum_find_the_token_of_the_definition(seed: int, vocab: int, rows: int) -> None:
    weights, uniform = torch.softmax(random_logits(seed, rows, vocab), -1), random_uniform(seed, rows)
    expected = twin(weights, uniform)
    assert invert(weights, uniform)[0].tolist() == expected
    assert invert_by_blocks(weights, uniform)[0].tolist() == expected


@pytest.mark.parametrize("vocab", [500, 5_000])
def test_float32_probabilities_are_added_up_in_float64(vocab: int) -> None:
    # Each uniform lies 1e-8 above the lower boundary of a token of about 1/vocab: a float32 sum, whose steps are
    # 6e-8 wide near 1, draws the neighbour for a good part of them.
    weights = torch.softmax(random_logits(5, 300, vocab, torch.float32) / 30, -1)
    wanted = torch.arange(300)[:, None] * vocab // 300
    cumulative = weights.double().cumsum(-1)
    uniform = ((cumulative - weights).gather(1, wanted)[:, 0] + 1e-8) / cumulative[:, -1]
    assert invert(weights, uniform)[0].tolist() == wanted[:, 0].tolist()
    assert invert_by_blocks(weights, uniform)[0].tolist() == wanted[:, 0].tolist()


def test_a_large_vocabulary_has_no_float64_copy() -> None:
    class LargestFloat64(TorchDispatchMode):
        entries = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
                self.entries = max(self.entries, result.numel())
            return result

    logits = random_logits(0, 2, 150_000, torch.float32)
    with LargestFloat64() as seen:
        sample(logits, random_uniform(0, 2), SamplingParams())
    # Sums of ~300 blocks of 512, and one block: neither is more than a hundredth of the logits.
    assert 0 < seen.entries < logits.numel() / 100


@given(
    seed=SEEDS,
    vocab=st.integers(1, 40),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.4]),
)
def test_the_cuts_keep_the_sets_that_their_definitions_name(seed, vocab, top_k, top_p, min_p) -> None:
    # Rounded logits, so that many tokens are equally likely and the order of ids decides.
    probabilities = torch.softmax(random_logits(seed, 3, vocab).round(), -1)
    sampling = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    for row, kept in zip(probabilities.tolist(), keep(probabilities, sampling), strict=True):
        assert set(kept.nonzero()[:, 0].tolist()) == kept_by_definition(row, sampling)


def test_a_large_vocabulary_is_cut_alike() -> None:
    probabilities = torch.softmax(random_logits(8, 2, 5_000).round(), -1)
    for sampling in (SamplingParams(top_k=40), SamplingParams(top_p=0.9), SamplingParams(top_k=40, top_p=0.5)):
        for row, kept in zip(probabilities.tolist(), keep(probabilities, sampling), strict=True):
            assert set(kept.nonzero()[:, 0].tolist()) == kept_by_definition(row, sampling)


@pytest.mark.parametrize("sampling", CUTS)
def test_logprobs_are_taken_before_the_cut_and_cut_logprobs_after_it(sampling: SamplingParams) -> None:
    logits, uniform = random_logits(4, 30, 11), random_uniform(4, 30)
    sampled = sample(logits, uniform, sampling)
    scaled = torch.log_softmax(logits / sampling.temperature, -1)
    for row, token in enumerate(sampled.tokens.tolist()):
        kept = sorted(kept_by_definition(scaled[row].exp().tolist(), sampling))
        cut = scaled[row, token] - torch.logsumexp(scaled[row, kept], 0)
        torch.testing.assert_close(sampled.logprobs[row], scaled[row, token], rtol=0, atol=1e-13)
        torch.testing.assert_close(sampled.cut_logprobs[row], cut, rtol=0, atol=1e-13)


def test_nothing_is_recorded_beside_the_logprobs_when_nothing_is_cut() -> None:
    logits, uniform = random_logits(4, 5, 11), random_uniform(4, 5)
    assert sample(logits, uniform, SamplingParams(temperature=0.7)).cut_logprobs is None
    assert sample(logits, uniform, SamplingParams(greedy=True, top_k=2)).cut_logprobs is None


def test_greedy_takes_the_likeliest_token_and_records_temperature_one() -> None:
    # p = softmax(0, ln 3, ln 3) = (1/7, 3/7, 3/7): the lower id among equals, at log(3/7) whatever the temperature.
    logits = torch.tensor([[0.0, math.log(3), math.log(3)]], dtype=torch.float64)
    sampled = sample(logits, torch.tensor([0.99], dtype=torch.float64), SamplingParams(greedy=True, temperature=0.1))
    assert sampled.tokens.tolist() == [1]
    assert sampled.logprobs.item() == pytest.approx(math.log(3 / 7), abs=1e-15)


def test_a_boundary_belongs_to_the_token_above_it() -> None:
    # Four equal tokens: the boundaries 1/4, 1/2, 3/4 are exact in binary.
    uniform = torch.tensor([0, 0.25 - 2**-54, 0.25, 0.5, 0.75, LARGEST_UNIFORM], dtype=torch.float64)
    expected = [0, 0, 1, 2, 3, 3]
    weights = torch.full((6, 4), 0.25, dtype=torch.float64)
    assert invert(weights, uniform)[0].tolist() == expected
    assert invert_by_blocks(weights, uniform)[0].tolist() == expected


@pytest.mark.parametrize("vocab", [8, 3000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_token_of_probability_zero_is_never_drawn(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.full((3, vocab), -torch.inf, dtype=dtype)
    logits[:, 2:5] = 0.0  # weightless tokens first, last and, in blocks, whole blocks of them
    uniform = torch.tensor([0.0, 0.5, LARGEST_UNIFORM], dtype=torch.float64)
    sampled = sample(logits, uniform, SamplingParams())
    assert sampled.tokens.tolist() == [2, 3, 4]
    torch.testing.assert_close(sampled.logprobs, torch.full((3,), -math.log(3)), check_dtype=False)


def test_a_rounding_error_at_the_end_or_of_a_parallel_sum_gives_a_token_that_has_weight() -> None:
    # Row 0: the cumulative sum stays below the target.  Row 1: a parallel sum lifts the weightless entry above it.
    weights = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.0, 0.5]], dtype=torch.float64)
    cumulative = torch.tensor([[0.5, 1 - 1e-9, 1 - 1e-9], [0.5, 0.5 + 1e-9, 1.0]], dtype=torch.float64)
    target = torch.tensor([1 - 1e-12, 0.5 + 1e-12], dtype=torch.float64)
    assert first_exceeding(weights, cumulative, target).tolist() == [1, 2]


@pytest.mark.parametrize("vocab", [5, 3000])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(greedy=True), SamplingParams(top_k=2), SamplingParams(top_p=0.5)]
)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_are_an_error_that_names_the_row(vocab, sampling, broken) -> None:
    logits = torch.zeros(3, vocab)
    logits[1] = broken
    sampled = sample(logits, torch.tensor([0.1, 0.5, LARGEST_UNIFORM], dtype=torch.float64), sampling)
    assert sampled.tokens.max() < vocab
    assert torch.isfinite(sampled.logprobs).tolist() == [True, False, True]
    with refused("prompt 1: ", "1 of 3 rows", error=RunError):
        require_finite(sampled.logprobs, row_name="prompt {}".format)
    require_finite(sampled.logprobs[[0, 2]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "greedy"),
        ({"temperature": math.nan}, "between 0.001 and 100"),
        ({"top_k": -1}, "top_k = -1"),
        ({"top_p": 1.5}, "at most 1"),
    ],
)
def test_settings_that_make_no_distribution_are_refused(options: dict[str, Any], message: str) -> None:
    with refused(message):
        SamplingParams(**options)


NO_SORT = [SamplingParams(), SamplingParams(greedy=True), SamplingParams(temperature=0.5), SamplingParams(min_p=0.1)]


@pytest.mark.parametrize("vocab", [300, 5_000])
@pytest.mark.parametrize("sampling", [*NO_SORT, *CUTS])
def test_nothing_waits_for_the_values_so_that_a_cuda_graph_can_hold_it(sampling: SamplingParams, vocab: int) -> None:
    # Tensors on "meta" have shapes and no values: reading a value, or a shape that depends on one, raises.
    logits = torch.empty(4, vocab, device="meta")
    sampled = sample(logits, torch.empty(4, dtype=torch.float64, device="meta"), sampling)
    assert sampled.tokens.shape == sampled.logprobs.shape == (4,)
    with pytest.raises(RuntimeError):
        sampled.tokens[0].item()


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [*NO_SORT, *CUTS])
def test_a_cuda_graph_draws_the_tokens_that_the_cpu_draws(sampling: SamplingParams) -> None:
    logits, uniform = random_logits(6, 64, 5_000), random_uniform(6, 64)
    still_logits, still_uniform = torch.zeros_like(logits, device="cuda"), torch.zeros_like(uniform, device="cuda")
    warm_up = torch.cuda.Stream()
    with torch.cuda.stream(warm_up):
        sample(still_logits, still_uniform, sampling)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampled = sample(still_logits, still_uniform, sampling)
    still_logits.copy_(logits)
    still_uniform.copy_(uniform)
    graph.replay()
    expected = sample(logits, uniform, sampling)
    assert sampled.tokens.tolist() == expected.tokens.tolist()
    torch.testing.assert_close(sampled.logprobs.cpu(), expected.logprobs, rtol=0, atol=1e-12)


def test_the_cuts_have_edges_that_belong_to_one_side() -> None:
    # All sums of these are exact.  The tokens before the second hold just 1/2, and 1/4 is just half of the likeliest.
    probabilities = torch.tensor([[0.125, 0.5, 0.25, 0.125]], dtype=torch.float64)
    for sampling, kept in (
        (SamplingParams(top_p=0.5), [1]),  # 1/2 is enough
        (SamplingParams(top_p=0.75), [1, 2]),
        (SamplingParams(top_p=0.75 + 2**-50), [0, 1, 2]),  # of the two equals the first
        (SamplingParams(min_p=0.5), [1, 2]),  # a half is not below a half
        (SamplingParams(min_p=0.5 + 2**-50), [1]),
        (SamplingParams(top_k=3), [0, 1, 2]),
        (SamplingParams(top_k=1), [1]),
    ):
        assert keep(probabilities, sampling)[0].nonzero()[:, 0].tolist() == kept, sampling


def test_top_k_keeps_its_tokens_however_small_they_are() -> None:
    # Beside 1, none of the others moves a float64 sum.
    probabilities = torch.tensor([[1e-21, 1.0, 1e-20, 1e-22]], dtype=torch.float64)
    assert keep(probabilities, SamplingParams(top_k=3))[0].tolist() == [True, True, True, False]


@pytest.mark.parametrize("vocab", [1, 2, 3, 5, 500, 513, 5_000])
def test_the_last_token_is_drawn_at_the_end_and_no_other_when_it_holds_all(vocab: int) -> None:
    weights = torch.zeros(3, vocab, dtype=torch.float64)
    weights[0] = 1.0
    weights[1:, -1] = 0.3
    uniform = torch.tensor([LARGEST_UNIFORM, LARGEST_UNIFORM, 0.0], dtype=torch.float64)
    for inverted in (invert, invert_by_blocks):
        tokens, total = inverted(weights, uniform)
        assert tokens.tolist() == [vocab - 1] * 3
        torch.testing.assert_close(total, weights.sum(1), rtol=1e-15, atol=0)


def test_a_uniform_that_rounding_lifts_to_the_total_draws_the_last_token_that_has_weight() -> None:
    # 1 is no uniform number of ours, and what a target is where a product rounds up.
    for vocab in (3, 500, 5_000):
        weights = torch.full((2, vocab), 0.1, dtype=torch.float64)
        weights[1, -1] = 0.0
        tokens, _ = invert_by_blocks(weights, torch.ones(2, dtype=torch.float64))
        assert tokens.tolist() == [vocab - 1, vocab - 2]
