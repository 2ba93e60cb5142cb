"""Which models the shared-prompt forward pass reproduces; every other one runs through its own forward pass.

`decoder` reads weights and calls no module of the model but its rotary embedding, so it is right only where
every module is one that it knows, exactly.  What is not on the list is refused, never guessed: an adapter, a quantised
or a sharded layer, a subclass, a hook.
"""

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""`config.model_type` of the families whose layers `decoder` reproduces, and how their classes' names begin."""
PARTS = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
"""The classes of a family."""
COMMON = (nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU, SiLUActivation)
"""What all families are made of besides."""
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
    if config.hidden_act != "silu":
        yield f"its activation is {config.hidden_act}, not silu"
    if getattr(config, "mlp_bias", False):
        yield "its MLP layers have biases"
    for kind in getattr(config, "layer_types", None) or ():
        if kind != "full_attention":
            yield f"a layer's attention is {kind}, not full_attention"


def _module_refusals(model: PreTrainedModel) -> Iterator[str]:
    family = model.config.model_type
    place = f"transformers.models.{family}.modeling_{family}.{FAMILIES[family]}"
    allowed = {*(place + part for part in PARTS), *map(full_name, COMMON)}
    for name, module in model.named_modules():
        where = name.removeprefix("model.") or "the model"
        if full_name(type(module)) not in allowed:
            yield f"{where} is a {full_name(type(module))}, which is no layer of the {family} family"
        altered = alteration(module)
        if altered is not None:
            yield f"{where} {altered}"


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
