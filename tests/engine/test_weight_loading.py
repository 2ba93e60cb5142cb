"""Files of weights into a served model, of every family: what a trainer exports is what then samples."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save

from posttrain.models.loading.saving import ExportedWeights
from posttrain.models.policy import Policy
from posttrain.server.requests import RefusedRequest
from posttrain.server.weight_loading import change_to, most_bytes
from tests.support.families import family_policy
from tests.support.refusals import refused


def other_weights(policy: Policy) -> Policy:
    """A copy whose every weight is another."""
    made = copy.deepcopy(policy)
    with torch.no_grad():
        for number, parameter in enumerate(made.model.parameters()):
            parameter.add_(0.01 * (number + 1))
    return made


SAVED_AS_HELD = ("llama4", "gemma4", "bloom", "mamba")
SAVED_OTHERWISE = ("gpt_neox", "qwen3_moe", "deepseek_v3", "qwen3_next")
"""Their files have experts, or parts of a matrix, one by one."""


@pytest.mark.parametrize("family", [*SAVED_AS_HELD, *SAVED_OTHERWISE])
def test_exported_weights_are_loaded_as_they_are(family: str) -> None:
    pauses = []

    @contextmanager
    def hands_off() -> Iterator[None]:
        pauses.append("pause")
        yield

    served = family_policy(family)
    trained = other_weights(served)
    content = save(ExportedWeights(trained).merged())
    assert len(content) <= most_bytes(served)
    before = copy.deepcopy(served.model.state_dict())
    change = change_to(served, content, None, hands_off)
    assert len(pauses) == (family in SAVED_OTHERWISE)  # transformers' loading changes torch for the whole process
    assert all(torch.equal(each, before[name]) for name, each in served.model.state_dict().items())  # not yet
    assert change() is served
    expected = trained.model.state_dict()
    for name, tensor in served.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_numbers_that_are_whole_are_not_weights() -> None:
    policy = family_policy("bloom")
    tensors = {name: each.to(torch.int32) for name, each in ExportedWeights(policy).merged().items()}
    with refused("is torch.int32", error=RefusedRequest):
        change_to(policy, save(tensors), None)
