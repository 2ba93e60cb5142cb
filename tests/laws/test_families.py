"""Every family of the table computes what its model computes, or says why it does not: gradients, types, memory."""

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager

import peft
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.algorithms.table import build_algorithm
from posttrain.models.forward import Completions, PlainForward, SharedPromptForward
from posttrain.models.logprobs import token_logprobs
from posttrain.models.policy import Policy, as_policy
from posttrain.models.shared_prompt.families import FAMILIES, shared_prompt_refusal
from posttrain.training.update import Objective
from tests.support import tiny
from tests.support.decoders import WINDOW
from tests.support.tiny import tiny_model, tiny_policy

# Prompts shorter and longer than a window, completions of one token and of many, a group of one.
PROMPTS = [tuple(range(1, 12)), (3,), (7, 2, 9)]
COMPLETIONS = [(4, 8, 15, 16, 23, 4, 2, 9), (1,), tuple(range(20)), (5, 6), (9, 9, 1)]
PROMPT_OF = [0, 0, 1, 2, 2]
TEMPERATURE = 0.7

BATCH = Completions(PROMPTS, COMPLETIONS, PROMPT_OF)
each_family = pytest.mark.parametrize("family", tiny.ALL_DECODERS)


def loss(policy: Policy) -> Tensor:
    """A weight of its own for every completion token, so that none stands for another."""
    targets = torch.tensor([token for tokens in COMPLETIONS for token in tokens])
    hidden = policy.forward.completion_hidden(BATCH)
    logprobs = token_logprobs(hidden, policy.output_layer, targets, temperature=TEMPERATURE)
    return (torch.linspace(-1, 2, len(targets), dtype=torch.float64).to(logprobs) * logprobs).sum()


def plain_loss(model: PreTrainedModel) -> Tensor:
    """The same by the model's own forward."""
    rows = zip(PROMPT_OF, COMPLETIONS, strict=True)
    logprobs = torch.cat([tiny.plain_logprobs(model, PROMPTS[p], tokens, TEMPERATURE) for p, tokens in rows])
    return (torch.linspace(-1, 2, len(logprobs), dtype=torch.float64).to(logprobs) * logprobs).sum()


def gradients(policy: Policy, value: Tensor) -> dict[str, Tensor]:
    policy.model.zero_grad()
    value.backward()
    return {name: each.grad.clone() for name, each in policy.model.named_parameters() if each.requires_grad}


def test_every_family_of_the_table_has_a_tiny_model() -> None:
    assert set(FAMILIES) == set(tiny.ALL_DECODERS)
    assert max(len(PROMPTS[p]) + len(c) for p, c in zip(PROMPT_OF, COMPLETIONS, strict=True)) > 3 * WINDOW


@each_family
def test_the_gradient_of_every_parameter_is_that_of_the_models_own_forward(family: str) -> None:
    policy = tiny_policy(family)
    actual = gradients(policy, loss(policy))
    expected = gradients(policy, plain_loss(policy.model))
    largest = max(gradient.norm() for gradient in expected.values())
    for name, gradient in expected.items():
        moves = not name.endswith("k_proj.bias")  # a bias of all keys moves nothing
        assert gradient.norm() > 1e-4 * largest or not moves, name
        assert (actual[name] - gradient).norm() <= 1e-11 * (gradient.norm() + 1e-3 * largest), name


@each_family
def test_micro_batches_change_no_gradient(family: str) -> None:
    policy, algorithm = tiny_policy(family), build_algorithm({"name": "grpo"})
    groups = [
        tiny.written_group(prompt, [c for c, p in zip(COMPLETIONS, PROMPT_OF, strict=True) if p == index], draw=index)
        for index, prompt in enumerate(PROMPTS)
    ]
    groups[1] = tiny.written_group(PROMPTS[1], [COMPLETIONS[2], (1, 2)], draw=1)
    batch = tiny.batch_of(groups, [[1, -1], [0.5, -2], [1, 0.25]], algorithm)
    objective = Objective(algorithm=algorithm, temperature=TEMPERATURE)
    whole, _ = tiny.gradient_of_update(policy, batch, objective)
    split, _ = tiny.gradient_of_update(policy, batch, objective, tokens_per_microbatch=24)
    assert tiny.relative_distance(split, whole) <= 1e-12


