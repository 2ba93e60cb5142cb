"""An adapter's dropout is a function of what a token is, so that no gradient depends on how rows are laid out."""

from collections.abc import Sequence

import peft
import pytest
import torch
from torch import Tensor

from posttrain.algorithms.table import build_algorithm
from posttrain.models.adapters.in_force import adapter_dropout
from posttrain.models.adapters.lora import TokenDropout, lora_layers, token_keys
from posttrain.models.conversation_masks import answered
from posttrain.models.forward import Completions
from posttrain.models.model_outputs import enable_recomputation
from posttrain.models.policy import Policy, as_policy
from posttrain.options.model import AdapterOptions
from posttrain.training.observations import Observations
from posttrain.training.sft.sft_run import accumulate_examples
from posttrain.training.update import Objective, micro_loss
from tests.support import tiny
from tests.support.adapted import Pair, adapted_policy, completion_logprobs
from tests.support.refusals import refused
from tests.support.tiny import tiny_model

DROPPING = AdapterOptions(rank=3, alpha=6, dropout=0.3)
PROMPTS = [(1, 2, 3, 4), (10, 11)]
COMPLETIONS = [[(4, 5), (6, 1, 2), (7, 8, 9, 5)], [(12, 13, 14), (15, 11), (16, 3, 3, 3, 11)]]
GROUPS = [
    tiny.written_group(*each, name="ab"[i], draw=i) for i, each in enumerate(zip(PROMPTS, COMPLETIONS, strict=True))
]
EXAMPLES = [answered((1, 2, 3), (4, 5)), answered((6,), (7, 8, 9, 10, 5)), answered((11, 12, 13, 14), (15, 11))]
each_forward = pytest.mark.parametrize("forward", ["auto", "plain"])


def policy_of(family: str = "qwen3", *, forward: str = "auto", options: AdapterOptions = DROPPING) -> Policy:
    policy = adapted_policy(family, options, dtype=torch.float64, forward=forward)
    assert (policy.forward_reason is None) == (forward == "auto" and family != "gpt2_plain")
    return policy


def gradient(policy: Policy, *, tokens: int = 10_000, update: int = 7, rows: Sequence[int] = range(6)) -> Tensor:
    """The gradient of an update over micro-batches of so many tokens, its completions in the order of `rows`."""
    algorithm = build_algorithm({"name": "grpo"})
    objective = Objective(algorithm=algorithm, temperature=1.0)
    batch = tiny.batch_of(GROUPS, tiny.SIX_ADVANTAGES, algorithm).select(rows)
    policy.model.zero_grad()
    with adapter_dropout(policy.model, 0, update):
        for micro in batch.split(tokens, padded=policy.forward.padded):
            micro_loss(policy, micro, objective, Observations()).backward()
    return tiny.flat_gradient(policy)


@each_forward
@pytest.mark.parametrize("family", ["qwen3", "gpt2_plain"])
def test_the_gradient_depends_on_no_micro_batch_and_no_order_of_rows(family: str, forward: str) -> None:
    policy = policy_of(family, forward=forward)
    whole = gradient(policy)
    for tokens in (1, 12, 17):  # completions alone; some of a group; a group at a time
        assert tiny.relative_distance(gradient(policy, tokens=tokens), whole) <= 1e-6
    assert tiny.relative_distance(gradient(policy, rows=[5, 3, 4, 1, 0, 2], tokens=13), whole) <= 1e-6
    assert tiny.relative_distance(gradient(policy, update=8), whole) > 0.05
    assert tiny.relative_distance(gradient(policy_of(family, options=AdapterOptions(rank=3, alpha=6))), whole) > 0.05


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "gemma2", "phi3"])
def test_padded_rows_drop_what_packed_ones_with_a_shared_prompt_drop(family: str) -> None:
    assert tiny.relative_distance(gradient(policy_of(family)), gradient(policy_of(family, forward="plain"))) <= 1e-6


