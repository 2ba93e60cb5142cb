"""The families of decoders whose layers `decoder` reproduces, one record each.

A layer of every family is

    a = attention(norm₁(x))        x ← x + norm₂(a)
    m = mlp(norm₃(x))              x ← x + norm₄(m)          mlp(x) = down · (activation(gate · x) · (up · x))

or down · activation(up · x) without a gate.  A record says what differs; numbers come from the model's config, and the
activation, the scale of embeddings and rotary angles from its modules.  The decoder's loop only reads records.  A new
family is a row of the table, if a record can describe its layers; `tests/laws/test_families.py` decides.

`shared_prompt_refusal` says which models the shared-prompt forward pass reproduces; all others run through their own.
The decoder reads weights and calls no module of the model except its rotary embedding, so it must know every module
exactly: plain low-rank adapters, layers in 4 bits and the family's own.  Anything else is refused, never guessed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import GELUTanh, SiLUActivation

from posttrain.models.adapters.adaptable import is_4_bit
from posttrain.models.adapters.peft_layers import adapter_refusal, full_name, is_adapter_layer
from posttrain.models.shared_prompt.attention import AttentionKind

PARTS = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
"""A family's usual classes."""
SAME_ANGLES = "every layer"
"""Name of the rotary angles of models that have one kind."""


def no_windows(config: PreTrainedConfig) -> list[int | None]:
    return [None] * config.num_hidden_layers


def one_window(config: PreTrainedConfig) -> list[int | None]:
    return [config.sliding_window] * config.num_hidden_layers


def windows_by_layer(config: PreTrainedConfig) -> list[int | None]:
    return [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]


def same_angles(config: PreTrainedConfig) -> list[str | None]:
    return [SAME_ANGLES] * config.num_hidden_layers


def angles_by_layer(config: PreTrainedConfig) -> list[str | None]:
    return list(config.layer_types)


def angles_in_some_layers(config: PreTrainedConfig) -> list[str | None]:
    return [SAME_ANGLES if turned else None for turned in config.no_rope_layers]


def no_angles(config: PreTrainedConfig) -> list[str | None]:
    return [None] * config.num_hidden_layers


def usual_scale(config: PreTrainedConfig) -> float | None:
    return None


def scale_of_config(config: PreTrainedConfig) -> float | None:
    return cast(float, config.query_pre_attn_scalar**-0.5)


def scale_if_asked(config: PreTrainedConfig) -> float | None:
    return None if config.scale_attn_weights else 1.0


def no_soft_cap(config: PreTrainedConfig) -> float | None:
    return None


def soft_cap_of_config(config: PreTrainedConfig) -> float | None:
    return cast(float | None, config.attn_logit_softcapping)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A layer's attention and rotary angles."""

    attention: AttentionKind
    angles: str | None
    """Name of the rotary angles of its queries and keys; None without rotation."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of decoders; the defaults are Llama's."""

    package: str
    """Folder of its modules in `transformers.models`."""
    prefix: str
    """Prefix of its classes' names."""
    parts: tuple[str, ...] = PARTS
    """The rest of their names."""

    others: tuple[str, ...] = ()
    """Full names of further classes."""
    refused: Mapping[str, object] = field(default_factory=dict)
    """Options of the config that a record cannot describe, with their only supported value."""

    decoder: str = "model"
    """The module with embedding, layers and last norm; this and the next three by name."""
    layers: str = "layers"
    last_norm: str = "norm"
    positions: str | None = None
    """Embedding of absolute positions, which is added to the tokens'."""

    norm: Literal["rms", "layer"] = "rms"
    norm_eps: str = "rms_norm_eps"
    """Name of ε in the config."""
    input_norm: str | None = "input_layernorm"
    """norm₁, before attention; this and the next three by name."""
    attention_norm: str | None = None
    mlp_input_norm: str | None = "post_attention_layernorm"
    mlp_norm: str | None = None
    norm_offset: float = 0.0
    """Added to the weight of every norm."""
    norm_in_float32: bool = False
    """Whether a norm's result is rounded to the stream's type after its weight, not before."""
    query_key_norm: Literal["none", "heads", "whole"] = "none"
    """Whether queries and keys are normed head by head, or all heads of a token as one."""

    attention: str = "self_attn"
    """This and the products by name."""
    grouped: bool = True
    """Whether the config has a number of key heads and a head width; otherwise query and key heads share the stream."""
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """Without a gate, only `up`."""
    down: str = "down_proj"
    gated: bool = True
    activation: str = "act_fn"
    """Name of the activation's module."""
    activation_option: str = "hidden_act"
    """Name of the activation in the config."""
    activations: tuple[str, ...] = ("silu", "gelu_pytorch_tanh")
    """Supported ones."""
    scaled_embedding: str | None = None
    """Class of an embedding whose rows are multiplied by its `embed_scale`."""

    windows: Callable[[PreTrainedConfig], Sequence[int | None]] = no_windows
    """The window of each layer; this and the next three are functions of the config."""
    scale: Callable[[PreTrainedConfig], float | None] = usual_scale
    """The scale of scores; None is 1/√width."""
    soft_cap: Callable[[PreTrainedConfig], float | None] = no_soft_cap
    angles: Callable[[PreTrainedConfig], Sequence[str | None]] = same_angles

    def layer_kinds(self, config: PreTrainedConfig) -> tuple[LayerKind, ...]:
        scale, soft_cap = self.scale(config), self.soft_cap(config)
        return tuple(
            LayerKind(AttentionKind(window, scale, soft_cap), angles)
            for window, angles in zip(self.windows(config), self.angles(config), strict=True)
        )


