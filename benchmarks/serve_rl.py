"""CPU seconds of a step and of its completions, over HTTP from `posttrain serve bundled --rl` and in one process.

    python benchmarks/serve_rl.py [--repeats 5]

Both sample 16 × 16 completions of the bundled model in float32 with one thread and the same uniform numbers.  It also
says whether tokens and log-probs are the same to the bit.  Then `countdown-tiny` takes steps in both ways, weights sent
to the server included.  Linux only: it reads the server's time from /proc.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import torch

import posttrain
from posttrain.generation import rl_protocol as wire
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import Continuation, Request, StreamKey
from posttrain.models.loading.model_folder import load_policy
from posttrain.options.model import ModelOptions
from posttrain.options.rollout import SamplingParams

GROUPS, SIZE, LIMIT = 16, 16, 400
STEPS = 11
"""Of a run, without the first; the recipe's rate is still rising then."""
KEY = StreamKey(1, "rollout", 0)
TICKS_PER_SECOND = 100
Prompts = list[tuple[int, ...]]
Completions = dict[tuple[int, int], tuple[tuple[int, ...], tuple[float, ...]]]
"""Tokens and log-probs by draw and sample."""


def in_one_process(engine: InProcessEngine, prompts: Prompts) -> Completions:
    found: Completions = {}
    with engine.open(Request(sampling=SamplingParams(), key=KEY)) as sampling:
        sampling.put(
            [
                Continuation(prefix=prompt, draw=draw, sample=sample, limit=LIMIT)
                for draw, prompt in enumerate(prompts)
                for sample in range(SIZE)
            ]
        )
        while len(found) < GROUPS * SIZE:
            for each in sampling.take(60):
                found[each.continuation.draw, each.continuation.sample] = each.tokens, each.logprobs
    return found


async def over_http(url: str, prompts: Prompts) -> Completions:
    async def group(client: httpx.AsyncClient, draw: int) -> wire.GenerateResponse:
        stream = {"seed": KEY.seed, "purpose": KEY.purpose, "step": KEY.step, "draw": draw, "sample": 0}
        asks = wire.GenerateRequest(
            token_ids=prompts[draw],
            sampling_params=wire.SamplingFields(max_tokens=LIMIT, n=SIZE, logprobs=0),
            posttrain=wire.OwnFields(**stream),
        )
        json = {"Content-Type": "application/json"}
        said = await client.post(url + wire.GENERATE, content=wire.written(asks), headers=json)
        return wire.read(wire.GenerateResponse, said.raise_for_status().content)

    async with httpx.AsyncClient(timeout=600) as client:
        answers = await asyncio.gather(*(group(client, draw) for draw in range(GROUPS)))
    return {
        (draw, choice.index): (choice.token_ids, tuple(each.logprob for each in choice.logprobs.content))
        for draw, answer in enumerate(answers)
        for choice in answer.choices
    }


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


class Times(posttrain.Watcher):
    """CPU seconds of this process and of the server, after each step."""

    def __init__(self, server: int) -> None:
        self.server, self.after = server, list[tuple[float, float]]()

    def on_step(self, report: Any) -> None:
        self.after.append((time.process_time(), cpu_seconds(self.server)))


def steps(engine: dict[str, Any], server: int) -> tuple[list[Any], float, float]:
    """Reward and loss of each step; CPU seconds of a step here, and at the server."""
    watcher = Times(server)
    with tempfile.TemporaryDirectory() as folder:
        config = posttrain.load_recipe(
            "countdown-tiny",
            engine=engine,
            task={"held_out_size": 1},
            evaluation={"every_steps": 0},
            checkpoint={"every_steps": 0},
            run={"folder": f"{folder}/run", "num_steps": STEPS, "threads": 1, "curves": False},
        )
        run = posttrain.train(config, watchers=[watcher])
        lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    (own, other), (own_end, other_end) = watcher.after[0], watcher.after[-1]
    digits = [(line["reward"], line["loss"]) for line in lines if "loss" in line]
    return digits, (own_end - own) / (STEPS - 1), (other_end - other) / (STEPS - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    policy = load_policy(ModelOptions())
    texts = [f"Use all of {number}, 25, 11 to make {number + 11}.\n" for number in range(3, 3 + GROUPS)]
    prompts = [tuple(policy.tokenizer(text)["input_ids"]) for text in texts]
    engine = InProcessEngine(policy)
    seconds: dict[str, list[float]] = {"one process": [], "server": [], "its client": []}
    command = [sys.executable, "-m", "posttrain", "serve", "bundled", "--rl", "--port", "0"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # of products with other threads, last bits may differ
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=one_thread) as server:
        try:
            assert server.stdout is not None
            url = re.search(r"http://[^/]*", server.stdout.readline())[0]
            for number in range(repeats + 1):  # the first one warms up
                began = time.process_time()
                ours = in_one_process(engine, prompts)
                between, before = time.process_time(), cpu_seconds(server.pid)
                theirs = asyncio.run(over_http(url, prompts))
                taken = (between - began, cpu_seconds(server.pid) - before, time.process_time() - between)
                for name, value in zip(seconds, taken, strict=True):
                    seconds[name] += [value] if number else []
                assert theirs == ours, "tokens or log-probs differ"
            digits, alone, _ = steps({"native": False}, server.pid)
            same, client, served = steps({"name": "http", "urls": [url]}, server.pid)
            assert same == digits, "steps differ"
        finally:
            server.terminate()
    print(f"{GROUPS} × {SIZE} completions, {sum(len(tokens) for tokens, _ in ours.values()):,} tokens, same to the bit")
    for name, values in seconds.items():
        print(f"{name}: {median(values):.2f} s of CPU (median of {repeats})")
    print(
        f"a step: {alone:.2f} s in one process, {client:.2f} + {served:.2f} = {client + served:.2f} over HTTP"
        f" ({(client + served) / alone:.2f} times), the same rewards and losses"
    )


if __name__ == "__main__":
    main()
