"""The forward contract, and the shared-prompt layout, which keeps it: what the model itself gives on plain rows."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from posttrain.algorithms.preference_losses import OfPairs, PairObjective
from posttrain.algorithms.table import build_algorithm
from posttrain.errors import UserError
from posttrain.models import forward
from posttrain.models.classifiers.heads import new_scorer
from posttrain.models.conversation_masks import answered
from posttrain.models.forward import Completions, ForwardNeeds, ForwardPass, PlainForward, SharedPromptForward
from posttrain.models.logprobs import token_logprobs
from posttrain.models.policy import Policy, as_policy
from posttrain.models.shared_prompt import attention, decoder
from posttrain.models.shared_prompt.attention import PackedLayout, attend, repeated_heads
from posttrain.models.shared_prompt.fused import embed
from posttrain.training.pair_updates import accumulate_pairs
from posttrain.training.reference import FrozenCopy
from posttrain.training.sft.sft_run import accumulate_examples, held_out_loss
from posttrain.training.update import Objective
from tests.support import tiny
from tests.support.pairs import some_pairs
from tests.support.refusals import refused
from tests.support.tiny import tiny_model, tiny_policy

PROMPTS, COMPLETIONS, PROMPT_OF = [(1, 2, 3), (4, 5)], [(6, 7, 8, 9), (10,), (11, 12, 13)], [0, 0, 1]
SAMPLED = torch.tensor([True, False, False, True, True, False, True, True])
EVERYTHING = ForwardNeeds(temperature=0.7, entropies=True, entropy_gradient=True, statistics=False, distributions=True)


class OnlyTheContract:
    """A forward pass as a sharding wrapper is one: the two names of the contract and no others."""

    def __init__(self, inner: ForwardPass) -> None:
        self.padded = inner.padded
        self.completion_logprobs = inner.completion_logprobs


def update_gradient(policy: Policy) -> Tensor:
    """The gradient of an update with entropies and the full KL from a reference, through the policy's forward pass."""
    algorithm = build_algorithm({"name": "dapo", "kl": {"coefficient": 0.1, "estimator": "full"}})
    reference = FrozenCopy(tiny_policy(seed=1))
    batch = tiny.batch_of(tiny.SIX, tiny.SIX_ADVANTAGES, algorithm)
    objective = Objective(algorithm=algorithm, temperature=0.7, reference=reference, measure_entropy=True)
    gradient, _ = tiny.gradient_of_update(policy, batch, objective)
    return gradient


def supervised_gradient(policy: Policy) -> Tensor:
    examples = [answered(pair.prompt.tokens, pair.chosen.tokens) for pair in some_pairs()]
    accumulate_examples(policy, examples, 12, measure_entropy=True)
    held_out_loss(policy, examples, 12)
    return tiny.flat_gradient(policy)


def preference_gradient(policy: Policy) -> Tensor:
    pairs = some_pairs()
    zeros = torch.zeros(len(pairs), dtype=torch.float64)
    accumulate_pairs(policy, pairs, OfPairs(zeros, zeros), PairObjective(), 12)
    return tiny.flat_gradient(policy)


def scores(policy: Policy) -> Tensor:
    return new_scorer(policy, seed=0).scores(PROMPTS, COMPLETIONS, PROMPT_OF).detach()