@each_family
def test_weights_in_bfloat16_err_no_more_than_the_models_own_forward_does(family: str) -> None:
    # As the library makes it, nothing exact, so that nothing is trusted either.
    policy = as_policy(tiny_model(family, exact=False).to(torch.bfloat16), tiny.tokenizer())
    assert policy.forward_reason is None
    assert isinstance(policy.forward, SharedPromptForward)
    exact = as_policy(tiny_model(family, exact=False).to(torch.bfloat16).float(), tiny.tokenizer())
    hidden = [each.forward.completion_hidden(BATCH) for each in (policy, exact)]
    own = PlainForward(policy.model, torch.bfloat16).completion_hidden(BATCH)
    assert hidden[0].dtype == own.dtype == torch.bfloat16
    ours, theirs = ((each.float() - hidden[1]).norm() / hidden[1].norm() for each in (hidden[0], own))
    assert 0 < ours <= 1.5 * theirs
    actual, expected = gradients(policy, loss(policy)), gradients(exact, loss(exact))
    for name, gradient in expected.items():
        assert actual[name].dtype == torch.bfloat16
        scale = gradient.norm() + 0.05 * max(each.norm() for each in expected.values())
        assert (actual[name].float() - gradient).norm() <= 0.15 * scale, name


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # transformers to peft
@each_family
def test_adapters_on_all_projections_have_the_gradient_of_the_models_own_forward(family: str) -> None:
    model = tiny_model(family, torch.float32, exact=False)
    record = FAMILIES[family]
    names = [*record.qkv, *record.gate_up, record.output, record.down]  # two may have one name, in two modules
    with torch.random.fork_rng():
        torch.manual_seed(0)
        peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False), model)
    policy = as_policy(model, tiny.tokenizer())
    assert policy.forward_reason is None
    actual = gradients(policy, loss(policy))
    expected = gradients(policy, plain_loss(model))
    assert len(expected) == 2 * 2 * len(names)  # A and B of two layers, and nothing else
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


BIASED = {"attention_bias": True}
CAPPED = {"attn_logit_softcapping": None}
SAID: dict[str, tuple[str, dict[str, object]]] = {
    "gemma2 without a cap": ("gemma2", {**CAPPED, "final_logit_softcapping": None}),
    "gemma2 with biases": ("gemma2", BIASED),
    "gemma2 with silu": ("gemma2", {"hidden_activation": "silu"}),
    "gemma2 in full": ("gemma2", {"layer_types": ["full_attention", "full_attention"]}),
    "gemma3 with biases": ("gemma3_text", BIASED),
    "olmo2 with biases": ("olmo2", BIASED),
    "olmo2 with one key head": ("olmo2", {"num_key_value_heads": 1}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "mistral with a window of one": ("mistral", {"sliding_window": 1}),
    "mistral with kinds of layers that it does not read": ("mistral", {"layer_types": ["full_attention"] * 2}),
    "mistral by eager attention": ("mistral", {"attn_implementation": "eager"}),
    "phi3 turned in full": ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
    "phi3 without a window": ("phi3", {"sliding_window": None}),
    "phi3 with dropout": ("phi3", {"resid_pdrop": 0.5}),  # off in eval mode
    "smollm3 in full": ("smollm3", {"use_sliding_window": False}),
    "smollm3 turned everywhere": ("smollm3", {"no_rope_layers": [1, 1]}),
    "qwen2 with windows": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3 with windows": ("qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "gpt2 without scaled scores": ("gpt2", {"scale_attn_weights": False}),
    "gpt2 with another gelu": ("gpt2", {"activation_function": "gelu_pytorch_tanh", "n_inner": 20}),
    "gpt2 by eager attention with dropout": ("gpt2", {"attn_implementation": "eager", "attn_pdrop": 0.5}),
    "llama with biases everywhere": ("llama", {**BIASED, "mlp_bias": True}),
    "llama with gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
}


def made(family: str, **config: object) -> PreTrainedModel:
    """A model of this config, its weights drawn around those that it begins with."""
    model_class, config_class, extra = tiny.CLASSES[family]
    model: PreTrainedModel = model_class(config_class(**{**tiny.SHAPE, **extra, **config})).eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand(parameter.shape, generator=draw) - 0.5)
    return model


@pytest.mark.parametrize("what", SAID)
def test_what_a_config_says_is_done(what: str) -> None:
    family, config = SAID[what]
    policy = as_policy(made(family, **config), tiny.tokenizer())
    assert policy.forward_reason is None
    rows = zip(PROMPT_OF, COMPLETIONS, strict=True)
    with torch.no_grad():
        actual = policy.forward.completion_hidden(BATCH)
        expected = torch.cat([tiny.plain_states(policy.model, PROMPTS[p], tokens) for p, tokens in rows])
    torch.testing.assert_close(actual, expected, rtol=0, atol=3e-5)


