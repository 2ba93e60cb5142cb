"""The equations of the memory plan, on public shapes: figures by hand, and bytes that autograd itself keeps."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    ViTConfig,
)

from posttrain.generation.sampling import ENTRIES_AT_ONCE
from posttrain.models.forward import Completions
from posttrain.models.memory import memory_parts as parts
from posttrain.models.memory.memory_parts import BFLOAT16, MemorySetup, largest_micro_batch
from posttrain.models.memory.memory_plan import MemoryPlan, changes_that_save, changes_until_it_fits
from posttrain.models.memory.model_shape import ModelShape, config_shape
from posttrain.models.policy import as_policy
from posttrain.runs.planned_memory import MachineMemory, compared_setups, memory_line, memory_warning
from tests.support.refusals import refused
from tests.support.tiny import new_tokenizer

LLAMA_3_8B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
)
QWEN_HALF_B = Qwen2Config(
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    max_position_embeddings=32_768,
    tie_word_embeddings=True,
)
NORMS = 65 * 4096
"""Weights of Llama's norms."""
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 9, "intermediate_size": 8}
LLAMA, QWEN = config_shape(LLAMA_3_8B), config_shape(QWEN_HALF_B)
IN_BF16 = MemorySetup(
    weight_bytes=BFLOAT16, compute_bytes=BFLOAT16, on_cuda=True, prompt_tokens=256, completion_tokens=256
)
GB = 1e9


def test_parameters_are_those_of_the_published_models() -> None:
    """8.03 B and 0.494 B by their cards; GPT-2's smallest has 124,439,808, and its matrices lie the other way round."""
    assert LLAMA.parameters == 8_030_261_248
    assert QWEN.parameters == 494_032_768
    assert (QWEN.tied, LLAMA.tied) == (True, False)
    small = config_shape(GPT2Config())
    assert small.parameters == 124_439_808
    assert small.linear_parameters == 12 * (768 * 2304 + 768 * 768 + 2 * 768 * 3072)
    assert small.shared_prompt
    assert LLAMA.shared_prompt
    assert (small.joined_parameters, LLAMA.joined_parameters) == (0, 32 * 4096 * (4096 + 2 * 1024 + 2 * 14336))


def test_a_mixture_counts_all_experts_and_computes_with_those_that_a_token_is_sent_to() -> None:
    config = Qwen3MoeConfig(
        num_hidden_layers=2,
        hidden_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        vocab_size=100,
    )
    shape = config_shape(config)
    assert shape.parameters > 2 * 8 * 3 * 64 * 32
    assert shape.mlp_width == 2 * 32


def test_the_courses_column_is_ours_but_for_the_critics_gradient() -> None:
    """A critic of 8 B weights in 16 bits: 2 N = 16 GB of weights, 4 N = 32 GB of moments; a gradient is 2 N more."""
    assert 6 * LLAMA.parameters / GB == pytest.approx(48, rel=0.01)
    critic = parts.critic_bytes(LLAMA, replace(IN_BF16, critic=True, value_head="linear"))
    # Without the output matrix, 128,256 × 4096, in place of which it has a row and a bias, in float32.
    trunk = 8_030_261_248 - 128_256 * 4096
    assert critic == 2 * trunk + 2 * trunk + 4 * trunk + 16 * 4097
    assert parts.critic_bytes(LLAMA, IN_BF16) == 0
    # On the policy's own trunk the head alone: 4 · 4096² + 4 · 4096 of the first layer, as many again and a bias after.
    assert parts.critic_bytes(LLAMA, replace(IN_BF16, value_head="mlp")) == 16 * (4 * 4096**2 + 8 * 4096 + 1)
    of_adapter = replace(IN_BF16, critic=True, value_head="linear").with_adapter(16)
    assert parts.critic_bytes(LLAMA, of_adapter) == 16 * 4097 + 16 * parts.trained_parameters(LLAMA, of_adapter)


