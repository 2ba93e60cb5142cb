"""Decoding in padded steps of fixed shapes is decoding; capture itself needs a GPU."""

from collections.abc import Callable

import pytest
import torch

from posttrain.generation import in_process as engines
from posttrain.generation.decoder_steps import StaticSteps
from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import GroupRequest, StreamKey
from posttrain.models.loading.new_model import new_model, new_tokenizer
from posttrain.models.policy import Policy, as_policy
from posttrain.options.model import NewModelOptions
from posttrain.options.rollout import SamplingParams
from posttrain.records import Prompt

SHAPE = NewModelOptions(hidden_size=16, mlp_size=24, num_layers=2, num_heads=2, num_kv_heads=1, max_positions=600)
REQUEST = GroupRequest(
    group_size=3, max_completion_tokens=40, sampling=SamplingParams(), key=StreamKey(0, "rollout", 1)
)


def policy(device: str = "cpu") -> Policy:
    tokenizer = new_tokenizer()
    model = new_model(SHAPE, tokenizer, seed=0).double()
    for parameter in model.parameters():
        parameter.data.mul_(8)  # far from uniform, so that a wrong cache changes tokens
    return as_policy(model.to(device), tokenizer)


def prompts() -> list[Prompt]:
    # 240 tokens and a few: completions cross the 256-token width of the first shape.
    return [
        Prompt(id=str(i), text="", tokens=tuple((7 * i + j) % 300 + 5 for j in range(length)))
        for i, length in enumerate((3, 240, 9, 1, 30))
    ]


def sampled(policy: Policy, *, max_rows: int) -> list[tuple[int, ...]]:
    groups = sample_groups(InProcessEngine(policy, max_rows=max_rows), prompts(), REQUEST)
    return [rollout.tokens for group in groups for rollout in group.rollouts]


def test_fixed_weights_follow_the_policy_from_rollout_to_rollout(monkeypatch):
    subject = policy()
    monkeypatch.setattr(engines, "steps_for", StaticSteps)
    engine = InProcessEngine(subject, max_rows=15)
    before = sample_groups(engine, prompts(), REQUEST)
    for parameter in subject.model.parameters():
        parameter.data.add_(0.3)
    after = sample_groups(engine, prompts(), REQUEST)
    assert after == sample_groups(InProcessEngine(subject, max_rows=15), prompts(), REQUEST)
    assert after != before


class WarmedUp(StaticSteps):
    """Runs a step twice before it is first used, as a capture does; the cache must be left as the step leaves it."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.prepare = warmed_up


def warmed_up(compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    compute()
    compute()
    return compute


@pytest.mark.parametrize("steps", [StaticSteps, WarmedUp])
@pytest.mark.parametrize("max_rows", [15, 4])
def test_padded_steps_of_fixed_shapes_sample_the_same_completions(max_rows, steps, monkeypatch):
    subject = policy()
    expected = sampled(subject, max_rows=max_rows)
    monkeypatch.setattr(engines, "steps_for", steps)
    assert sampled(subject, max_rows=max_rows) == expected


@pytest.mark.gpu
def test_captured_steps_sample_what_the_cpu_samples():
    torch.backends.cuda.matmul.allow_tf32 = False
    on_gpu, on_cpu = sampled(policy("cuda"), max_rows=15), sampled(policy(), max_rows=15)
    assert on_gpu == on_cpu
