"""Tiny models under an adapter whose B is not zero, so that whatever leaves it out is far off."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.models.adapters.adaptable import add_adapter, quantize
from posttrain.models.adapters.lora import lora_layers
from posttrain.models.forward import Completions
from posttrain.models.policy import Policy, as_policy
from posttrain.options.model import AdapterOptions
from tests.support.tiny import tiny_model, tokenizer


@dataclass(frozen=True)
class Pair:
    """A prompt and what continues it."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]


def completion_logprobs(policy: Policy, pairs: Sequence[Pair]) -> Tensor:
    """log π of every completion token, in order, by the policy's forward pass."""
    batch = Completions([pair.prompt for pair in pairs], [pair.completion for pair in pairs], range(len(pairs)))
    return policy.completion_logprobs(batch)


LORA = AdapterOptions(rank=3, alpha=6)


def fill(model: nn.Module, *, seed: int = 3, size: float = 0.2) -> None:
    """Give every B numbers."""
    random = np.random.Generator(np.random.Philox(seed))
    with torch.no_grad():
        for layer in lora_layers(model).values():
            layer.lora_B.copy_(torch.from_numpy(random.random(layer.lora_B.shape) * 2 - 1) * size)


def adapted_policy(
    family: str = "qwen3",
    options: AdapterOptions = LORA,
    *,
    dtype: torch.dtype = torch.float32,
    nf4: bool = False,
    filled: bool = True,
    forward: str = "auto",
    compute: str = "float32",
    seed: int = 0,
) -> Policy:
    """A policy with our adapter over a tiny random model, whose norms are the library's own."""
    model = tiny_model(family, dtype, exact=False)
    if nf4:
        quantize(model, torch.bfloat16 if compute == "bfloat16" else dtype)
    add_adapter(model, options, seed=seed)
    if filled:
        fill(model)
    return as_policy(model, tokenizer(), forward=forward, dtype=compute)