def test_a_critic_of_several_ranks_copies_what_is_frozen_but_for_layers_in_4_bits() -> None:
    """By two ranks: all 8 B frozen weights in 16 bits; in 4 bits only the two tables of 128,256 × 4096, and norms."""

    def added(setup: MemorySetup) -> int:
        return parts.critic_bytes(LLAMA, replace(setup, ranks=2)) - parts.critic_bytes(LLAMA, setup)

    own = replace(IN_BF16, critic=True, value_head="linear")
    assert added(own.with_adapter(16)) == 2 * 8_030_261_248
    assert added(own.with_adapter(16, quantized=True)) == 2 * (2 * 128_256 * 4096 + NORMS)
    assert added(own) == 2 * 128_256 * 4096  # the output matrix, which nothing trains
    assert added(IN_BF16) == 0


ADAPTED = MemorySetup().with_adapter(16)
# Of Qwen2.5-0.5B, layer by layer: q and o 896+896, k and v 896+128, gate, up and down 896+4864, times the rank.
ADAPTER = 24 * 16 * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864))
HALVED = MemorySetup(reference=True, compute_bytes=2)


@pytest.mark.parametrize(
    ("part", "shape", "setup", "expected"),
    [
        # Full training in float32 is sixteen bytes a parameter.
        (parts.weights, QWEN, MemorySetup(), 4 * QWEN.parameters),
        (parts.gradients, QWEN, MemorySetup(), 4 * QWEN.parameters),
        (parts.optimizer, QWEN, MemorySetup(), 8 * QWEN.parameters),
        (parts.trained_parameters, QWEN, ADAPTED, ADAPTER),
        (parts.gradients, QWEN, ADAPTED, 4 * ADAPTER),
        (parts.optimizer, QWEN, ADAPTED, 8 * ADAPTER),
        # A reference is a copy, but not under an adapter.
        (parts.reference, QWEN, MemorySetup(reference=True), 4 * QWEN.parameters),
        (parts.reference, QWEN, replace(ADAPTED, reference=True), 0),
        # A copy holds linear layers in the type of products where the quick pass is taken.  Qwen's embedding is its
        # output matrix and stays in float32; Llama's output matrix is one of the linear layers.
        (parts.reference, QWEN, HALVED, 4 * QWEN.parameters - 2 * QWEN.linear_parameters),
        (parts.reference, LLAMA, HALVED, 4 * LLAMA.parameters - 2 * (LLAMA.linear_parameters + 128_256 * 4096)),
        (parts.reference, QWEN, replace(HALVED, shared_prompt=False), 4 * QWEN.parameters),
    ],
)
def test_a_part_of_the_plan_in_bytes(part: Callable, shape: ModelShape, setup: MemorySetup, expected: int) -> None:
    assert part(shape, setup) == expected


def test_four_bits_take_4_127_bits_a_weight_of_linear_layers_alone() -> None:
    setup = IN_BF16.with_adapter(16, quantized=True)
    adapter = 4 * parts.trained_parameters(LLAMA, setup)
    rest = 2 * (LLAMA.parameters - LLAMA.linear_parameters)
    bits = (parts.weights(LLAMA, setup) - adapter - rest) * 8 / LLAMA.linear_parameters
    assert bits == pytest.approx(4.127, abs=1e-3)


def test_a_cached_token_of_llama_3_8b_takes_128_kib() -> None:
    """2 · 32 layers · 8 heads · 128 channels · 2 bytes; 512 tokens are two blocks, so nothing is rounded."""
    setup = replace(IN_BF16, max_rows=1)
    assert parts.key_value_cache(LLAMA, setup) == 512 * 128 * 1024


def test_beside_the_cache_there_are_prompts_while_rows_begin_and_an_outgrown_layer_while_it_grows() -> None:
    """Prompts of 256 tokens at 128 KiB, each once and again for its row; on a CPU the cache is small then.

    There it begins with five blocks of 64 and ends with eight, or with twelve for 512 completion tokens, of which a
    32nd part of eleven is held twice when it grows last.
    """
    token, one = 128 * 1024, replace(IN_BF16, max_rows=1)
    assert parts.cache_growth(LLAMA, one) == 2 * 256 * token
    assert parts.cache_growth(LLAMA, replace(one, max_rows=16, group_size=8)) == (16 + 2) * 256 * token
    here = replace(one, on_cuda=False)
    assert parts.cache_growth(LLAMA, here) == (2 * 256 - (512 - 320)) * token
    assert parts.cache_growth(LLAMA, replace(here, max_rows=8, group_size=8, completion_tokens=512)) == (
        8 * 704 * token // 32
    ), "9 · 256 tokens are less than the 8 · 448 that the cache lacks then"
    of_one_block = replace(here, prompt_tokens=8, completion_tokens=50)
    assert parts.cache_growth(LLAMA, of_one_block) == 2 * 8 * token


