"""The sizes of a model that decide its memory, read from its config: no weight is loaded or made."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from posttrain.errors import UserError
from posttrain.models.adapters.adaptable import expert_matrices, is_4_bit, linear_layers
from posttrain.models.adapters.lora import layer_shape
from posttrain.models.adapters.peft_format import read_adapter
from posttrain.models.loading.adapter_folder import base_options
from posttrain.models.loading.construction import LOAD_ERRORS, ONE_AT_A_TIME, is_wrapper
from posttrain.models.loading.folder_kinds import IN_4_BITS, quantisation
from posttrain.models.loading.model_folder import loaded_config, local_folder, path_option
from posttrain.models.loading.new_model import new_model_config, new_tokenizer
from posttrain.models.shared_prompt.families import shared_prompt_refusal
from posttrain.options.model import ModelOptions, NewModelOptions, is_adapter_folder

UNBOUNDED = 1 << 30
"""Positions of a family whose config has no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a causal language model, in numbers of weights and of channels."""

    parameters: int
    """All of them, a tied output matrix once."""
    head_parameters: int
    """Weights of the output matrix, vocab × hidden."""
    tied: bool
    """Whether the output matrix is the embedding."""
    linear_layers: tuple[tuple[int, int], ...]
    """(inputs, outputs) of every linear layer except the output layer: those for adapters and 4 bits."""
    vocab: int
    hidden: int
    layers: int
    query_width: int
    """Query heads × their width."""
    kv_width: int
    """Heads of keys, or of values, × their width."""
    mlp_width: int
    """Channels inside the MLP that a token goes through; in a mixture, those of all its experts."""
    max_positions: int
    """Longest prompt and completion together, in tokens."""
    stored_bytes: int = 4
    """Bytes of a stored weight: 2 if the config says bfloat16."""
    quantised: str | None = None
    """How weights are stored quantised (`quantisation`); None if they are not."""
    expert_arrays: tuple[tuple[int, int, int], ...] = ()
    """(experts, rows, columns) of every array of experts, which are never put in 4 bits."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Every parameter's name and size."""
    gated: bool = True
    """Whether the MLP multiplies two halves, as SwiGLU does."""
    fused: bool = False
    """Whether query, key and value are stored as one matrix, so that nothing has to be joined."""
    normed_heads: bool = False
    """Whether query and key heads are normed."""
    shared_prompt: bool = True
    """Whether the shared-prompt forward pass supports it."""

    @property
    def linear_parameters(self) -> int:
        return sum(inputs * outputs for inputs, outputs in self.linear_layers)

    @property
    def expert_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.expert_arrays)

    @property
    def frozen_matrices(self) -> int:
        """Weights that an adapter leaves in a smaller type: of linear layers, experts and an untied output layer."""
        return self.linear_parameters + self.expert_parameters + (0 if self.tied else self.head_parameters)

    def frozen_parameters(self, patterns: Sequence[str]) -> int:
        return sum(size for name, size in self.sizes if any(fnmatchcase(name, pattern) for pattern in patterns))

    @property
    def joined_parameters(self) -> int:
        """Weights of the projections that the decoder joins: query, key, value; gate, up."""
        if self.fused:
            return 0
        joined_mlp = 2 * self.mlp_width if self.gated else 0
        return self.layers * self.hidden * (self.query_width + 2 * self.kv_width + joined_mlp)


def config_shape(config: PreTrainedConfig) -> ModelShape:
    """The shape of a config's model, made on torch's meta device, without memory, in a fifth of a second."""
    try:
        with ONE_AT_A_TIME, torch.device("meta"):
            model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config))
    except LOAD_ERRORS as error:
        fault = f"a {config.model_type} is not a causal language model ({error})"
        raise UserError(f"config.json: {fault}.  Use one of another family.") from error
    return shape_of(model)


def object_shape(model: PreTrainedModel) -> ModelShape:
    """The shape of a model's class and config, without adapters and 4 bits."""
    found = getattr(model.config, "quantization_config", None)
    stored = "unnamed" if found is not None else None
    with ONE_AT_A_TIME, torch.device("meta"):
        shape = shape_of(type(model)(model.config))
    return replace(shape, quantised=IN_4_BITS if any(is_4_bit(each) for each in model.modules()) else stored)


def shape_of(model: PreTrainedModel) -> ModelShape:
    """The shape of a model without adapters."""
    config = model.config
    head = cast(nn.Linear, model.get_output_embeddings())
    text = cast(Any, config.get_text_config())
    hidden, heads = head.weight.shape[1], _first(text, "num_attention_heads", "n_heads") or 1
    width = _first(text, "head_dim") or hidden // heads
    experts = _first(text, "num_experts_per_tok") or 1
    mlp = (experts > 1 and _first(text, "moe_intermediate_size")) or _first(
        text, "intermediate_size", "n_inner", "ffn_dim"
    )
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return ModelShape(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        head_parameters=head.weight.numel(),
        tied=head.weight is cast(nn.Embedding, model.get_input_embeddings()).weight,
        linear_layers=tuple((inputs, outputs) for outputs, inputs in map(layer_shape, linear_layers(model).values())),
        vocab=head.weight.shape[0],
        hidden=hidden,
        layers=_first(text, "num_hidden_layers", "n_layers") or 1,
        query_width=heads * width,
        kv_width=(_first(text, "num_key_value_heads") or heads) * width,
        mlp_width=(mlp or 4 * hidden) * experts,
        max_positions=_first(text, "max_position_embeddings", "max_seq_len") or UNBOUNDED,
        stored_bytes=2 if config.dtype == torch.bfloat16 else 4,
        expert_arrays=tuple(cast(Any, tuple(array.shape)) for array in expert_matrices(model).values()),
        sizes=tuple((name, parameter.numel()) for name, parameter in model.named_parameters()),
        gated=bool(names & {"gate_proj", "gate_up_proj"}),
        fused=bool(names & {"c_attn", "qkv_proj"}),
        normed_heads=bool(names & {"q_norm", "k_norm"}),
        shared_prompt=shared_prompt_refusal(model) is None,
    )


def _first(config: Any, *names: str) -> int | None:
    """The first of these options that a config has; families differ in names."""
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


def recipe_shape(options: ModelOptions | NewModelOptions) -> ModelShape:
    """The shape of the model that a recipe names, or of an adapter's base; its folder needs no weights."""
    if isinstance(options, NewModelOptions):
        return config_shape(new_model_config(options, new_tokenizer(options.template)))
    if not options.is_bundled and is_adapter_folder(options.folder):
        options = base_options(options, read_adapter(options.folder))
    options.require_folder()
    folder = local_folder(options)
    config = loaded_config(folder, options)
    shape = config_shape(config.get_text_config() if is_wrapper(config) else config)
    return replace(shape, quantised=quantisation(folder, path_option(options)))
