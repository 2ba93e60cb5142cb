"""Copies between the CPU and a GPU: few to the CPU, which has to wait for each, and none that waits the other way."""

from collections.abc import Sequence

import torch
from jaxtyping import Int64
from torch import Tensor


def numbers_on(device: torch.device, numbers: Sequence[int]) -> Int64[Tensor, " number"]:
    """A tensor of these integers on the device."""
    return torch.tensor(numbers, dtype=torch.long).to(device, non_blocking=True)


def on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the CPU, without gradients.  Those of one GPU take one copy together, so the CPU waits once."""
    there = [number for number, each in enumerate(tensors) if each.device.type != "cpu"]
    found = [each.detach() for each in tensors]
    if not there:
        return found
    there.sort(key=lambda number: -tensors[number].element_size())  # so that each begins at a multiple of its size
    parts = [found[number].contiguous().view(-1).view(torch.uint8) for number in there]
    read = torch.cat(parts).cpu().split([len(part) for part in parts])
    for number, part in zip(there, read, strict=True):
        found[number] = part.view(tensors[number].dtype).view(tensors[number].shape)
    return found