READERS = {
    "update": update_gradient,
    "supervised": supervised_gradient,
    "preferences": preference_gradient,
    "scores": scores,
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize("padded", [False, True], ids=["shared", "plain"])
def test_a_forward_pass_with_nothing_but_the_contract_gives_the_same_bits(reader, padded: bool) -> None:
    policy = tiny.through_its_own_forward(tiny_policy()) if padded else tiny_policy()
    bare = tiny.twin(policy)
    assert torch.equal(reader(replace(bare, forward=OnlyTheContract(bare.forward))), reader(tiny.twin(policy)))


@pytest.mark.parametrize("family", ["qwen3", "gpt2_plain"])
@pytest.mark.parametrize("padded", [False, True], ids=["shared", "plain"])
def test_given_tokens_are_read_and_not_predicted(family: str, padded: bool) -> None:
    # Every part of the sampled tokens is that of all tokens, at their places; and a loss of them has the gradient of
    # the same loss of all tokens with a factor of 0 for those that were given.
    policy = tiny.through_its_own_forward(tiny_policy(family)) if padded else tiny_policy(family)
    other = distributions(tiny_policy(family, seed=1), None), distributions(tiny_policy(family, seed=1), SAMPLED)
    factors = torch.linspace(-1, 2, len(SAMPLED), dtype=torch.float64)
    found = []
    for sampled, reference, weights in zip((None, SAMPLED), other, (factors * SAMPLED, factors[SAMPLED]), strict=True):
        policy.model.zero_grad()
        needs = replace(EVERYTHING, divergences={"kl": reference}, values=lambda hidden: hidden.sum(-1))
        parts = policy.forward.completion_logprobs(batch_with(sampled), needs)
        columns = [parts.logprobs, parts.entropies, parts.values, parts.divergences["kl"]]
        torch.stack([(weights * column).sum() for column in columns if column is not None]).sum().backward()
        found.append(([*columns, parts.distributions.logits()], tiny.flat_gradient(policy)))
    (every, whole), (some, masked) = found
    for all_tokens, predicted in zip(every, some, strict=True):
        torch.testing.assert_close(predicted, all_tokens[SAMPLED], rtol=0, atol=1e-12)
    assert tiny.relative_distance(masked, whole) <= 1e-12


def batch_with(sampled: Tensor | None) -> Completions:
    return Completions(PROMPTS, COMPLETIONS, PROMPT_OF, sampled)


def distributions(policy: Policy, sampled: Tensor | None) -> object:
    needs = ForwardNeeds(logprobs=False, distributions=True)
    return policy.forward.completion_logprobs(batch_with(sampled), needs).distributions


def test_nothing_sampled_gives_nothing() -> None:
    parts = tiny_policy().forward.completion_logprobs(
        batch_with(torch.zeros(8, dtype=torch.bool)), ForwardNeeds(entropies=True, statistics=True)
    )
    assert parts.logprobs.shape == (0,)


def test_a_policy_without_a_gradient_keeps_that_of_the_head_that_reads_it() -> None:
    policy, slope = tiny_policy(), torch.ones(8, dtype=torch.float64, requires_grad=True)
    needs = ForwardNeeds(gradient=False, values=lambda hidden: slope * hidden.sum(-1))
    parts = policy.forward.completion_logprobs(batch_with(None), needs)
    assert not parts.logprobs.requires_grad
    parts.values.sum().backward()
    assert slope.grad is not None
    assert all(parameter.grad is None for parameter in policy.model.parameters())


class Sharded(torch.nn.Parameter):
    """A weight that says of itself what a sharded one does."""


Sharded.__name__ = "DTensor"


def with_hook(head: torch.nn.Linear) -> None:
    head.register_forward_hook(lambda module, inputs, output: output / 2)


def with_shards(head: torch.nn.Linear) -> None:
    head.weight.__class__ = Sharded


@pytest.mark.parametrize(
    ("change", "remedy"),
    [(with_hook, "Remove what was added"), (with_shards, "of the unsharded model")],
    ids=["hook", "shards"],
)
def test_an_output_layer_that_cannot_be_read_is_refused_with_the_remedy_of_its_cause(change, remedy: str) -> None:
    model = tiny_model("llama", torch.float32)
    change(model.lm_head)
    with pytest.raises(UserError, match="output layer") as refusal:
        as_policy(model, tiny.tokenizer())
    assert remedy in str(refusal.value)
    assert "target_modules" not in str(refusal.value)


@pytest.mark.parametrize("packed", [True, False])
def test_whole_distributions_carry_no_gradient(packed: bool) -> None:
    """They are what a loss is compared with; the policy's own log-probs of the same pass have one."""
    policy = tiny_policy() if packed else tiny.through_its_own_forward(tiny_policy())
    batch = Completions(prompts=PROMPTS, completions=COMPLETIONS, prompt_of=PROMPT_OF)
    parts = policy.forward.completion_logprobs(batch, EVERYTHING)
    assert parts.logprobs.requires_grad
    assert not parts.distributions.logits().requires_grad


CPU = torch.device("cpu")
DRAW = random.Random(0)
Tokens = tuple[int, ...]
Rows = tuple[list[Tokens], list[Tokens], list[int]]

BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Relative distance between two ways to the same gradient; the design asks for 1e-6 in float64."""


# Prompts of one token and of many; completions of one token, which have no input of their own; a group of one.
ROWS: Rows = (
    [tuple(DRAW.choices(range(tiny.VOCAB), k=length)) for length in (5, 1, 17, 3)],
    [tuple(DRAW.choices(range(tiny.VOCAB), k=length)) for length in (1, 4, 9, 2, 3, 1, 1, 12, 11, 1, 7, 6)],
    [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3],
)
TOGETHER = torch.linspace(-1.0, 2.0, sum(len(tokens) for tokens in ROWS[1]), dtype=torch.float64)
"""A weight of its own for every completion token, so that a row out of place shows."""


def hidden(policy: Policy, layout: str = "shared", rows: Rows = ROWS) -> torch.Tensor:
    """Hidden states of completions, by rows that share their prompts, rows side by side, or padded ones."""
    if layout == "padded":
        return PlainForward(policy.model, policy.compute_dtype).completion_hidden(Completions(*rows))
    assert isinstance(policy.forward, SharedPromptForward)
    if layout == "shared":
        return forward.packed_hidden(policy.forward.decoder, Completions(*rows), shared=True)
    prompts, completions, prompt_of = rows
    apart = Completions([prompts[p] for p in prompt_of], completions, range(len(completions)))
    return forward.packed_hidden(policy.forward.decoder, apart, shared=False)


def loss(logprobs: torch.Tensor) -> torch.Tensor:
    return (TOGETHER.to(logprobs) * logprobs).sum()


def gradient(policy: Policy, value: torch.Tensor) -> torch.Tensor:
    policy.model.zero_grad()
    value.backward()
    return tiny.flat_gradient(policy)


@pytest.mark.parametrize("dtype", BOUNDS, ids=["f32", "f64"])
@pytest.mark.parametrize(
    ("layout", "family"),
    [
        *((layout, family) for layout in ("shared", "sequences") for family in tiny.ALL_DECODERS),
        ("padded", "gpt2_plain"),
        ("padded", "qwen3"),
    ],
)
def test_every_layout_gives_the_loss_and_gradient_of_the_plain_model(layout: str, family: str, dtype) -> None:
    policy, bound = tiny_policy(family, dtype), BOUNDS[dtype]
    prompts, completions, prompt_of = ROWS
    rows = [(prompts[p], tokens) for p, tokens in zip(prompt_of, completions, strict=True)]
    expected = loss(torch.cat([tiny.plain_logprobs(policy.model, *row) for row in rows]))
    targets = torch.tensor([token for tokens in completions for token in tokens])
    actual = loss(token_logprobs(hidden(policy, layout), policy.output_layer, targets))
    assert actual.item() == pytest.approx(expected.item(), rel=bound)
    assert tiny.relative_distance(gradient(policy, actual), gradient(policy, expected)) <= bound


@pytest.mark.parametrize("fill", [0.0, 0.75, 1.0], ids=["one_bucket", "some", "own_bucket_for_each_length"])
def test_buckets_of_like_lengths_change_no_hidden_state(fill: float, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy()
    monkeypatch.setattr(attention, "BUCKET_FILL", fill)
    torch.testing.assert_close(hidden(policy), hidden(policy, "padded"), rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_rows_and_prompts_changes_nothing(seed: int) -> None:
    policy, source = tiny_policy("llama"), random.Random(seed)
    prompts, completions, prompt_of = ROWS
    parts = hidden(policy).split([len(tokens) for tokens in completions])
    rows, places = list(range(len(completions))), list(range(len(prompts)))
    source.shuffle(rows)
    source.shuffle(places)
    of_rows = [places.index(prompt_of[row]) for row in rows]
    moved = hidden(policy, rows=([prompts[place] for place in places], [completions[row] for row in rows], of_rows))
    torch.testing.assert_close(moved, torch.cat([parts[row] for row in rows]), rtol=0, atol=1e-12)


def test_what_a_sibling_says_reaches_no_other_completion() -> None:
    # Not to rounding but to the bit: of the other rows nothing is read at all.
    policy, (prompts, completions, prompt_of) = tiny_policy(), ROWS
    other = [completions[0], tuple((token + 1) % tiny.VOCAB for token in completions[1]), *completions[2:]]
    before, after = (hidden(policy, rows=(prompts, rows, prompt_of)) for rows in (completions, other))
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
    with refused("a root has at least one token", error=AssertionError):
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