GEMMA2 = Family(
    package="gemma2",
    prefix="Gemma2",
    attention_norm="post_attention_layernorm",
    mlp_input_norm="pre_feedforward_layernorm",
    mlp_norm="post_feedforward_layernorm",
    norm_offset=1.0,
    norm_in_float32=True,
    activation_option="hidden_activation",
    scaled_embedding="TextScaledWordEmbedding",
    windows=windows_by_layer,
    scale=scale_of_config,
    soft_cap=soft_cap_of_config,
)

GPT2 = Family(
    package="gpt2",
    prefix="GPT2",
    parts=("LMHeadModel", "Model", "Block", "Attention", "MLP"),
    others=(
        "torch.nn.modules.normalization.LayerNorm",
        "transformers.pytorch_utils.Conv1D",
        "transformers.activations.NewGELUActivation",
    ),
    refused={"scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False, "add_cross_attention": False},
    decoder="transformer",
    layers="h",
    last_norm="ln_f",
    positions="wpe",
    norm="layer",
    norm_eps="layer_norm_epsilon",
    input_norm="ln_1",
    mlp_input_norm="ln_2",
    attention="attn",
    grouped=False,
    qkv=("c_attn",),
    output="c_proj",
    gate_up=("c_fc",),
    down="c_proj",
    gated=False,
    activation="act",
    activation_option="activation_function",
    activations=("gelu_new", "gelu_pytorch_tanh"),
    scale=scale_if_asked,
    angles=no_angles,
)

FAMILIES = {
    "gpt2": GPT2,
    "llama": Family(package="llama", prefix="Llama"),
    "mistral": Family(package="mistral", prefix="Mistral", windows=one_window),
    "qwen2": Family(package="qwen2", prefix="Qwen2", windows=windows_by_layer),
    "qwen3": Family(package="qwen3", prefix="Qwen3", windows=windows_by_layer, query_key_norm="heads"),
    "smollm3": Family(package="smollm3", prefix="SmolLM3", windows=windows_by_layer, angles=angles_in_some_layers),
    "phi3": Family(
        package="phi3",
        prefix="Phi3",
        qkv=("qkv_proj",),
        gate_up=("gate_up_proj",),
        activation="activation_fn",
        windows=one_window,
    ),
    "olmo2": Family(
        package="olmo2",
        prefix="Olmo2",
        input_norm=None,
        attention_norm="post_attention_layernorm",
        mlp_input_norm=None,
        mlp_norm="post_feedforward_layernorm",
        norm_in_float32=True,
        query_key_norm="whole",
    ),
    "gemma2": GEMMA2,
    "gemma3_text": replace(
        GEMMA2,
        package="gemma3",
        prefix="Gemma3",
        parts=("ForCausalLM", "TextModel", *PARTS[2:]),
        query_key_norm="heads",
        soft_cap=no_soft_cap,  # its attention ignores the config's cap
        angles=angles_by_layer,
    ),
}
"""By `config.model_type`."""


COMMON = (nn.Linear, nn.ModuleList, nn.SiLU, SiLUActivation, GELUTanh, nn.Dropout)
"""Classes of all families.  Dropout is off: a policy's model is in eval mode."""
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
"""The library's implementations of the same attention."""
LAYER_TYPES = ("full_attention", "sliding_attention")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def shared_prompt_refusal(model: PreTrainedModel) -> str | None:
    """Why the shared-prompt forward pass would not compute what the model computes now; None if it would."""
    return next(_config_refusals(model), None) or next(_module_refusals(model), None)


def _config_refusals(model: PreTrainedModel) -> Iterator[str]:
    config = model.config
    if config.model_type not in FAMILIES:
        yield f"its family is {config.model_type}, not one of {', '.join(FAMILIES)}"
        return
    family = FAMILIES[config.model_type]
    activation = getattr(config, family.activation_option)
    if activation not in family.activations:
        yield f"its activation is {activation}, not one of {', '.join(family.activations)}"
    for option, usual in family.refused.items():
        if getattr(config, option, usual) != usual:
            yield f"its config has {option} = {getattr(config, option)}, which the pass does not support"
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in LAYER_TYPES:
            yield f"a layer's attention is {kind}, not one of {', '.join(LAYER_TYPES)}"
    if config._attn_implementation not in ATTENTION:
        yield f"its attention is {config._attn_implementation}, not one of {', '.join(ATTENTION)}"
    if getattr(config, "use_bidirectional_attention", False):
        yield "its tokens see later ones (use_bidirectional_attention)"


def _module_refusals(model: PreTrainedModel) -> Iterator[str]:
    family = model.config.model_type
    record = FAMILIES[family]
    place = f"transformers.models.{record.package}.modeling_{record.package}.{record.prefix}"
    embedding = full_name(nn.Embedding) if record.scaled_embedding is None else place + record.scaled_embedding
    allowed = {*(place + part for part in record.parts), embedding, *map(full_name, COMMON), *record.others}
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        where = name.removeprefix(f"{record.decoder}.") or "the model"
        if is_adapter_layer(module):
            inside = (*inside, f"{name}.")
            refusal = adapter_refusal(module)
            if refusal is not None:
                yield f"{where} {refusal}"
            continue
        if is_4_bit(module):
            continue
        if full_name(type(module)) not in allowed:
            yield f"{where} is a {full_name(type(module))}, which is not a layer of the {family} family"
        altered = alteration(module)
        if altered is not None:
            yield f"{where} {altered}"


def alteration(module: nn.Module) -> str | None:
    """Why a module computes something other than its class does with plain weights; None if it does not."""
    if "forward" in vars(module):
        return "has a forward function put in place of its class's own"
    if any(getattr(module, hooks) for hooks in HOOKS):
        return "has a hook"
    for parameter in module.parameters(recurse=False):
        if type(parameter) is not nn.Parameter:
            return f"has a weight of type {full_name(type(parameter))}"
    return None
