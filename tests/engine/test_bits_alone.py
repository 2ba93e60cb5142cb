"""In float32 on a CPU a completion has the same bits whatever is decoded beside it.

So a server that takes over another's completions, ranks that share them out, and replies that come at any time change
no bit of a run.
"""

import random
from dataclasses import replace

import pytest
import torch

from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import Continuation, Request, Sampled, StreamKey
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.policy import Policy
from posttrain.options.model import AdapterOptions, ModelOptions
from posttrain.options.rollout import SamplingParams

REQUEST = Request(sampling=SamplingParams(), key=StreamKey(3, "bits", 1))
LENGTHS = (1, 5, 18, 31, 64, 97, 130, 189, 223)
"""Of prompts: on both sides of every length at which kernels cut sequences into blocks, up to 256."""
LIMIT = 10


@pytest.fixture(scope="module", params=["bundled", "bundled-instruct", "bundled with an adapter", "bundled natively"])
def policy(request: pytest.FixtureRequest) -> Policy:
    name, _, how = request.param.partition(" ")
    options = ModelOptions(path=name, adapter=AdapterOptions(rank=4) if how == "with an adapter" else None)
    made = load_policy(options)
    if how == "natively":
        made = replace(made, native_reason=None)
    for parameter in made.model.parameters():  # B of a new adapter is zero
        if parameter.requires_grad and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)
    return made


def continuations(policy: Policy) -> list[Continuation]:
    dice, vocabulary = random.Random(0), policy.model.config.vocab_size
    return [
        Continuation(prefix=prefix, draw=draw, sample=sample, limit=LIMIT)
        for draw, prefix in enumerate(tuple(dice.randrange(vocabulary) for _ in range(length)) for length in LENGTHS)
        for sample in range(3)
    ]


def sampled(policy: Policy, those: list[Continuation], *, max_rows: int = 256) -> dict[tuple[int, int], Sampled]:
    found: dict[tuple[int, int], Sampled] = {}
    with InProcessEngine(policy, max_rows=max_rows).open(REQUEST) as sampling:
        sampling.put(those)
        while len(found) < len(those):
            found |= {(each.continuation.draw, each.continuation.sample): each for each in sampling.take(60)}
    return found


@pytest.fixture(scope="module")
def together(policy: Policy) -> dict[tuple[int, int], Sampled]:
    return sampled(policy, continuations(policy))


def test_alone_as_among_others(policy, together):
    for each in continuations(policy)[::4]:
        key = each.draw, each.sample
        assert sampled(policy, [each])[key] == together[key]


def test_in_any_company(policy, together):
    those = continuations(policy)
    assert sampled(policy, those[::2]) | sampled(policy, those[1::2]) == together
    assert sampled(policy, those[::-1], max_rows=5) == together


def continued(policy: Policy, *, max_rows: int) -> dict[tuple[int, int], Sampled]:
    """Second turns, each behind a reply of three tokens."""
    found: list[Sampled] = []
    with InProcessEngine(policy, max_rows=max_rows).open(replace(REQUEST, keep=True)) as sampling:
        those = continuations(policy)[::3]
        for _ in range(2):
            sampling.put(those)
            found = []
            while len(found) < len(those):
                found += sampling.take(60)
            those = [
                replace(each.continuation, prefix=(*each.sequence, 5, 6, 7), first_position=len(each.tokens))
                for each in found
            ]
    return {(each.continuation.draw, each.continuation.sample): each for each in found}


def test_after_its_cache_was_freed(policy):
    """Rows are freed when nothing else can be decoded, which depends on when replies come."""
    assert continued(policy, max_rows=3) == continued(policy, max_rows=256)