LONG = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 1.1], "long_factor": [3.0, 9.0]}
LONG |= {"original_max_position_embeddings": 16, "partial_rotary_factor": 1.0}


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_longrope_beyond_its_original_context_has_the_long_angles_for_rows_of_every_length(family: str) -> None:
    fresh = made(family, rope_parameters=LONG, num_hidden_layers=1)
    policy = as_policy(copy.deepcopy(fresh), tiny.tokenizer(), context=64)
    assert policy.forward_reason is None
    with torch.no_grad():
        hidden = policy.forward.completion_hidden(BATCH)
        lengths = [len(completion) for completion in COMPLETIONS]
        for p, completion, actual in zip(PROMPT_OF, COMPLETIONS, hidden.split(lengths), strict=True):
            # Tokens behind a row make the model take the long angles for all of it, and change nothing else.
            row = [*PROMPTS[p], *completion[:-1]]
            out = fresh.model(input_ids=torch.tensor([[*row, *[0] * (40 - len(row))]])).last_hidden_state
            expected = out[0, len(PROMPTS[p]) - 1 : len(row)]
            torch.testing.assert_close(actual, expected, rtol=0, atol=3e-5)


REFUSED: dict[str, tuple[str, dict[str, object]]] = {
    "its activation is gelu, not one of gelu_new, gelu_pytorch_tanh": ("gpt2", {"activation_function": "gelu"}),
    **{
        f"its config has {name} = True, which the pass does not support": ("gpt2", {name: True})
        for name in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn")
    },
    "its activation is gelu, not one of silu, gelu_pytorch_tanh": ("gemma2", {"hidden_activation": "gelu"}),
    "its tokens see later ones (use_bidirectional_attention)": ("gemma3_text", {"use_bidirectional_attention": True}),
    "a layer's attention is chunked_attention, not one of full_attention, sliding_attention": (
        "qwen3",
        {"layer_types": ["chunked_attention", "full_attention"]},
    ),
    "its attention is exact, not one of eager, sdpa, flash_attention_2, flash_attention_3, flash_attention_4,"
    " flex_attention": ("phi3", {"attn_implementation": "exact"}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_the_decoder_does_not_do_is_refused_by_name(reason: str) -> None:
    family, config = REFUSED[reason]
    assert shared_prompt_refusal(made(family, **config)) == reason


@pytest.mark.parametrize(
    ("place", "layer", "says"),
    [
        ("model", "embed_tokens", r"embed_tokens is a torch\.nn\.modules\.sparse\.Embedding, which is not a layer"),
        ("model.layers.1", "post_feedforward_layernorm", r"layers\.1\.post_feedforward_layernorm is a \S*LlamaRMSNorm"),
    ],
)
def test_a_layer_of_another_family_is_refused(place: str, layer: str, says: str) -> None:
    model = tiny_model("gemma2", exact=False)
    others = {"embed_tokens": torch.nn.Embedding(tiny.VOCAB, 16)}
    setattr(model.get_submodule(place), layer, others.get(layer, tiny_model("llama", exact=False).model.norm))
    reason = shared_prompt_refusal(model)
    assert re.match(says, reason), reason


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """Bytes of what autograd keeps for the backward pass, each storage once; parameters are in memory anyway."""
    seen: dict[int, int] = {}
    total = [0]

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            total[0] = sum(seen.values())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total


@each_family
def test_checkpointed_layers_give_the_same_bits_and_keep_their_inputs_alone(family: str) -> None:
    policy = tiny_policy(family)
    with saved_bytes() as usual:
        value = loss(policy)
    expected = gradients(policy, value)
    policy.model.activation_checkpointing_enable()
    with saved_bytes() as less:
        again = loss(policy)
    actual = gradients(policy, again)
    assert torch.equal(value, again)
    assert all(torch.equal(actual[name], gradient) for name, gradient in expected.items())
    assert less[0] < 0.5 * usual[0]


def test_one_layer_in_two_may_be_checkpointed() -> None:
    policy, kept = tiny_policy("llama"), []
    for every in (1, 2, None):
        if every is None:
            policy.model.activation_checkpointing_disable()
        else:
            policy.model.activation_checkpointing_enable(every_n_layers=every)
        with saved_bytes() as found:
            loss(policy)
        kept.append(found[0])
    assert kept[0] < kept[1] < kept[2]
