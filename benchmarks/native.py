"""Sampling, scoring and updates by the native kernel and by torch, in turns: processor seconds, tokens, gradients.

    python benchmarks/native.py
    python benchmarks/native.py --model runs/demo/model

16 Countdown problems with 16 completions each are sampled with the same streams by both, and then scored by both.  An
update is the gradient of all of them, in micro-batches of 4,096 tokens, without the optimiser.  Prints the ratio of
processor seconds, the completions with the same tokens, the largest gaps of log-probs in nats, and the relative error
of the gradient against float64.
One thread unless `--threads` says otherwise.
"""

import argparse
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import Continuation, Request, Sampled, StreamKey
from posttrain.models.forward import Completions, ForwardNeeds
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.native.native_decoder import native_decoder, native_refusal
from posttrain.models.native.native_layers import layers_refusal, training_forward
from posttrain.models.native.native_scoring import native_logprobs
from posttrain.models.policy import Policy, as_policy
from posttrain.models.rendering import renderer_of
from posttrain.models.shared_prompt.fused import gradients_in_place
from posttrain.options.model import ModelOptions
from posttrain.options.rollout import SamplingParams
from posttrain.options.task import CountdownOptions
from posttrain.tasks.countdown_task import CountdownTask

PROBLEMS, GROUP = 16, 16
MICRO_TOKENS = 4096
"""As in recipes/countdown-tiny.yaml."""


def sampled(policy: Policy, those: Sequence[Continuation]) -> list[Sampled]:
    """All completions, in order; only the warm engine is timed."""
    done: list[Sampled] = []
    with InProcessEngine(policy).open(Request(sampling=SamplingParams(), key=StreamKey(0, "benchmark", 0))) as sampling:
        sampling.put(those)
        while len(done) < len(those):
            done += sampling.take(600)
    return sorted(done, key=lambda each: (each.continuation.draw, each.continuation.sample))


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.process_time()
    found = call()
    return time.process_time() - began, found


def scored_natively(policy: Policy, batch: Completions) -> torch.Tensor:
    decoder = native_decoder(policy)
    assert decoder is not None
    return native_logprobs(decoder, batch, 1.0)


def micro_batches(batch: Completions) -> Iterator[Completions]:
    """Whole groups, up to 4,096 tokens."""
    groups = [[t for t, of in zip(batch.completions, batch.prompt_of, strict=True) if of == p] for p in range(PROBLEMS)]
    some, size = list[int](), 0
    for each, (prompt, group) in enumerate(zip(batch.prompts, groups, strict=True)):
        more = len(prompt) + sum(map(len, group))
        if some and size + more > MICRO_TOKENS:
            yield of_groups(batch, groups, some)
            some, size = [], 0
        some.append(each)
        size += more
    yield of_groups(batch, groups, some)


def of_groups(batch: Completions, groups: Sequence[Sequence[Sequence[int]]], some: Sequence[int]) -> Completions:
    completions = [tokens for each in some for tokens in groups[each]]
    prompt_of = [place for place, each in enumerate(some) for _ in groups[each]]
    return Completions([batch.prompts[each] for each in some], completions, prompt_of)


def gradient(policy: Policy, batches: Sequence[Completions]) -> torch.Tensor:
    """Of a sum of log-probs with fixed random weights, as policy gradients have."""
    policy.model.zero_grad(set_to_none=True)
    dice = torch.Generator().manual_seed(0)
    for batch in batches:
        with gradients_in_place():
            logprobs = training_forward(policy).completion_logprobs(batch, ForwardNeeds()).logprobs
        assert logprobs is not None
        weights = torch.randn(len(logprobs), generator=dice, dtype=torch.float64)
        (weights.to(logprobs) * logprobs).sum().backward()
    return torch.cat([each.grad.double().flatten() for each in policy.model.parameters() if each.grad is not None])


def compare_updates(ours: Policy, theirs: Policy, double: Policy, batch: Completions, repeats: int) -> None:
    if (refusal := layers_refusal(ours)) is not None:
        print(f"updates: by torch: {refusal}")
        return
    batches, times = list(micro_batches(batch)), []
    exact = gradient(double, batches)
    gradient(ours, batches), gradient(theirs, batches)  # warm
    for _ in range(repeats):
        first, by_kernel = timed(lambda: gradient(ours, batches))
        second, by_torch = timed(lambda: gradient(theirs, batches))
        times.append((first, second))
    report("updates", times, sum(map(len, batch.completions)))
    for name, found in (("kernel", by_kernel), ("torch", by_torch)):
        print(f"{name} and float64: the gradients differ by {(found - exact).norm() / exact.norm():.1e}")


def report(what: str, seconds: Sequence[tuple[float, float]], tokens: int) -> None:
    ratios = sorted(theirs / ours for ours, theirs in seconds)
    ours, theirs = (median(each) for each in zip(*seconds, strict=True))
    says = f"{tokens / ours:,.0f} and {tokens / theirs:,.0f} tokens per CPU second"
    print(f"{what}: {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) times as fast; {says}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    theirs = load_policy(ModelOptions(path=given.model), inference=True)
    ours = replace(theirs, native_reason=None)
    if (refusal := native_refusal(ours)) is not None:
        raise SystemExit(f"not by the native kernel: {refusal}")
    task = CountdownTask(CountdownOptions(prompt_style="compact"), renderer_of(theirs, {}), seed=0)
    prompts = [prompt.tokens for prompt in task.prompts(1, range(PROBLEMS))]
    those = [
        Continuation(prefix=prompt, draw=draw, sample=sample, limit=given.max_tokens)
        for draw, prompt in enumerate(prompts)
        for sample in range(GROUP)
    ]
    sampled(ours, those[:GROUP]), sampled(theirs, those[:GROUP])  # warm
    times = []
    for _ in range(given.repeats):
        first, native = timed(lambda: sampled(ours, those))
        second, in_torch = timed(lambda: sampled(theirs, those))
        times.append((first, second))
    tokens = sum(len(each.tokens) for each in in_torch)
    same = [(a, b) for a, b in zip(native, in_torch, strict=True) if a.tokens == b.tokens]
    gap = max(abs(p - q) for a, b in same for p, q in zip(a.logprobs, b.logprobs, strict=True))
    report("sampling", times, tokens)
    print(
        f"same tokens in {len(same)} of {len(those)} completions ({tokens:,} tokens); log-probs within {gap:.1e} nats"
    )

    batch = Completions(prompts, [each.tokens for each in in_torch], [each.continuation.draw for each in in_torch])
    times = []
    with torch.no_grad():
        for _ in range(given.repeats):
            first, by_kernel = timed(lambda: scored_natively(ours, batch))
            second, by_torch = timed(lambda: theirs.completion_logprobs(batch).double())
            times.append((first, second))
    report("scoring", times, tokens)
    with torch.no_grad():
        double = as_policy(copy.deepcopy(theirs.model).double(), theirs.tokenizer)
        exact = double.completion_logprobs(batch)
    apart = {"kernel and torch": by_kernel - by_torch, "kernel and float64": by_kernel - exact}
    for names, gaps in {**apart, "torch and float64": by_torch - exact}.items():
        print(f"{names}: largest gap {gaps.abs().max():.1e} nats, mean {gaps.abs().mean():.1e}")
    compare_updates(ours, theirs, double, batch, given.repeats)


if __name__ == "__main__":
    main()