def test_a_prompt_computed_once_drops_what_it_drops_before_each_of_its_completions() -> None:
    policy, completions = policy_of(), [(4, 5, 6), (7, 8)]

    def hidden(prompts: list[tuple[int, ...]], prompt_of: list[int]) -> Tensor:
        with adapter_dropout(policy.model, 0, 0):
            return policy.forward.completion_hidden(Completions(prompts, completions, prompt_of)).detach()

    once = hidden(PROMPTS[:1], [0, 0])
    torch.testing.assert_close(hidden(PROMPTS[:1] * 2, [0, 1]), once, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        seen = policy.forward.completion_hidden(Completions(PROMPTS[:1], completions, [0, 0]))
    assert (once - seen).abs().max() > 0.01


@each_forward
def test_supervised_gradients_depend_on_no_micro_batch_either(forward: str) -> None:
    policy = policy_of(forward=forward)

    def supervised(budget: int) -> Tensor:
        policy.model.zero_grad()
        with adapter_dropout(policy.model, 0, 2):
            accumulate_examples(policy, EXAMPLES, budget)
        return tiny.flat_gradient(policy)

    assert tiny.relative_distance(supervised(4), supervised(1000)) <= 1e-6


@each_forward
def test_layers_that_are_computed_again_drop_the_same(forward: str) -> None:
    kept, again = policy_of(forward=forward), policy_of(forward=forward)
    enable_recomputation(again.model)
    for tokens in (10_000, 12):
        found, expected = (gradient(each, tokens=tokens) for each in (again, kept))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def policy_of_peft(forward: str = "auto", **settings: object) -> Policy:
    """A policy with peft's layers in place of those of `policy_of`, of the same numbers."""
    ours = policy_of()
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", lora_dropout=0.3, **settings)
    made = peft.get_peft_model(tiny_model("qwen3", torch.float64, exact=False), config)
    with torch.no_grad():
        for name, layer in lora_layers(ours.model).items():
            theirs = made.get_base_model().get_submodule(name)
            theirs.lora_A["default"].weight = torch.nn.Parameter(layer.lora_A.detach().clone())
            theirs.lora_B["default"].weight = torch.nn.Parameter(layer.lora_B.detach().clone())
    policy = as_policy(made, tiny.tokenizer(), forward=forward)
    assert (policy.forward_reason is None) == (forward == "auto" and not settings)
    return policy


@each_forward
def test_layers_of_peft_drop_what_ours_drop_and_only_in_updates(forward: str) -> None:
    policy, ours = policy_of_peft(forward), policy_of(forward=forward)
    whole = gradient(policy)
    assert tiny.relative_distance(gradient(policy, tokens=12, rows=[5, 3, 4, 1, 0, 2]), whole) <= 1e-6
    gradient(ours)
    for name, layer in lora_layers(ours.model).items():
        theirs = policy.model.get_submodule(name)
        for matrix in ("lora_A", "lora_B"):
            found, expected = getattr(theirs, matrix)["default"].weight.grad, getattr(layer, matrix).grad
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    seen = [completion_logprobs(each, [Pair((1, 2, 3), (4, 5))]) for each in (policy, ours)]
    torch.testing.assert_close(*seen, rtol=1e-6, atol=1e-6)


def test_weight_decomposition_has_dropout_too() -> None:
    policy = policy_of_peft(use_dora=True)
    whole = gradient(policy)
    assert tiny.relative_distance(gradient(policy, tokens=12), whole) <= 1e-6
    assert tiny.relative_distance(gradient(policy, update=8), whole) > 0.05
    assert not any(module.training for module in policy.model.modules())


def test_what_the_adapter_does_not_see_takes_no_part_in_value_or_gradient() -> None:
    """y = W·x + s·B·(A·(m∘x)): with A, B and W known, both are matrix products of m∘x."""
    policy = policy_of(forward="plain", options=AdapterOptions(rank=3, alpha=6, dropout=0.5, targets=("q_proj",)))
    layer = policy.model.model.layers[0].self_attn.q_proj
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    outward = torch.randn(2, 5, 32, dtype=torch.float64)
    with adapter_dropout(policy.model, 0, 0):
        layer.input_dropout.tokens = torch.arange(10).view(2, 5)
        mask = layer.input_dropout.applied(torch.ones_like(x)).detach()
        (layer(x) * outward).sum().backward()
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    weight, change = layer.base_layer.weight, 2 * layer.lora_B @ layer.lora_A
    torch.testing.assert_close(x.grad, outward @ weight + mask * (outward @ change))
    seen = (mask * x).flatten(0, 1)
    torch.testing.assert_close(layer.lora_A.grad, 2 * (outward.flatten(0, 1) @ layer.lora_B).T @ seen)


def masks(share: float, *, key: int = 1, rows: int = 1000, inputs: int = 300) -> Tensor:
    """1 where an input is seen."""
    tokens = token_keys([range(rows)], [], []).prompts[0]
    return (TokenDropout(share, key, tokens).applied(torch.ones(rows, inputs)) > 0).double()


@pytest.mark.parametrize("share", [0.05, 0.3, 0.75])
def test_the_share_is_as_asked_in_all_and_in_every_row_and_column(share: float) -> None:
    """Of n draws the share dropped has a standard deviation of √(p (1-p) / n); 5 of them at 1300 places."""
    kept = masks(share)
    one = (share * (1 - share)) ** 0.5
    assert abs(1 - kept.mean().item() - share) < 4 * one / 300_000**0.5
    for axis in (0, 1):
        assert (1 - kept.mean(dim=axis) - share).abs().max() < 5 * one / kept.shape[axis] ** 0.5
    # Were rows or columns alike, their means would scatter by more, or by less, than chance has them.
    assert kept.mean(dim=1).std().item() == pytest.approx(one / 300**0.5, rel=0.1)
    assert kept.mean(dim=0).std().item() == pytest.approx(one / 1000**0.5, rel=0.2)


def test_near_tokens_features_updates_and_layers_have_nothing_in_common() -> None:
    """A correlation of 300,000 pairs of independent draws is within 4 / √300,000 of 0."""
    kept = masks(0.5)
    others = [kept.roll(1, 0), kept.roll(1, 1), kept.roll((1, 1), (0, 1)), kept.roll(32, 1), masks(0.5, key=2)]
    others.append(masks(0.5, key=1 - 2**63))
    for other in others:
        correlation = torch.corrcoef(torch.stack([kept.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation.item()) < 4 / 300_000**0.5
    # Pairs of rows and columns: of a hash that is no more than a product, four corners would decide one another.
    corners = (kept + kept.roll(1, 0) + kept.roll(1, 1) + kept.roll((1, 1), (0, 1))) % 2
    assert abs(corners.mean().item() - 0.5) < 4 * 0.5 / 300_000**0.5


def test_what_is_kept_is_as_much_larger_as_less_is_seen() -> None:
    kept = TokenDropout(0.2, 5, torch.arange(50)).applied(torch.full((50, 40), 3.0))
    assert set(kept.unique().tolist()) == {0.0, 3.75}


def test_large_inputs_get_the_masks_that_their_rows_get_alone() -> None:
    tokens, x = token_keys([range(64)], [], []).prompts[0], torch.randn(64, 5000)
    whole = TokenDropout(0.4, 9, tokens).applied(x)
    for row in (0, 25, 26, 63):
        assert torch.equal(TokenDropout(0.4, 9, tokens[row : row + 1]).applied(x[row : row + 1])[0], whole[row])


def test_a_row_is_known_by_its_tokens_and_where_its_prompt_ends() -> None:
    one = token_keys([(1, 2), (1, 2, 3)], [(3, 4, 5), (3, 4, 6), (4, 5)], [0, 0, 1])
    alone = token_keys([(1, 2)], [(3, 4, 6)], [0])
    assert torch.equal(one.prompts[0], alone.prompts[0])
    assert torch.equal(one.completions[1], alone.completions[0])
    every = torch.cat([*one.prompts, *one.completions])
    assert len(every) == 2 + 3 + 2 + 2 + 1
    assert len(every.unique()) == len(every)


def test_a_layer_that_reads_other_rows_than_tokens_is_told() -> None:
    policy = policy_of(forward="plain")
    layer = next(iter(lora_layers(policy.model).values()))
    with adapter_dropout(policy.model, 0, 0):
        layer.input_dropout.tokens = torch.arange(10).view(2, 5)
        assert layer(torch.ones(10, 16, dtype=torch.float64)).shape[0] == 10
        for shape in ((7, 16), (5, 2, 16)):
            with refused("model.adapter.dropout: model.layers.0", "Leave dropout at 0"):
                layer(torch.ones(*shape, dtype=torch.float64))


def test_without_dropout_no_key_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("posttrain.models.forward.token_keys", never)
    for forward in ("auto", "plain"):
        gradient(policy_of(forward=forward, options=AdapterOptions(rank=3, alpha=6)))
