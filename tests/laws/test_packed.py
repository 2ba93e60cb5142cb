"""The shared-prompt layout gives the hidden states, losses and gradients of the Hugging Face model on plain rows."""

import random

import pytest
import torch

from posttrain.models import forward
from posttrain.models.forward import Completions, PlainForward, SharedPromptForward
from posttrain.models.logprobs import token_logprobs
from posttrain.models.policy import Policy
from posttrain.models.shared_prompt import attention, decoder
from posttrain.models.shared_prompt.attention import PackedLayout, attend, repeated_heads
from posttrain.models.shared_prompt.fused import embed
from tests.support.refusals import refused
from tests.support.tiny import (
    ALL_DECODERS,
    VOCAB,
    flat_gradient,
    plain_logprobs,
    relative_distance,
    through_its_own_forward,
    tiny_policy,
    twin,
)

CPU = torch.device("cpu")
Tokens = tuple[int, ...]
Rows = tuple[list[Tokens], list[Tokens], list[int]]

BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Relative distance between two ways to the same gradient; the design asks for 1e-6 in float64."""


def some_rows(prompt_lengths: list[int], completion_lengths: list[list[int]], seed: int = 0) -> Rows:
    """Prompts, completions and the prompt that each completion continues."""
    source = random.Random(seed)
    prompts = [tuple(source.choices(range(VOCAB), k=length)) for length in prompt_lengths]
    completions = [tuple(source.choices(range(VOCAB), k=length)) for group in completion_lengths for length in group]
    return prompts, completions, [p for p, group in enumerate(completion_lengths) for _ in group]


# Prompts of one token and of many; completions of one token, which have no input of their own; a group of one.
ROWS = some_rows([5, 1, 17, 3], [[1, 4, 9, 2], [3, 1, 1], [12, 11, 1, 7], [6]])
TOGETHER = torch.linspace(-1.0, 2.0, sum(len(tokens) for tokens in ROWS[1]), dtype=torch.float64)
"""A weight of its own for every completion token, so that a row out of place shows."""


def shared_hidden(
    policy: Policy, prompts: list[Tokens], completions: list[Tokens], prompt_of: list[int]
) -> torch.Tensor:
    assert isinstance(policy.forward, SharedPromptForward)
    return forward.shared_hidden(policy.forward.decoder, Completions(prompts, completions, prompt_of))


def sequence_hidden(policy: Policy, prompts: list[Tokens], completions: list[Tokens]) -> torch.Tensor:
    assert isinstance(policy.forward, SharedPromptForward)
    return forward.sequence_hidden(policy.forward.decoder, Completions(prompts, completions, range(len(completions))))


def plain_hidden(
    policy: Policy, prompts: list[Tokens], completions: list[Tokens], prompt_of: list[int]
) -> torch.Tensor:
    return PlainForward(policy.model, policy.compute_dtype).completion_hidden(
        Completions(prompts, completions, prompt_of)
    )


def loss(policy: Policy, hidden: torch.Tensor, completions: list[Tokens]) -> torch.Tensor:
    targets = torch.tensor([token for tokens in completions for token in tokens])
    logprobs = token_logprobs(hidden, policy.output_layer, targets)
    return (TOGETHER[: len(targets)].to(logprobs) * logprobs).sum()


def hugging_face_loss(policy: Policy, rows: Rows) -> torch.Tensor:
    """The same through one unpadded row of the model at a time."""
    prompts, completions, prompt_of = rows
    logprobs = torch.cat(
        [plain_logprobs(policy.model, prompts[p], c) for p, c in zip(prompt_of, completions, strict=True)]
    )
    return (TOGETHER[: len(logprobs)].to(logprobs) * logprobs).sum()


def gradient(policy: Policy, value: torch.Tensor) -> torch.Tensor:
    policy.model.zero_grad()
    value.backward()
    return flat_gradient(policy)


@pytest.mark.parametrize("dtype", BOUNDS, ids=["f32", "f64"])
@pytest.mark.parametrize("family", ALL_DECODERS)
def test_shared_prompts_give_the_loss_and_gradient_of_the_plain_model(family: str, dtype: torch.dtype) -> None:
    policy, bound = tiny_policy(family, dtype), BOUNDS[dtype]
    expected = hugging_face_loss(policy, ROWS)
    actual = loss(policy, shared_hidden(policy, *ROWS), ROWS[1])
    assert actual.item() == pytest.approx(expected.item(), rel=bound)
    assert relative_distance(gradient(policy, actual), gradient(policy, expected)) <= bound


@pytest.mark.parametrize("dtype", BOUNDS, ids=["f32", "f64"])
@pytest.mark.parametrize("family", ALL_DECODERS)
def test_whole_sequences_give_the_loss_and_gradient_of_the_plain_model(family: str, dtype: torch.dtype) -> None:
    policy, bound = tiny_policy(family, dtype), BOUNDS[dtype]
    prompts, completions, prompt_of = ROWS
    expected = hugging_face_loss(policy, ROWS)
    actual = loss(policy, sequence_hidden(policy, [prompts[p] for p in prompt_of], completions), completions)
    assert actual.item() == pytest.approx(expected.item(), rel=bound)
    assert relative_distance(gradient(policy, actual), gradient(policy, expected)) <= bound


@pytest.mark.parametrize("dtype", BOUNDS, ids=["f32", "f64"])
@pytest.mark.parametrize("family", ["gpt2_plain", "qwen3"])
def test_padded_rows_give_the_loss_and_gradient_of_the_plain_model(family: str, dtype: torch.dtype) -> None:
    policy, bound = through_its_own_forward(tiny_policy(family, dtype)), BOUNDS[dtype]
    expected = hugging_face_loss(policy, ROWS)
    actual = loss(policy, policy.forward.completion_hidden(Completions(*ROWS)), ROWS[1])
    assert actual.item() == pytest.approx(expected.item(), rel=bound)
    assert relative_distance(gradient(policy, actual), gradient(policy, expected)) <= bound


def test_the_three_layouts_give_the_same_hidden_states() -> None:
    policy = tiny_policy()
    prompts, completions, prompt_of = ROWS
    shared = shared_hidden(policy, *ROWS)
    torch.testing.assert_close(shared, plain_hidden(policy, *ROWS), rtol=0, atol=1e-12)
    sequences = sequence_hidden(policy, [prompts[p] for p in prompt_of], completions)
    torch.testing.assert_close(shared, sequences, rtol=0, atol=1e-12)


@pytest.mark.parametrize("fill", [0.0, 0.75, 1.0], ids=["one_bucket", "some", "own_bucket_for_each_length"])
def test_buckets_of_like_lengths_change_no_hidden_state(fill: float, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy()
    expected = plain_hidden(policy, *ROWS)
    monkeypatch.setattr(attention, "BUCKET_FILL", fill)
    torch.testing.assert_close(shared_hidden(policy, *ROWS), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_rows_and_prompts_changes_nothing(seed: int) -> None:
    policy, source = tiny_policy("llama"), random.Random(seed)
    prompts, completions, prompt_of = ROWS
    parts = dict(enumerate(shared_hidden(policy, *ROWS).split([len(tokens) for tokens in completions])))
    rows, places = list(range(len(completions))), list(range(len(prompts)))
    source.shuffle(rows)
    source.shuffle(places)
    moved = shared_hidden(
        policy,
        [prompts[place] for place in places],
        [completions[row] for row in rows],
        [places.index(prompt_of[row]) for row in rows],
    )
    torch.testing.assert_close(moved, torch.cat([parts[row] for row in rows]), rtol=0, atol=1e-12)


def test_a_group_may_be_split_among_calls() -> None:
    policy, (prompts, completions, prompt_of) = tiny_policy("qwen2"), ROWS
    expected = gradient(policy, loss(policy, shared_hidden(policy, *ROWS), completions))
    policy = twin(policy)
    start = 0
    for half in (slice(0, 6), slice(6, None)):  # the second group is cut in two
        hidden = shared_hidden(policy, prompts, completions[half], prompt_of[half])
        targets = torch.tensor([token for tokens in completions[half] for token in tokens])
        logprobs = token_logprobs(hidden, policy.output_layer, targets)
        (TOGETHER[start : start + len(targets)] * logprobs).sum().backward()
        start += len(targets)
    assert relative_distance(flat_gradient(policy), expected) <= 1e-12


def test_a_completion_of_one_token_is_predicted_by_its_prompt_alone() -> None:
    policy, prompt = tiny_policy(), (3, 9, 4)
    hidden = shared_hidden(policy, [prompt], [(7,), (8,)], [0, 0])
    expected = policy.model.model(input_ids=torch.tensor([prompt])).last_hidden_state[0, -1]
    torch.testing.assert_close(hidden, expected.expand(2, -1), rtol=0, atol=1e-12)


def test_what_a_sibling_says_reaches_no_other_completion() -> None:
    # Not to rounding but to the bit: of the other rows nothing is read at all.
    policy, (prompts, completions, prompt_of) = tiny_policy(), ROWS
    other = [completions[0], tuple((token + 1) % VOCAB for token in completions[1]), *completions[2:]]
    before, after = (shared_hidden(policy, prompts, rows, prompt_of) for rows in (completions, other))
    first, second = len(completions[0]), len(completions[0]) + len(completions[1])
    assert torch.equal(before[:first], after[:first])
    assert torch.equal(before[second:], after[second:])
    assert not torch.equal(before[first + 1 : second], after[first + 1 : second])


def test_positions_go_on_from_the_prompt() -> None:
    # Two roots of 3 and 2 tokens, then branches of 2, 0 and 1 tokens that continue roots 0, 1 and 1.
    layout = PackedLayout([3, 2], [2, 0, 1], [0, 1, 1])
    assert layout.num_tokens == 8
    assert layout.indices(CPU).positions.tolist() == [0, 1, 2, 0, 1, 3, 4, 2]


def test_every_token_has_one_slot_and_is_found_there() -> None:
    layout = PackedLayout([3, 20, 2], [2, 9, 1, 0, 10], [0, 1, 1, 2, 2])
    indices = layout.indices(CPU)
    assert indices.token_of_slot[indices.slot_of_token].tolist() == list(range(47))
    # 20 | 3 | 2 (2 is less than 3/4 of 3), then 10 and 9 together | 2 | 1: padding in one place only.
    assert len(indices.token_of_slot) == 20 + 3 + 2 + 2 * 10 + 2 + 1


def test_heads_that_are_repeated_give_what_grouped_heads_give() -> None:
    dice = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 5, 7, generator=dice, dtype=torch.float64) for heads in (6, 2, 2))
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    grouped = attend(query, key, value, mask)
    assert repeated_heads(key, 6).shape[1] == 6
    repeated = attend(query, repeated_heads(key, 6), repeated_heads(value, 6), mask)
    torch.testing.assert_close(repeated, grouped, rtol=0, atol=1e-14)


def test_a_prompt_without_a_token_has_no_place_in_the_layout() -> None:
    with refused("a root has a token at least", error=AssertionError):
        PackedLayout([3, 0])


def test_a_prompt_goes_through_the_model_once_for_all_its_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, seen = tiny_policy(), []

    def counted(embedding: torch.nn.Embedding, tokens: torch.Tensor) -> torch.Tensor:
        seen.append(tokens.numel())
        return embed(embedding, tokens)

    monkeypatch.setattr(decoder, "embed", counted)
    prompts, completions = [(1, 2, 3, 4), (6, 7)], [(8, 9), (10,), (12, 13, 14), (3,), (4, 5)]
    policy.forward.completion_hidden(Completions(prompts, completions, [0, 0, 0, 1, 1]))
    # 4 + 2 tokens of prompts and 2 + 1 + 3 + 1 + 2 of completions; prompts once for each would be 3 · 4 + 2 · 2 + 9.
    assert sum(seen) <= 6 + 9
