"""A server as an engine: parity after updates that move the weights, seconds of an update, tokens per CPU second.

    python benchmarks/engines.py http://127.0.0.1:8000 MODEL PID

The server is the process PID of this machine, started with the model of the folder MODEL; docs/guides/engines.md has
the flags of vLLM.
"""

import os
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

from posttrain.generation.engine import sample_groups
from posttrain.generation.http.http_engine import HttpEngine
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import GroupRequest, StreamKey
from posttrain.models.context import num_embeddings
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.loading.saving import ExportedWeights
from posttrain.models.policy import Policy
from posttrain.options.model import ModelOptions
from posttrain.options.rollout import HttpOptions, SamplingParams
from posttrain.records import Prompt

UPDATES, PROMPTS, GROUP_SIZE, LIMIT = 5, 32, 8, 100


@torch.no_grad()
def move(policy: Policy, generator: torch.Generator) -> None:
    """Change weights by so much that old ones are tenths of a nat off."""
    for parameter in policy.model.parameters():
        parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))


def cpu_seconds(process: int) -> float:
    """CPU time of a process on this machine and its children, so far; Linux."""
    total, parents = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
            total[int(folder.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def belongs(number: int) -> bool:
        return number == process or (number in parents and belongs(parents[number]))

    return sum(seconds for number, seconds in total.items() if belongs(number))


def main(url: str, model: str, pid: str) -> None:
    server = int(pid)
    policy, generator = load_policy(ModelOptions(path=model)), torch.Generator().manual_seed(0)
    options = HttpOptions(urls=(url,))
    engine = HttpEngine(policy, options, longest=min(400, policy.max_positions), sampling=SamplingParams())
    try:
        print("\n".join(engine.describe()))
        engine.load(ExportedWeights(policy), 0)
        paused, whole, gaps = [], [], []
        for version in range(1, UPDATES + 1):
            move(policy, generator)
            began = time.monotonic()
            engine.load(ExportedWeights(policy), version)
            whole.append(time.monotonic() - began)
            paused.append(engine.servers[0].paused_seconds)
            gaps.append(engine.probe_gap)
        print(
            f"{UPDATES} updates: largest difference of a log-prob after each {', '.join(f'{g:.1e}' for g in gaps)} nats"
        )
        print(
            f"paused {statistics.median(paused):.3f} s, with file and probe {statistics.median(whole):.3f} s (medians)"
        )
        random = torch.randint(num_embeddings(policy.model), (PROMPTS, 20), generator=generator).tolist()
        prompts = [Prompt(id=str(number), text="", tokens=tuple(tokens)) for number, tokens in enumerate(random)]
        for name, each in (("this process", InProcessEngine(policy)), ("the server", engine)):
            asked = GroupRequest(
                group_size=GROUP_SIZE,
                max_completion_tokens=LIMIT,
                sampling=SamplingParams(),
                key=StreamKey(0, "bench", 0),
            )
            used = cpu_seconds(os.getpid()) if each is not engine else cpu_seconds(server)
            groups = sample_groups(each, prompts, asked)
            used = (cpu_seconds(os.getpid()) if each is not engine else cpu_seconds(server)) - used
            tokens = sum(rollout.num_sampled for group in groups for rollout in group.rollouts)
            print(f"{name}: {tokens:,} tokens, {tokens / used:,.0f} per CPU second")
    finally:
        engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
