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


def require_device_of(policy_device: torch.device, asked: str) -> None:
    """Refuse a recipe's device for a model object that is elsewhere: an object stays where its owner has put it."""
    if asked != "auto" and asked != policy_device.type:
        raise UserError(
            f"model.device = {asked}, but the policy that is given is on {policy_device}.  Move the model before"
            f" posttrain.as_policy, model.to({asked!r}), or leave model.device at auto."
        )


def idle_gpu_lines(policy_device: torch.device, *, gpu: bool) -> list[str]:
    """What a plan says of a policy on the CPU of a machine with a GPU."""
    if policy_device.type != "cpu" or not gpu:
        return []
    remedy = "set model.device = auto, or move a model object of your own before posttrain.as_policy"
    return [f"           on the CPU, though torch sees a GPU: {remedy}"]