def test_a_cpu_makes_probabilities_of_few_logits_at_a_time() -> None:
    assert parts.SAMPLED_AT_ONCE == ENTRIES_AT_ONCE
    here = replace(IN_BF16, on_cuda=False, max_rows=64)
    assert parts.sampled_logits(LLAMA, here) == 4 * (64 * 128_256 + 2 * 2**20)
    assert parts.sampled_logits(LLAMA, replace(here, max_rows=2)) == 4 * 3 * 2 * 128_256


def test_attention_holds_its_projections_several_times_where_heads_are_many_for_the_hidden_size() -> None:
    """4 (4 · 2048 + 5 · 2048) - 3 · 4 · 128 - 12 · 64 bytes a token; of usual shapes the MLP keeps more later."""
    narrow = replace(QWEN, hidden=64, query_width=2048, kv_width=2048, mlp_width=128)
    assert parts.attention_in_course(narrow, MemorySetup()) == 4 * 9 * 2048 - 12 * 128 - 12 * 64
    assert parts.attention_in_course(QWEN, MemorySetup()) == 0
    assert parts.attention_in_course(replace(narrow, mlp_width=100_000), MemorySetup()) == 0
    assert parts.attention_in_course(narrow, MemorySetup(shared_prompt=False)) == 0


def test_malloc_gives_back_a_cache_of_large_layers_alone() -> None:
    """Layers of 32 MiB are kept: 8 heads of 128 numbers in 2 bytes are 4 KiB a token, and 8192 of those 32 MiB."""
    of_32_mib = replace(IN_BF16, on_cuda=False, max_rows=16, prompt_tokens=256, completion_tokens=256)
    assert parts.key_value_cache(LLAMA, of_32_mib) == 32 * 32 * 2**20
    assert parts.returned_cache(LLAMA, of_32_mib) == 0
    larger = replace(of_32_mib, max_rows=17)
    assert parts.returned_cache(LLAMA, larger) == parts.key_value_cache(LLAMA, larger)


@pytest.mark.parametrize(
    ("budget", "shared_prompt", "prompts", "completions"),
    [
        # Groups of 256 + 8 · 400 = 3,456 tokens; a second prompt leaves room for (3457 - 512) / 400 = 7 completions.
        (200_000, True, 32, 256),
        (3456, True, 1, 8),
        (3457, True, 2, 7),
        (700, True, 1, 1),
        (10, True, 1, 1),
        # Rows of the model's own pass count their prompts each: 656 tokens, so 24 rows are 15,744 and 25 are 16,400.
        (200_000, False, None, 256),
        (16384, False, None, 24),
        (1312, False, None, 2),
        (1311, False, None, 1),
        (10, False, None, 1),
    ],
)
def test_a_micro_batch_holds_what_its_budget_allows(budget, shared_prompt, prompts, completions) -> None:
    micro = largest_micro_batch(MemorySetup(tokens_per_microbatch=budget, shared_prompt=shared_prompt))
    assert micro.completions == completions
    assert micro.prompts == prompts if shared_prompt else micro.tokens == completions * 656


def test_four_bits_are_made_of_weights_as_they_are_stored_a_layer_at_a_time() -> None:
    """Of 8.03 B weights all but the embedding are in linear layers: 7.50 B in 2 bytes and .53 B in 4 are 17.1 GB.

    The largest layer is 4096 × 14336 in float32.  On a GPU there are the 4-bit layers, never all of it.
    """
    setup = replace(MemorySetup(compute_bytes=2).with_adapter(16, quantized=True), tokens_per_microbatch=1024)
    stored = replace(LLAMA, stored_bytes=2)
    embedding, layer = 128_256 * 4096, 4 * 4096 * 14_336
    assert (
        parts.bytes_while_loading(stored, setup)
        == 2 * (8_030_261_248 - embedding - NORMS) + 4 * (embedding + NORMS) + layer
    )
    assert parts.bytes_while_loading(LLAMA, setup) == 4 * 8_030_261_248 + layer, "what is stored in float32 is read so"
    on_gpu = replace(setup, on_cuda=True)
    assert parts.bytes_while_loading(stored, on_gpu) == parts.weights(stored, on_gpu) + layer < 10 * GB
    held = replace(setup, quantized=False)
    assert parts.bytes_while_loading(stored, held) == 2 * (8_030_261_248 - embedding - NORMS) + 4 * (embedding + NORMS)
    assert parts.bytes_while_loading(stored, replace(held, frozen_bytes=4)) == 4 * 8_030_261_248
    assert parts.bytes_while_loading(stored, MemorySetup()) == 4 * 8_030_261_248


