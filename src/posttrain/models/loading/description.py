"""A policy in lines: the first of them at the start of every run, all of them by `posttrain doctor`."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping

import torch

from posttrain.models.adapters import adaptable
from posttrain.models.adapters.lora import LoraExperts, LoraLinear, lora_layers
from posttrain.models.adapters.peft_layers import wrapper_of
from posttrain.models.context import changes_at, num_embeddings, own_context
from posttrain.models.loading.devices import idle_gpu_lines
from posttrain.models.model_outputs import is_recomputing
from posttrain.models.native.native_decoder import native_refusal
from posttrain.models.native.native_layers import layers_refusal
from posttrain.models.policy import Policy
from posttrain.models.rendering import opening_tokens
from posttrain.options.model import ALL_LINEAR, ModelOptions
from posttrain.options.training import RATE_OF_ADAPTERS, OptimizerOptions

WRAPPER_GAP = 0.1
"""Nats by which a text model may differ from its wrapper without a line about it: rounding in bfloat16."""


def model_lines(policy: Policy, name: str) -> list[str]:
    """Size, arithmetic and forward pass of a policy."""
    model = policy.model
    total = adaptable.num_parameters(model)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    part = "" if trained == total else f" ({trained / 1e6:.2f} M trained)"
    held = {parameter.dtype for parameter in model.parameters()}
    others = not held <= {policy.compute_dtype, torch.float32}
    weights = f" over {' and '.join(sorted(map(type_name, held)))} weights" if others else ""
    again = ", layers computed again for gradients" if is_recomputing(model) else ""
    arithmetic = f"{type_name(policy.compute_dtype)}{weights} on {policy.device}{again}"
    lines = [f"model      {name}, {total / 1e6:.2f} M parameters{part}, {arithmetic}"]
    wrapper = wrapper_of(model)
    if wrapper.gap > WRAPPER_GAP:
        lines.append(
            f"           its log-probs differ by up to {wrapper.gap:.2g} nats from those of the {wrapper.model_type}"
            " that contains it, which computes its logits differently"
        )
    lines += idle_gpu_lines(policy.device, gpu=torch.cuda.is_available())
    if policy.forward_reason is not None:
        lines.append(f"           by the model's own forward pass: {policy.forward_reason}")
    if policy.native_reason is None:
        refusal, of_updates = native_refusal(policy), layers_refusal(policy)
        updates = "its updates use it too" if of_updates is None else f"its updates use torch: {of_updates}"
        says = f"sampled and scored by the native kernel; {updates}"
        lines.append(f"           {says if refusal is None else f'not by the native kernel: {refusal}'}")
    if policy.cache_refusal is not None:
        lines.append(f"           sampled without a cache, whole rows again for every token: {policy.cache_refusal}")
    return lines


def adapter_lines(policy: Policy, options: OptimizerOptions) -> list[str]:
    """Lines of the plan about an adapter."""
    layers = lora_layers(policy.model)
    if not layers:
        return []
    trained = sum(parameter.numel() for parameter in policy.model.parameters() if parameter.requires_grad)
    first = next(iter(layers.values())).options
    quantized = [layer for layer in policy.model.modules() if adaptable.is_4_bit(layer)]
    dtype = type_name(policy.compute_dtype)
    in_4_bits = f", {len(quantized)} layers of it in nf4 (scales quantised too), products in {dtype}"
    default = f"{options.default_rate * RATE_OF_ADAPTERS:g}, of a whole model {options.default_rate:g}"
    scaled = f"rank {first.rank}, alpha {first.alpha:g}{', rslora' if first.rslora else ''}"
    return [
        (
            f"adapter    {scaled}, on {len(layers)} layers: {trained / 1e6:.3g} M parameters trained, the base"
            f" frozen{in_4_bits if quantized else ''}"
        ),
        f"           learning rate {options.largest_rate:g}; the default is {default}",
        *left_out_lines(policy, layers),
    ]


def left_out_lines(policy: Policy, layers: Mapping[str, LoraLinear]) -> list[str]:
    """Layers that `all-linear` leaves without an adapter: those that cannot have one, and a mixture's experts."""
    if ALL_LINEAR not in next(iter(layers.values())).options.targets:
        return []
    lines = []
    names = [name for name in adaptable.linear_layers(policy.model) if name not in layers]
    without = Counter(re.split(r"(?:^|\.)\d+\.", name, maxsplit=1)[-1] for name in names)  # inside its decoder layer
    if without:
        kinds = ", ".join(f"{name} ({count})" for name, count in without.items())
        lines.append(f"           without one, as an adapter there would not work as one: {kinds}")
    experts = sum(matrix.numel() for matrix in adaptable.expert_matrices(policy.model).values())
    if experts and not any(isinstance(layer, LoraExperts) for layer in layers.values()):
        linear = sum(layer.lora_A.shape[1] * layer.lora_B.shape[0] for layer in layers.values())
        share = adaptable.share_of_linear_layers(linear, experts)
        lines.append(
            f"           all-linear is {share:.0%} of the matrix weights here; the experts are the rest, without one"
            " (model.adapter.targets: [all-linear, experts])"
        )
    return lines


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def unused_options(policy: Policy, options: ModelOptions) -> Iterator[str]:
    if options.attn_implementation != "auto" and policy.forward_reason is None:
        yield (
            f"attn_implementation = {options.attn_implementation} is not used: the shared-prompt forward pass has"
            " its own attention"
        )


def tokenizer_lines(policy: Policy) -> list[str]:
    """Stop tokens, chat template and what is unusual about the tokenizer."""
    tokenizer = policy.tokenizer
    rows = num_embeddings(policy.model)
    known = max(tokenizer.get_vocab().values()) + 1
    stops = ", ".join(f"{each} {tokenizer.decode([each])!r}" for each in policy.stop_ids)
    opening = opening_tokens(tokenizer)
    pad = tokenizer.pad_token_id
    pads = "none" if pad is None else f"{tokenizer.pad_token!r}{', a stop token too' if pad in policy.stop_ids else ''}"
    facts = [
        f"{known} tokens for {rows} rows of the embedding",
        f"opens plain text with {tokenizer.decode(opening)!r}" if opening else "opens plain text with nothing",
        f"padding {pads} (none is needed)",
    ]
    if known > rows:
        facts.append("prompts with a token beyond the embedding are refused")
    template = "the model's: messages may be prompts" if tokenizer.chat_template else "none: prompts are plain text"
    return [f"stop ids   {stops}", f"template   {template}", f"tokenizer  {'; '.join(facts)}"]


def policy_summary(policy: Policy, name: str) -> list[str]:
    """All lines about a policy: its model, weights, context and tokenizer."""
    sizes = Counter[torch.dtype]()
    for parameter in policy.model.parameters():
        sizes[parameter.dtype] += parameter.numel() * parameter.element_size()
    held = ", ".join(f"{type_name(dtype)} {size / 2**20:.1f} MiB" for dtype, size in sizes.items())
    stored = "" if policy.stored_dtype is None else f"; saved as {type_name(policy.stored_dtype)}"
    own = own_context(policy.model.config)
    bounds = [] if own is None else [f"the model's {own}"]
    bounds += [f"some layers look back {window}" for window in changes_at(policy.model.config)]
    bounds += [] if policy.context is None else [f"model.context is {policy.context}"]
    return [
        *model_lines(policy, name),
        f"weights    {held}{stored}",
        f"context    {policy.max_positions} tokens ({', '.join(bounds)})",
        *tokenizer_lines(policy),
    ]
