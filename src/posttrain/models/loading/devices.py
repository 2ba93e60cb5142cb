"""The device of a model.  Imports only torch, so that a missing device is reported before transformers loads."""

import torch

from posttrain.errors import UserError


def chosen_device(name: str, option: str = "model.device") -> torch.device:
    """The device that `auto`, `cpu` or `cuda` means on this machine; `option` is for messages."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(f"{option} = cuda: torch sees no CUDA device.  Use auto or cpu, or install a CUDA build.")
    return torch.device(name)


def require_device_of(policy_device: torch.device, wanted: str) -> None:
    """Refuse a recipe's device for a model object that is on another one."""
    if wanted not in ("auto", policy_device.type):
        remedy = f"Use model.to({wanted!r}) before posttrain.as_policy, or leave model.device at auto."
        raise UserError(f"model.device = {wanted}: the given policy is on {policy_device}.  {remedy}")


def idle_gpu_lines(policy_device: torch.device, *, gpu: bool) -> list[str]:
    """A line of the plan for a policy on the CPU of a machine with a GPU."""
    if policy_device.type != "cpu" or not gpu:
        return []
    remedy = "set model.device = auto, or move your model object before posttrain.as_policy"
    return [f"           on the CPU, though torch sees a GPU: {remedy}"]
