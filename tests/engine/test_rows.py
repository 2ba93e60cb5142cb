"""The rows that are decoded side by side: each is its own, also when something is wrong with it."""

import math

import pytest
import torch

from posttrain.errors import RunError
from posttrain.generation.in_process import InProcessEngine
from posttrain.records import Prompt
from tests.support.tiny import STOP_IDS, request, tiny_policy


@pytest.mark.parametrize("limit", [1, 3])
def test_logits_that_are_no_numbers_are_told_with_the_prompt_that_gave_them(limit: int) -> None:
    policy = tiny_policy("llama")  # whose embedding is not its output matrix
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[20] = math.nan
    prompts = [Prompt(id=name, text="", tokens=tokens) for name, tokens in (("good", (1, 2)), ("bad", (3, 20)))]
    # No other token than these two, so that the good one stays good.
    others = tuple(token for token in range(24) if token not in {1, 2})
    with pytest.raises(RunError, match=r"^prompt bad: the model gave logits that are NaN"):
        InProcessEngine(policy).rollout(prompts, request(2, limit, suppressed=(*others, *STOP_IDS)))