def test_the_config_says_in_what_weights_are_stored() -> None:
    stored = [config_shape(Qwen3Config(**SMALL, dtype=dtype)).stored_bytes for dtype in ("bfloat16", "float32", None)]
    assert stored == [2, 4, 4]


def test_only_sampling_keeps_keys_and_values_and_captured_steps_keep_them_always() -> None:
    on_cpu, on_cuda = (MemoryPlan(QWEN, MemorySetup(on_cuda=cuda)) for cuda in (False, True))
    assert on_cpu.parts["sampling"]["key_value_cache"] > 0
    assert "key_value_cache" not in on_cpu.parts["always"]
    assert on_cuda.parts["always"]["key_value_cache"] > 0
    assert set(MemoryPlan(QWEN, MemorySetup(samples=False)).parts["sampling"].values()) == {0}


def test_steps_ahead_keep_their_rows_caches_and_copies_during_updates_and_evaluations() -> None:
    """One step has 64 rows of 64 tokens; with 2 ahead there are 192, and an evaluation has the 200 of max_rows."""
    one = MemorySetup(prompts_per_step=8, group_size=8, max_rows=200, prompt_tokens=24, completion_tokens=40)
    ahead = replace(one, steps_ahead=2)
    in_order, meanwhile = MemoryPlan(QWEN, one), MemoryPlan(QWEN, ahead)
    token = 2 * 24 * 128 * 4
    assert in_order.parts["sampling"]["key_value_cache"] == 64 * 64 * token
    assert meanwhile.parts["always"]["key_value_cache"] == 192 * 64 * token
    assert meanwhile.parts["always"]["copies"] == in_order.parts["sampling"]["copies"] > 0
    assert meanwhile.parts["sampling"]["evaluation_cache"] == in_order.parts["sampling"]["evaluation_cache"] == 0
    evaluated = MemoryPlan(QWEN, replace(ahead, evaluates_amid=True))
    assert evaluated.parts["sampling"]["evaluation_cache"] == 200 * 64 * token
    held = meanwhile.parts["always"]["key_value_cache"] + meanwhile.parts["always"]["copies"]
    assert meanwhile.phases["updating"] == in_order.phases["updating"] + held
    assert (
        MemoryPlan(QWEN, replace(ahead, samples=False)).phases == MemoryPlan(QWEN, replace(one, samples=False)).phases
    )


