"""Where a model lives; this loads torch alone, so that a device that is not there is told before transformers loads."""

import torch

from posttrain.errors import UserError


def chosen_device(name: str) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` means on this machine."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("model.device = cuda: torch sees no CUDA device.  Use auto or cpu, or install a CUDA build.")
    return torch.device(name)
