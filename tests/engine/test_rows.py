"""The rows that are decoded side by side: each is its own, also when something is wrong with it."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.errors import RunError
from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.records import Prompt
from tests.support.refusals import refused
from tests.support.tiny import STOP_IDS, VOCAB, request, some_prompts, tiny_policy


@pytest.mark.parametrize("limit", [1, 3])
def test_logits_that_are_no_numbers_are_told_with_the_prompt_that_gave_them(limit: int) -> None:
    policy = tiny_policy("llama")  # whose embedding is not its output matrix
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[20] = math.nan
    prompts = [Prompt(id=name, text="", tokens=tokens) for name, tokens in (("good", (1, 2)), ("bad", (3, 20)))]
    # No other token than these two, so that the good one stays good.
    others = tuple(token for token in range(24) if token not in {1, 2})
    with refused("prompt bad, sample", "NaN", error=RunError):
        sample_groups(InProcessEngine(policy), prompts, request(2, limit, suppressed=(*others, *STOP_IDS)))


class CopiedLogits(TorchDispatchMode):
    """Counts rows of logits that are copied from one tensor into another."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.index_select, torch.ops.aten.cat) and out.shape[1:] == (VOCAB,):
            self.rows += len(out)
        return out


def test_the_logits_of_prompts_are_copied_once_for_their_rows() -> None:
    engine, prompts = InProcessEngine(tiny_policy("llama")), some_prompts((3, 5))
    with CopiedLogits() as copied:
        sample_groups(engine, prompts, request(4, 1))
    assert copied.rows == 8
