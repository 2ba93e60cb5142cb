"""PEFT's configs and models: a LoraConfig as our adapter, and `trainer.model` as a PeftModel.

A script's own PeftModel is shown unchanged.  If the policy has our adapter layers, or PEFT's layers are not in a
PeftModel, the PeftModel has its own modules over the same tensors, so an update changes both.  This file imports peft,
and is only imported if a PEFT adapter is given or shown.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from peft import LoraConfig, PeftModel, PeftModelForCausalLM, PeftModelForSequenceClassification, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import nn
from transformers import PreTrainedModel

from posttrain.errors import UserError
from posttrain.models.adapters.adaptable import is_4_bit
from posttrain.models.adapters.lora import LoraExperts, LoraLinear, lora_layers, put_layer, without_wrappers
from posttrain.models.adapters.peft_format import adapter_settings
from posttrain.models.adapters.peft_layers import peft_layers, text_model_name, trained_adapter, wrapper_of
from posttrain.models.policy import Policy, as_policy
from posttrain.options.model import ALL_LINEAR, AdapterOptions

UNSET = ("inference_mode", "base_model_name_or_path", "fan_in_fan_out", "revision", "peft_version")
Module = TypeVar("Module", bound=nn.Module)


class SharedWeights:
    """A PeftModel over the tensors of a policy; it merges into a copy, so that the policy does not change."""

    def merge_and_unload(self, *given: Any, **named: Any) -> nn.Module:
        merged: nn.Module = with_own_weights(shared_copy(cast(Any, self))).base_model.merge_and_unload(*given, **named)
        return merged

    def merge_adapter(self, *given: Any, **named: Any) -> None:
        """Add the adapter into the weights of this model, and not into those that are trained."""
        with_own_weights(cast(Any, self)).base_model.merge_adapter(*given, **named)

    def save_pretrained(self, *given: Any, **named: Any) -> None:
        if wrapper_of(cast(Any, self).base_model.model).outside:
            raise UserError(
                "trainer.model.save_pretrained: layers of a multimodal model have other names.  Use"
                " trainer.save_model(folder), which writes those."
            )
        super().save_pretrained(*given, **named)  # type: ignore[misc]


class TrainedLanguageModel(SharedWeights, PeftModelForCausalLM):
    """A language model with an adapter."""


class TrainedClassifier(SharedWeights, PeftModelForSequenceClassification):
    """A reward model with an adapter and a fully trained head."""


def with_peft_around(policy: PreTrainedModel, shown: PreTrainedModel) -> nn.Module:
    """A PeftModel around `shown`, which has the adapter's layers of the policy: the policy itself or a classifier."""
    classifier = shown is not policy
    config, name = config_of(policy, classifier=classifier)
    gradients = {parameter: parameter.requires_grad for parameter in (*policy.parameters(), *shown.parameters())}
    plain: Any = without_adapters(shared_copy(shown))
    if classifier:
        plain.score = copy.deepcopy(plain.score)  # peft keeps the head that was there first
    plain.is_loaded_in_4bit = any(is_4_bit(layer) for layer in plain.modules())
    kind = TrainedClassifier if classifier else TrainedLanguageModel
    made: Any = kind(plain, config, adapter_name=name, low_cpu_mem_usage=True)
    inside = made.base_model.model
    for layer_name, theirs in peft_layers(shown).items():
        put_layer(inside, layer_name, theirs)
    for layer_name, ours in lora_layers(shown).items():
        name_inside = layer_name.removesuffix(f".{ours.parameter}") if isinstance(ours, LoraExperts) else layer_name
        layer = inside.get_submodule(name_inside)
        layer.lora_A[name].weight, layer.lora_B[name].weight = ours.lora_A, ours.lora_B
    if classifier:
        inside.score.modules_to_save[name].weight = cast(Any, shown).score.weight
    for parameter, takes in gradients.items():
        parameter.requires_grad_(takes)
    made.eval()
    return cast(nn.Module, made)


def config_of(policy: PreTrainedModel, *, classifier: bool) -> tuple[LoraConfig, str]:
    """PEFT's config of the trained adapter, by the layers' names in the policy, and its name."""
    name, _ = trained_adapter(policy)
    if name is None:
        settings: dict[str, Any] = adapter_settings(policy)
        for key in ("target_modules", "target_parameters"):
            settings[key] = [text_model_name(policy, each) for each in settings.get(key, ())] or None
        for key in ("rank_pattern", "alpha_pattern"):
            settings[key] = {text_model_name(policy, each): value for each, value in settings[key].items()}
        config = LoraConfig(**{key: value for key, value in settings.items() if key != "peft_type"})
    else:
        config = copy.copy(cast(Any, policy).peft_config[name])
    config.inference_mode = False
    if classifier:
        config.task_type, config.modules_to_save = cast(Any, "SEQ_CLS"), ["score"]
    return config, name or "default"


def shared_copy(model: Module) -> Module:
    """New modules of a model, over the same tensors and configs."""
    shared = [*model.parameters(), *model.buffers()]
    shared += [cast(Any, each).config for each in model.modules() if hasattr(each, "config")]
    return copy.deepcopy(model, {id(each): each for each in shared})


def without_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """A model with the layers below its adapters in their places."""
    layers = {name: each for name, each in model.named_modules() if isinstance(each, LoraLinear | LoraLayer)}
    for name, layer in layers.items():
        base: Any = layer
        while isinstance(base, LoraLinear | LoraLayer):
            base = base.base_layer
        if name == without_wrappers(name):
            put_layer(model, name, base)
    return model


def with_own_weights(model: Module) -> Module:
    """Give a model copies of its adapted matrices."""
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            base: Any = layer.get_base_layer()
            for name, matrix in [] if is_4_bit(base) else list(base.named_parameters(recurse=False)):
                setattr(base, name, nn.Parameter(matrix.detach().clone(), requires_grad=False))
    return model


def with_peft(policy: Policy, config: LoraConfig, *, seed: int) -> tuple[Policy, nn.Module]:
    """The policy with a PEFT adapter, initialised from the seed, and the PeftModel."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = peft_model(policy.model, config)
    made = as_policy(model, policy.tokenizer, dtype="bfloat16" if policy.compute_dtype == torch.bfloat16 else "auto")
    return replace(made, stored_dtype=policy.stored_dtype), model


def peft_model(model: nn.Module, config: LoraConfig) -> nn.Module:
    if isinstance(model, PeftModel):
        raise UserError("peft_config: the model is a PeftModel already.  Leave one of the two adapters out.")
    made: nn.Module = get_peft_model(cast(PreTrainedModel, model), config)
    return made


def adapter_options(config: LoraConfig, family: str) -> AdapterOptions | None:
    """Our equivalent adapter; None if the config uses features that ours does not have."""
    given: Any = config
    ours = ("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "task_type")
    plain = LoraConfig(**{name: getattr(given, name) for name in ours})
    targets = given.target_modules or TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(family)
    other_text = isinstance(targets, str) and targets != ALL_LINEAR
    if lora_settings(config) != lora_settings(plain) or targets is None or other_text:
        return None
    return AdapterOptions(
        rank=given.r,
        alpha=float(given.lora_alpha),
        dropout=float(given.lora_dropout),
        targets=(targets,) if isinstance(targets, str) else tuple(sorted(targets)),
        rslora=bool(given.use_rslora),
    )


def lora_settings(config: LoraConfig) -> Mapping[str, object]:
    to_dict: Callable[[], dict[str, object]] = config.to_dict
    return {name: value for name, value in to_dict().items() if name not in UNSET}
