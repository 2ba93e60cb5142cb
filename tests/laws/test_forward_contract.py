"""The forward contract: a loss reads nothing else of a forward pass, and only sampled tokens are predicted."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from posttrain.algorithms.preference_losses import OfPairs, PairObjective
from posttrain.algorithms.table import build_algorithm
from posttrain.errors import UserError
from posttrain.models.classifiers.heads import new_scorer
from posttrain.models.conversation_masks import answered
from posttrain.models.forward import Completions, ForwardNeeds, ForwardPass
from posttrain.models.policy import Policy, as_policy
from posttrain.training.pair_updates import accumulate_pairs
from posttrain.training.reference import FrozenCopy
from posttrain.training.sft.sft_run import accumulate_examples, held_out_loss
from posttrain.training.update import Objective
from tests.support import tiny
from tests.support.pairs import some_pairs
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
        assert parts.distributions is not None
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
    assert parts.logprobs is not None
    assert parts.logprobs.shape == (0,)


def test_a_policy_without_a_gradient_keeps_that_of_the_head_that_reads_it() -> None:
    policy, slope = tiny_policy(), torch.ones(8, dtype=torch.float64, requires_grad=True)
    needs = ForwardNeeds(gradient=False, values=lambda hidden: slope * hidden.sum(-1))
    parts = policy.forward.completion_logprobs(batch_with(None), needs)
    assert parts.logprobs is not None
    assert parts.values is not None
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
    assert parts.distributions is not None
    assert not parts.distributions.logits().requires_grad
