"""Where a run's time goes: floating-point operations a second of each stage, beside what a core can do.

    .venv/bin/python benchmarks/stages.py runs/demo

The run's model must be a Llama, Qwen2 or Qwen3.  Operations are those of the products with weights and of attention,
each token counted once: 2 P + 4 L H c for a token that is read, with P weights in matrices, L layers, heads of H
numbers together and c earlier tokens; three times as many in an update.  The peak is a product of 512 × 512 matrices on
one thread, on this machine and now: measure on the machine of the run, and when it is idle.
"""

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

STAGES = ("rollout", "reference", "update")
SIDE, REPEATS = 512, 50


@dataclass(frozen=True, slots=True)
class Operations:
    """Floating-point operations of a decoder's tokens."""

    weights: int
    attention: int
    """Operations of a token for each token before it."""

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> "Operations":
        """From config.json."""
        width, layers, heads = model["hidden_size"], model["num_hidden_layers"], model["num_attention_heads"]
        head = model.get("head_dim") or width // heads
        shared = model.get("num_key_value_heads") or heads
        layer = width * head * (2 * heads + 2 * shared) + 3 * width * model["intermediate_size"]
        return cls(layers * layer + width * model["vocab_size"], 4 * layers * heads * head)

    def tokens(self, count: float, *, before: float) -> float:
        """Reading `count` tokens, each with `before` tokens before it on average."""
        return count * (2 * self.weights + self.attention * before)


def operations_of_step(line: Mapping[str, float], each: Operations) -> dict[str, float]:
    prompts, sampled = line["tokens/prompt"], line["tokens/completion"]
    prompt = prompts / line["num_groups"]
    # A lower bound: long completions have more tokens, and each has more before it.
    passed = each.tokens(sampled, before=prompt + line["completions/mean_length"] / 2)
    read = passed + each.tokens(prompts, before=prompt / 2)
    return {"rollout": read, "reference": read, "update": 3 * read}


def peak() -> float:
    """Operations a second of one thread."""
    torch.set_num_threads(1)
    left, right = torch.randn(2, SIDE, SIDE).unbind()
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - began)
    return 2 * SIDE**3 / median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    run = parser.parse_args().run
    summary = json.loads((run / "summary.json").read_text())
    each = Operations.of(json.loads((run / "model" / "config.json").read_text()))
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in steps if "seconds/update" in line]
    threads, at_most = summary["machine"]["threads"], peak()
    print(f"{len(steps)} steps, {threads} threads; a core does {at_most / 1e9:.0f} GFLOP/s")
    print(f"{'stage':<12}{'seconds':>10}{'GFLOP':>10}{'GFLOP/s a core':>18}{'of its peak':>14}")
    for stage in STAGES:
        took = sum(line.get(f"seconds/{stage}", 0.0) for line in steps)
        if not took:
            continue
        done = sum(operations_of_step(line, each)[stage] for line in steps)
        rate = done / took / threads
        print(f"{stage:<12}{took:>10.1f}{done / 1e9:>10.0f}{rate / 1e9:>18.1f}{rate / at_most:>13.0%}")


if __name__ == "__main__":
    main()
