"""A tiny random model of every family that transformers has a causal language model for, and of some variants.

A config is made of the small numbers below, as far as its class has options of these names, and of what the family
needs besides.  Families that `families` has a model of are made as there.
"""

from copy import deepcopy
from dataclasses import fields
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from tests.support.families import ALTERNATING, COMMON, CONFIGS, LATENT, LINEAR, LONG, MOE, ROPE, WINDOW, randomise

SIZES = {
    1: "n_group topk_group encoder_layers first_k_dense_replace mamba_n_groups depth",
    2: "decoder_layers num_layers n_layer index_n_heads",
    4: "head_dim n_routed_experts num_local_experts decoder_attention_heads encoder_attention_heads "
    "num_heads n_head attention_heads kv_channels mamba_n_heads mamba_d_state state_size ssm_state_size "
    "hc_lowrank index_head_dim",
    8: "chunk_size mamba_chunk_size mamba_d_head",
    16: "d_model n_embd shared_expert_intermediate_size embed_dim image_size out_hidden_size",
    24: "ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size",
    64: "n_positions",
}
"""Options of each size, by the names that configs have for them."""
SMALL: dict[str, Any] = {
    **COMMON,
    **MOE,
    **LATENT,
    **{name: value for name, value in LINEAR.items() if name != "layer_types"},
    "sliding_window": WINDOW,
}
SMALL |= {name: size for size, names in SIZES.items() for name in names.split()}


def part(kind: str, **changes: Any) -> dict[str, Any]:
    """The config of a part whose type its whole leaves open."""
    return {"model_type": kind, **small_options(kind), **changes}


HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1}
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 2},
    "cpmant": {"dim_head": 4, "dim_ff": 24},
    "ctrl": {"dff": 24},
    "dbrx": {
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {"o_groups": 2, "o_lora_rank": 4, "head_dim": 8, "index_head_dim": 8},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"shared_experts_intermediate_size": 16},
    "falcon": {"alibi": False},
    "falcon_h1": {"mamba_d_ssm": 32, "lm_head_multiplier": 0.5},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": 24,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "inkling_text": {"eos_token_id": 5},
    "inkling2_text": {"eos_token_id": 5},
    "kimi_linear": {"linear_head_dim": 4, "linear_num_heads": 4, **HYBRID},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"zero_expert_num": 2, "expert_ffn_hidden_size": 16, "moe_topk": 2},
    "mamba2": {"head_dim": 8, "n_groups": 1},
    "minimax_m3_vl_text": {"dense_intermediate_size": 24, "shared_intermediate_size": 16, "rotary_dim": 4},
    "moshi": {"audio_vocab_size": 16, "audio_encoder_config": {"model_type": "mimi"}},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "moe_shared_expert_intermediate_size": 16,
    },
    "qwen4_exp_text": {"ngram_vocab_size_base": 100},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "attention_head_size": 4,
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [8, 8],
        "feed_forward_size": 24,
        "num_buckets": 2,
    },
    "roc_bert": {"pronunciation_embed_dim": 4, "shape_embed_dim": 4, "shape_vocab_size": 30},
    "xlnet": {"d_inner": 24},
    "xmod": {"default_language": "en_XX", "is_decoder": True},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "use_mamba_kernels": False,
        "num_key_value_heads": 4,
        "mamba_d_state": 4,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "mamba", "hybrid"],
        "use_mamba_kernels": False,
        "num_key_value_heads": 4,
        "n_mamba_heads": 4,
        "adapter_rank": 4,
    },
    "gemma3": {"vision_config": SIGLIP},
    "gemma4": {"text_config": CONFIGS["gemma4"][1]},
    "llama4": {"text_config": CONFIGS["llama4"][1]},
    "qwen3_5": {"text_config": CONFIGS["qwen3_5"][1]},
    "gemma4_unified_vision": {"mm_embed_dim": 16, "output_proj_dims": 16, "mm_posemb_size": 16, "patch_size": 4},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "got_ocr2": {"text_config": "qwen2"},
    "fuyu": {"text_config": "persimmon"},
    "moss_transcribe_diarize": {"text_config": "qwen3"},
    "mistral3": {"text_config": "mistral", "vision_config": SIGLIP},
    "llava": {"text_config": "llama", "vision_config": SIGLIP},
    "llama4_vision_model": {
        "vision_output_dim": 16,
        "projector_input_dim": 16,
        "projector_output_dim": 16,
        "patch_size": 8,
        "intermediate_size": 64,
    },
    "cohere_compass_text": {
        "layer_types": ["full_attention", "full_attention"],
        "rope_parameters": {"full_attention": {**ROPE, "rope_type": "default"}},
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 8},
}


