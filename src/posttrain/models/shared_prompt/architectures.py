"""Which models the shared-prompt forward pass reproduces; every other one runs through its own forward pass.

`decoder` reads weights and calls no module of the model but its rotary embedding, so it is right only where
every module is one that it knows, exactly; plain low-rank adapters and layers in 4 bits are among them.  What is not on
the list is refused, never guessed: another adapter, a sharded layer, a subclass, a hook.
"""

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel
from transformers.activations import GELUTanh, SiLUActivation

from posttrain.models.adapters.peft_layers import adapter_refusal, is_adapter_layer
from posttrain.models.adapters.quantized import is_4_bit
from posttrain.models.shared_prompt.families import FAMILIES, Family

COMMON = (nn.Linear, nn.ModuleList, nn.SiLU, SiLUActivation, GELUTanh, nn.Dropout)
"""What all families are made of besides their own classes.  Dropout is off: a policy's model is in eval mode."""
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
"""Ways of the library to compute the same attention; another one is somebody's own."""
LAYER_TYPES = ("full_attention", "sliding_attention")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def shared_prompt_refusal(model: PreTrainedModel) -> str | None:
    """Why the shared-prompt forward pass would not compute what the model computes, in words; None where it would.

    Looks at the model as it is now; `Policy.require_as_made` asks again.
    """
    return next(_config_refusals(model), None) or next(_module_refusals(model), None)


def _config_refusals(model: PreTrainedModel) -> Iterator[str]:
    config = model.config
    if config.model_type not in FAMILIES:
        yield f"its family is {config.model_type}, which is none of {', '.join(FAMILIES)}"
        return
    family = FAMILIES[config.model_type]
    activation = getattr(config, family.activation_option)
    if activation not in family.activations:
        yield f"its activation is {activation}, which is none of {', '.join(family.activations)}"
    for option, usual in family.refused.items():
        if getattr(config, option, usual) != usual:
            yield f"its config says {option} = {getattr(config, option)}, which the pass does not compute"
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in LAYER_TYPES:
            yield f"a layer's attention is {kind}, which is none of {', '.join(LAYER_TYPES)}"
    if config._attn_implementation not in ATTENTION:
        yield f"its attention is {config._attn_implementation}, which is none of {', '.join(ATTENTION)}"
    if getattr(config, "use_bidirectional_attention", False):
        yield "its tokens see those behind them (use_bidirectional_attention)"


def _module_refusals(model: PreTrainedModel) -> Iterator[str]:
    family = model.config.model_type
    allowed = allowed_classes(FAMILIES[family])
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        where = name.removeprefix(f"{FAMILIES[family].decoder}.") or "the model"
        if is_adapter_layer(module):
            inside = (*inside, f"{name}.")
            refusal = adapter_refusal(module)
            if refusal is not None:
                yield f"{where} {refusal}"
            continue
        if is_4_bit(module):
            continue
        if full_name(type(module)) not in allowed:
            yield f"{where} is a {full_name(type(module))}, which is no layer of the {family} family"
        altered = alteration(module)
        if altered is not None:
            yield f"{where} {altered}"


def allowed_classes(family: Family) -> set[str]:
    """The classes that a model of the family is made of, by their full names."""
    place = f"transformers.models.{family.package}.modeling_{family.package}.{family.prefix}"
    embedding = full_name(nn.Embedding) if family.scaled_embedding is None else place + family.scaled_embedding
    return {*(place + part for part in family.parts), embedding, *map(full_name, COMMON), *family.others}


def alteration(module: nn.Module) -> str | None:
    """What makes a module compute something else than its class does with plain weights, in words; None if nothing."""
    if "forward" in vars(module):
        return "has a forward function put in place of its class's own"
    if any(getattr(module, hooks) for hooks in HOOKS):
        return "has a hook"
    for parameter in module.parameters(recurse=False):
        if type(parameter) is not nn.Parameter:
            return f"has a weight of type {full_name(type(parameter))}"
    return None


def full_name(kind: type) -> str:
    """A class as people look it up: `torch.nn.modules.linear.Linear`."""
    return f"{kind.__module__}.{kind.__qualname__}"
