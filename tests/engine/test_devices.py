"""Where a policy lives: a recipe's device, a model object's own, and what is said where they differ.

No GPU is needed: what is decided is a function of the two devices and of whether there is a GPU.
"""

import pytest
import torch

from posttrain.models.loading.devices import idle_gpu_lines, require_device_of
from tests.support.refusals import refused

CPU, FIRST, SECOND = (torch.device(name) for name in ("cpu", "cuda:0", "cuda:1"))


@pytest.mark.parametrize(("there", "asked"), [(CPU, "auto"), (CPU, "cpu"), (SECOND, "auto"), (SECOND, "cuda")])
def test_a_model_object_stays_where_it_is(there: torch.device, asked: str) -> None:
    require_device_of(there, asked)


@pytest.mark.parametrize(("there", "asked"), [(CPU, "cuda"), (FIRST, "cpu")])
def test_a_recipe_that_names_another_device_than_the_object_s_is_refused(there: torch.device, asked: str) -> None:
    with refused(f"model.device = {asked}", str(there), "auto"):
        require_device_of(there, asked)


def test_a_policy_on_the_cpu_beside_a_gpu_is_said_in_the_plan() -> None:
    [line] = idle_gpu_lines(CPU, gpu=True)
    assert "on the CPU, though torch sees a GPU" in line
    assert idle_gpu_lines(CPU, gpu=False) == idle_gpu_lines(FIRST, gpu=True) == []