CHANGES: dict[str, Callable[[MemorySetup], MemorySetup]] = {
    "tokens_per_microbatch": lambda setup: replace(setup, tokens_per_microbatch=2048),
    "max_rows": lambda setup: replace(setup, max_rows=16),
    "gradient_checkpointing": lambda setup: replace(setup, recomputes=True),
    "weights": lambda setup: replace(setup, weight_bytes=BFLOAT16),
    "adapter": lambda setup: setup.with_adapter(16),
    "quantization": lambda setup: setup.with_adapter(16, quantized=True),
    "reference": lambda setup: replace(setup, reference=False),
    "frozen": lambda setup: replace(setup, trained=10**8),
    "critic": lambda setup: replace(setup, critic=False),
    "value head": lambda setup: replace(setup, value_head="linear"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_should_save_memory_does(change: str) -> None:
    setup = MemorySetup(reference=True, critic=True, value_head="mlp", compute_bytes=BFLOAT16)
    before, after = MemoryPlan(QWEN, setup), MemoryPlan(QWEN, CHANGES[change](setup))
    assert min(after.phases[phase] - before.phases[phase] for phase in ("sampling", "updating")) < 0


def held_by_autograd(config: PreTrainedConfig, forward: str) -> tuple[int, MemorySetup]:
    """Bytes of all distinct tensors that one micro-batch of two groups keeps for its backward pass."""
    policy = as_policy(AutoModelForCausalLM.from_config(config), new_tokenizer(), dtype="float32", forward=forward)
    setup = MemorySetup(
        prompt_tokens=32, completion_tokens=48, prompts_per_step=2, group_size=4, shared_prompt=forward == "auto"
    )
    prompts, completions = [tuple(range(32))] * 2, [tuple(range(48))] * 8
    own = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.forward.completion_hidden(Completions(prompts, completions, [0] * 4 + [1] * 4))
    return sum(kept.values()), setup


SIZES = {"vocab_size": 300, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("config", "forward"),
    [
        (Qwen3Config(**SIZES, **HEADS, head_dim=16), "auto"),
        (LlamaConfig(**SIZES, **HEADS), "auto"),
        (Qwen2Config(**SIZES, **HEADS), "plain"),
        (LlamaConfig(**SIZES, **HEADS), "plain"),
        (GPT2Config(vocab_size=300, n_embd=96, n_layer=3, n_head=6), "auto"),
        (GPT2Config(vocab_size=300, n_embd=96, n_layer=3, n_head=6), "plain"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
def test_activations_are_what_autograd_keeps(config: PreTrainedConfig, forward: str) -> None:
    """Within a tenth through the shared-prompt pass, a fifth through the model's own, whose functions vary."""
    held, setup = held_by_autograd(config, forward)
    shape = config_shape(config)
    joined = 4 * shape.joined_parameters if forward == "auto" else 0
    assert parts.activations(shape, setup) == pytest.approx(held - joined, rel=0.1 if forward == "auto" else 0.2)


def test_a_warning_names_settings_with_what_each_saves_and_those_that_together_make_it_fit() -> None:
    fits = MemoryPlan(QWEN, MemorySetup())
    assert memory_warning(fits, MachineMemory(fits.peak, "RAM")) == []
    assert "Qwen" not in memory_line(fits, MachineMemory(fits.peak, "RAM"))
    setup = replace(IN_BF16, weight_bytes=4)
    plan = MemoryPlan(LLAMA, setup)
    first, *lines, together = memory_warning(plan, MachineMemory(24 * 10**9, "GPU memory"))
    assert "will not fit" in first
    assert "24.0 GB of GPU memory" in first
    changes = changes_that_save(LLAMA, setup)
    assert all(change.setting in "".join(lines) for change in changes)
    kinds = [change.same_results for change in changes_that_save(LLAMA, MemorySetup())]
    assert kinds == sorted(kinds, reverse=True), "those that change no result come first"
    assert len(set(kinds)) == 2
    for change in changes:
        assert change.saves == plan.peak - MemoryPlan(LLAMA, change.setup).peak
    settings, then = changes_until_it_fits(LLAMA, setup, 24 * 10**9)
    assert "model.adapter.rank = 16" in settings
    assert then.peak <= 24 * 10**9
    assert together.endswith("and it fits.")
    assert "still does not fit" in memory_warning(plan, MachineMemory(10**9, "RAM"))[-1]


def test_each_column_differs_from_grpo_by_what_its_name_says() -> None:
    plans: dict[str, MemoryPlan] = {
        name: MemoryPlan(QWEN, setup) for name, setup in compared_setups(QWEN, MemorySetup().with_adapter(4)).items()
    }
    grpo = plans["GRPO"]
    setup = MemorySetup(critic=True, value_head="mlp")
    assert plans["PPO"].peak - grpo.peak == parts.critic_bytes(QWEN, setup) + parts.value_activations(QWEN, setup)
    assert plans["recipe"].trained < plans["GRPO LoRA"].trained < grpo.trained == QWEN.parameters
    assert plans["GRPO QLoRA"].parts["always"]["weights"] < plans["GRPO LoRA"].parts["always"]["weights"]


def test_a_config_that_is_no_language_models_is_refused() -> None:
    with refused("not a causal language model"):
        config_shape(ViTConfig())
