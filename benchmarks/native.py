"""Sampling and scoring by the native kernel and by torch, in turns: processor seconds, tokens and log-probs.

    python benchmarks/native.py
    python benchmarks/native.py --model runs/demo/model

16 Countdown problems with 16 completions each are sampled with the same streams by both, and then scored by both.
Prints the ratio of processor seconds, the completions with the same tokens, and the largest gaps of log-probs in nats.
One thread unless `--threads` says otherwise.
"""

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import Continuation, Request, Sampled, StreamKey
from posttrain.models.forward import Completions
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.native.native_decoder import native_decoder, native_refusal
from posttrain.models.native.native_scoring import native_logprobs
from posttrain.models.policy import Policy, as_policy
from posttrain.models.rendering import renderer_of
from posttrain.options.model import ModelOptions
from posttrain.options.rollout import SamplingParams
from posttrain.options.task import CountdownOptions
from posttrain.tasks.countdown_task import CountdownTask

PROBLEMS, GROUP = 16, 16


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


if __name__ == "__main__":
    main()
