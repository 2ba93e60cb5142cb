"""Where a model lives; this loads torch alone, so that a device that is not there is told before transformers loads."""

import torch

from posttrain.errors import UserError


def chosen_device(name: str, option: str = "model.device") -> torch.device:
    """The device that `auto`, `cpu` or `cuda` means on this machine; `option` is what messages call it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(f"{option} = cuda: torch sees no CUDA device.  Use auto or cpu, or install a CUDA build.")
    return torch.device(name)