NOT_BUILT = {
    "blt": "its smallest model, of hashed byte n-grams, has 48 million weights",
    "dots3_note": "its config does not allow two layers",
    "emu3": "rejected when its config is read; its text part is not in any table of transformers",
    "gemma3n": "its images need the package timm; its text part is gemma3n_text",
    "gemma4_assistant": "a draft model, which reads the hidden states of another",
    "gemma4_unified_assistant": "rejected when its config is read; a draft model, like the one before",
    "musicgen": "rejected when its config is read; an audio model",
    "musicgen_melody": "rejected when its config is read; an audio model",
}
"""Families of the library's table that no tiny model is made of, and why."""
BESIDES = ("llava", "mistral3", "qwen2_5_vl", "t5")
"""Families that are not in the library's table of causal models, but are given to us as if they were."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16, "factor": 4.0}
SHARED_KEYS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.0] * 4,
}
"""Later layers read the keys and values of earlier ones, as in the models that are published."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert as a decoder": ("bert", {"is_decoder": True}),
    "roberta as a decoder": ("roberta", {"is_decoder": True}),
    "falcon with ALiBi": ("falcon", {"alibi": True}),
    "gemma3n_text with shared keys": ("gemma3n_text", SHARED_KEYS),
    "gemma4_text with shared keys": ("gemma4_text", SHARED_KEYS),
    "gemma2 without caps": ("gemma2", {"final_logit_softcapping": None, "attn_logit_softcapping": None}),
    "llama, biases and gelu": ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "llama, rope llama3": ("llama", {"rope_parameters": {**ROPE, **LLAMA3, "rope_type": "llama3"}}),
    "llama, rope yarn": ("llama", {"rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 4.0}}),
    "llama, rope dynamic": ("llama", {"rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 2.0}}),
    "llama, rope longrope": ("llama", {"rope_parameters": LONG}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "phi3, rope longrope": ("phi3", {"rope_parameters": LONG}),
    "qwen2 with windows": ("qwen2", {**ALTERNATING, "use_sliding_window": True}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3_moe with dense layers": ("qwen3_moe", {"mlp_only_layers": [0]}),
}
"""What else a family may be, beside its row of its own."""
OF_FAMILIES = {
    kind: options for name, (kind, options) in CONFIGS.items() if name not in ("phi3_longrope", "llama_dynamic")
}


def every_label() -> list[str]:
    """The rows of the table: families by their `model_type`, and variants of some."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *BESIDES, *VARIANTS} - set(NOT_BUILT))


def small_config(label: str, **others: Any) -> PreTrainedConfig:
    """The config of a row's model."""
    kind, changes = VARIANTS.get(label, (label, {}))
    options = OF_FAMILIES[kind] if kind in OF_FAMILIES else small_options(kind)
    return AutoConfig.for_model(kind, **deepcopy({**options, **changes, **others}))  # it writes into what it is given


def small_model(label: str) -> PreTrainedModel:
    """The row's model, whole: with eyes and ears, where it has them."""
    config = small_config(label)
    if config.model_type == "t5":
        kind: Any = AutoModelForSeq2SeqLM
    else:
        sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)  # for what is left as the library makes it
        return randomise(kind.from_config(config))


def small_options(kind: str) -> dict[str, Any]:
    """What of the small numbers a config of this type takes, its parts included, and the changes that it needs."""
    made = CONFIG_MAPPING[kind]
    known = {field.name for field in fields(made)} | set(made.attribute_map)
    options = {name: value for name, value in SMALL.items() if name in known}
    if "kv_lora_rank" not in known and "num_key_value_heads" in known:
        options["num_key_value_heads"] = 2
    for name, inner in made.sub_configs.items():
        if inner is not AutoConfig and inner.model_type in CONFIG_MAPPING:
            options[name] = small_options(inner.model_type)
    changed = CHANGES.get(kind, {})
    if isinstance(changed.get("text_config"), str):
        changed = {**changed, "text_config": part(changed["text_config"])}
    return {**options, **changed}
