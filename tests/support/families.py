"""Tiny random models of families with traps, as transformers makes them from a config; nothing is downloaded.

Weights are uniform numbers, far from the flat start of training: distributions are neither even nor certain, no bias is
zero, and one token too many or too few in a window moves log-probs by tenths of a nat.
"""

import copy
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from posttrain.models.context import fix_angles
from posttrain.models.policy import Policy, as_policy
from tests.support.tiny import SHAPE, STOP_IDS, VOCAB, tokenizer

WINDOW, ORIGINAL, CONTEXT = 8, 16, 64
"""Tokens of local attention, of the original training of `longrope`, and of every model's context."""

COMMON: dict[str, Any] = {**SHAPE, "bos_token_id": 0, "pad_token_id": 0}
OLDER: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": list(STOP_IDS), "pad_token_id": 0}
GPT: dict[str, Any] = {**OLDER, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,  # values half as wide as keys
}
ROPE: dict[str, Any] = {"rope_theta": 10_000.0}
LONG: dict[str, Any] = {
    **ROPE,
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1],
    "long_factor": [2.0, 5.0],
    "original_max_position_embeddings": ORIGINAL,
}
LOCAL: dict[str, Any] = {"sliding_window": WINDOW}
ALTERNATING: dict[str, Any] = {**LOCAL, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS: dict[str, Any] = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT),
    "gpt_neox": ("gpt_neox", {**COMMON, "rotary_pct": 0.5}),
    "gpt_neo": (
        "gpt_neo",
        {
            **OLDER,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 4,
            "max_position_embeddings": CONTEXT,
            "attention_types": [[["global", "local"], 1]],
            "window_size": WINDOW,
        },
    ),
    "mistral": ("mistral", {**COMMON, **LOCAL}),
    "gemma2": (
        "gemma2",
        {**COMMON, **ALTERNATING, "head_dim": 4, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 0.5},
    ),
    "gemma3": ("gemma3_text", {**COMMON, **ALTERNATING, "head_dim": 4}),
    "phi3_longrope": ("phi3", {**COMMON, "rope_parameters": LONG}),
    "llama_dynamic": ("llama", {**COMMON, "rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 2.0}}),
    "smollm3": ("smollm3", {**COMMON, "no_rope_layers": [1, 0]}),
    "qwen3_moe": ("qwen3_moe", {**COMMON, **MOE, "head_dim": 8}),
    "phi": ("phi", COMMON),
    "gptj": ("gptj", {**GPT, "rotary_dim": 2}),
    "cohere": ("cohere", {**COMMON, "logit_scale": 0.3}),
    "granite": ("granite", {**COMMON, "logits_scaling": 3.0}),
    "hyperclovax": ("hyperclovax", {**COMMON, "logits_scaling": 0.3}),
    "minicpm3": ("minicpm3", {**COMMON, **LATENT, "dim_model_base": 8}),
    "gpt_oss": ("gpt_oss", {**COMMON, **ALTERNATING, "head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4": (
        "llama4_text",
        {
            **COMMON,
            "head_dim": 4,
            "attention_chunk_size": WINDOW,
            "num_local_experts": 2,
            "intermediate_size_mlp": 16,
            "num_experts_per_tok": 1,
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            **COMMON,
            **ALTERNATING,
            "head_dim": 4,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": VOCAB,
        },
    ),
    "deepseek_v3": ("deepseek_v3", {**COMMON, **LATENT, **EXPERTS, **MOE}),
    "bloom": ("bloom", {**OLDER, "hidden_size": 16, "n_layer": 2, "n_head": 4}),
    "mpt": ("mpt", {**OLDER, "d_model": 16, "n_layers": 2, "n_heads": 4, "max_seq_len": CONTEXT}),
    "mamba": ("mamba", {**OLDER, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}),
    "lfm2": ("lfm2", {**COMMON, "layer_types": ["conv", "full_attention"]}),
    "qwen3_next": ("qwen3_next", {**COMMON, **MOE, **LINEAR, "head_dim": 8, "shared_expert_intermediate_size": 16}),
    "qwen3_5": ("qwen3_5_text", {**COMMON, **LINEAR, "head_dim": 8}),
}
"""Name -> `model_type` and config."""
WITHOUT_CACHE = ("mamba", "lfm2", "qwen3_next", "qwen3_5")
"""Families whose state is more than keys and values."""


def family_model(name: str, *, attention: str | None = None, **changes: Any) -> PreTrainedModel:
    """A model of the family, the same weights each time, whichever way attention is computed."""
    kind, options = CONFIGS[name]
    config = AutoConfig.for_model(kind, **copy.deepcopy({**options, **changes}))  # it writes into what it is given
    with torch.random.fork_rng():
        torch.manual_seed(0)  # for what is left as the library makes it
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return randomise(model)


def randomise(model: PreTrainedModel) -> PreTrainedModel:
    """The model with uniform numbers as weights, the same each time: none is 0 or what a norm begins with."""
    random = np.random.Generator(np.random.Philox(7))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            numbers = torch.from_numpy(random.random(parameter.shape) * 2 - 1).float()
            if parameter_name.endswith("bias"):
                parameter.add_(0.3 * numbers)
            elif parameter.dim() > 1 and not parameter_name.endswith("A_log"):
                parameter.copy_(0.5 * numbers)
    return model


def family_policy(name: str, *, compute: str = "float32", context: int | None = CONTEXT) -> Policy:
    """The model through its own forward pass."""
    return as_policy(family_model(name), tokenizer(), dtype=compute, forward="plain", context=context)


def eager_model(name: str) -> PreTrainedModel:
    """The same weights, attention written out by the library, and the angles that belong to the context."""
    model = family_model(name, attention="eager").eval()
    fix_angles(model, CONTEXT)
    return model
