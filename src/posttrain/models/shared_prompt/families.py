"""The families of decoders whose layers `decoder` reproduces, one record each.

A layer of every family is

    a = attention(norm₁(x))        x ← x + norm₂(a)
    m = mlp(norm₃(x))              x ← x + norm₄(m)          mlp(x) = down · (activation(gate · x) · (up · x))

or down · activation(up · x) where nothing is gated, and a record says which of the norms there are and under which
names, of what kind they are and how they use their weight, whether queries and keys are normed by head or as a whole,
which projections are stored as one matrix, whether positions have embeddings of their own, and what attention makes of
its scores in each layer: its window, scale and soft cap, and by which angles queries and keys are turned.  Numbers come
from the model's config, which the functions of a record read; the activation, the scale of embeddings and rotary
angles come from its modules.  The decoder's loop reads records and asks for no family.  A new family is a row of the
table, if its layers are what a record can say; the tests of `tests/laws/test_families.py` decide.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from transformers import PreTrainedConfig

from posttrain.models.shared_prompt.attention import AttentionKind

Windows = Callable[[PreTrainedConfig], Sequence[int | None]]

PARTS = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
"""The classes of a family, usually."""
SAME_ANGLES = "every layer"
"""Name of the rotary angles of models that have one kind."""


def no_windows(config: PreTrainedConfig) -> list[int | None]:
    """Every layer sees all tokens, whatever the config says of windows."""
    return [None] * config.num_hidden_layers


def one_window(config: PreTrainedConfig) -> list[int | None]:
    """Every layer has the config's window, where there is one."""
    return [config.sliding_window] * config.num_hidden_layers


def windows_by_layer(config: PreTrainedConfig) -> list[int | None]:
    """Layers are called `sliding_attention` or `full_attention`."""
    return [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]


def same_angles(config: PreTrainedConfig) -> list[str | None]:
    """All layers turn queries and keys by the same angles."""
    return [SAME_ANGLES] * config.num_hidden_layers


def angles_by_layer(config: PreTrainedConfig) -> list[str | None]:
    """Layers with a window have other angles than those without."""
    return list(config.layer_types)


def angles_in_some_layers(config: PreTrainedConfig) -> list[str | None]:
    """Some layers know no positions."""
    return [SAME_ANGLES if turned else None for turned in config.no_rope_layers]


def no_angles(config: PreTrainedConfig) -> list[str | None]:
    """Positions are told by embeddings, and nothing is turned."""
    return [None] * config.num_hidden_layers


def usual_scale(config: PreTrainedConfig) -> float | None:
    """1/√width."""
    return None


def scale_of_config(config: PreTrainedConfig) -> float | None:
    """A number of the config in the place of the heads' width."""
    scale: float = config.query_pre_attn_scalar**-0.5
    return scale


def scale_if_asked(config: PreTrainedConfig) -> float | None:
    """1/√width unless the config says that scores are left as they are."""
    return None if config.scale_attn_weights else 1.0


def no_soft_cap(config: PreTrainedConfig) -> float | None:
    """Scores are not bounded, whatever the config says."""
    return None


def soft_cap_of_config(config: PreTrainedConfig) -> float | None:
    """Scores are bounded by a number of the config, if there is one."""
    cap: float | None = config.attn_logit_softcapping
    return cap


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What a layer does besides its products and norms."""

    attention: AttentionKind
    angles: str | None
    """Name of the rotary angles of its queries and keys; None where they are not turned."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the layers of one family are; the defaults are Llama's."""

    package: str
    """Folder of its modules in `transformers.models`."""
    prefix: str
    """How its classes' names begin."""
    parts: tuple[str, ...] = PARTS
    """How they go on."""

    others: tuple[str, ...] = ()
    """Full names of classes that it has beside those and the common ones."""
    refused: Mapping[str, object] = field(default_factory=dict)
    """Options of the config that a record cannot say, with the value that is none of them."""

    decoder: str = "model"
    """The module with embedding, layers and last norm; this and the next three by name."""
    layers: str = "layers"
    last_norm: str = "norm"
    positions: str | None = None
    """Embedding of absolute positions, whose rows are added to those of the tokens."""

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
    """Whether the config says how many heads of keys there are, and how wide a head is; else there are as many as of
    queries, which share the width of the stream."""
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """Where nothing is gated, `up` alone."""
    down: str = "down_proj"
    gated: bool = True
    activation: str = "act_fn"
    """Name of the activation's module."""
    activation_option: str = "hidden_act"
    """Name of the activation in the config."""
    activations: tuple[str, ...] = ("silu", "gelu_pytorch_tanh")
    """What it may say."""
    scaled_embedding: str | None = None
    """Class of an embedding whose rows are multiplied by its `embed_scale`."""

    windows: Windows = no_windows
    scale: Callable[[PreTrainedConfig], float | None] = usual_scale
    soft_cap: Callable[[PreTrainedConfig], float | None] = no_soft_cap
    angles: Callable[[PreTrainedConfig], Sequence[str | None]] = same_angles

    def layer_kinds(self, config: PreTrainedConfig) -> tuple[LayerKind, ...]:
        """One for each layer of a model."""
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
        soft_cap=no_soft_cap,  # its attention leaves the config's cap alone
        angles=angles_by_layer,
    ),
}
"""By `config.model_type`."""
