"""Update tokens per second of two ranks beside one, each on one thread, and the bytes that each rank holds.

    python benchmarks/sharding.py                     # the 100 M shape of trl/vs_trl.py
    python benchmarks/sharding.py --shape bundled     # the model that comes with the package

One rank and two take the same update in turn, of two micro-batches of up to 4,096 tokens: two ranks take one each.
Seconds are the clock's, and those of the busier rank's CPU, for a machine that does other things too.
"""

import argparse
import multiprocessing
import os
import resource
import socket
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

sys.path.append(str(Path(__file__).parent / "trl"))

import torch
import torch.distributed as dist
from _vs_trl_shapes import SHAPES
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import Qwen3Config, Qwen3ForCausalLM

from posttrain.algorithms.table import build_algorithm
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.loading.new_model import new_tokenizer
from posttrain.models.policy import Policy, as_policy
from posttrain.models.sharding import own_part
from posttrain.options.model import ModelOptions
from posttrain.options.training import UpdateOptions
from posttrain.ranks.group import ONE_RANK, RankGroup, Result
from posttrain.records import Finish, Grades, Group, Prompt, Rollout, TokenSequence
from posttrain.runs.progress import Clock
from posttrain.training.collector import CollectedStep
from posttrain.training.learner import Learner, LearnerSettings

MICRO_BATCH = 4096
PROMPT_TOKENS, COMPLETION_TOKENS, GROUP_SIZE = 300, 32, 8
"""Of the 100 M shape."""
GROUP_TOKENS = PROMPT_TOKENS + GROUP_SIZE * COMPLETION_TOKENS
RANKS = 2


class Together(RankGroup):
    """Ranks that run the same code."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def mesh(self, device: torch.device) -> DeviceMesh:
        return init_device_mesh(device.type, (self.size,))

    def gathered(self, value: Result) -> list[Result]:
        boxes: list[Any] = [None] * self.size
        dist.all_gather_object(boxes, value)
        return boxes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("100m", "bundled"), default="100m")
    parser.add_argument("--rounds", type=int, default=2, help="measured updates of each, after a small one that is not")
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=measure, args=(rank, port, options.shape, options.rounds)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))


def measure(rank: int, port: int, shape: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    together, small, collected = Together(), step_of(1), step_of(MICRO_BATCH // GROUP_TOKENS)
    num_tokens = sum(
        len(group.prompt.tokens) + sum(len(rollout.tokens) for rollout in group.rollouts) for group in collected.groups
    )
    learners = {RANKS: learner_of(shape, together)}
    if rank == 0:
        learners[1] = learner_of(shape, ONE_RANK)
    found: dict[int, list[tuple[float, float]]] = {1: [], RANKS: []}
    for turn in range(rounds + 1):
        for size in (1, RANKS):
            dist.barrier()
            if size in learners:
                found[size].append(seconds_of(learners[size], collected if turn else small, turn + 1))
            together.gathered(None)
    cpu = max(together.gathered(min(cpu for _, cpu in found[RANKS][1:])))
    held = {size: held_bytes(learner) for size, learner in learners.items()}
    peak = together.gathered(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    if rank == 0:
        one, two = (min(wall for wall, _ in found[size][1:]) for size in (1, RANKS))
        one_cpu = min(cpu for _, cpu in found[1][1:])
        print(f"{shape}: {num_tokens} tokens an update, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        print(f"1 rank   {num_tokens / one:8.0f} tokens/s   {num_tokens / one_cpu:8.0f} per CPU second")
        print(f"2 ranks  {num_tokens / two:8.0f} tokens/s   {num_tokens / cpu:8.0f} per CPU second of the busier rank")
        print(f"ratio    {one / two:8.2f}              {one_cpu / cpu:8.2f}")
        print(f"parameters, gradients and moments of a rank: {held[RANKS] / held[1]:.3f} of one rank's {held[1]} bytes")
        print(f"peak of rank 1, which has no other model: {peak[1] / 1024:.0f} MiB")
    dist.destroy_process_group()


def learner_of(shape: str, ranks: RankGroup) -> Learner:
    settings = LearnerSettings(
        update=UpdateOptions(learning_rate=1e-6, tokens_per_microbatch=MICRO_BATCH),
        max_completion_tokens=COMPLETION_TOKENS,
    )
    return Learner(replace(policy_of(shape), ranks=ranks), build_algorithm({"name": "grpo"}), settings)


def policy_of(shape: str) -> Policy:
    if shape == "bundled":
        return load_policy(ModelOptions(path="bundled"))
    network = SHAPES[shape].network
    assert network is not None
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=network.vocab,
        hidden_size=network.hidden,
        intermediate_size=network.mlp,
        num_hidden_layers=network.layers,
        num_attention_heads=network.heads,
        num_key_value_heads=network.kv_heads,
        head_dim=network.hidden // network.heads,
        tie_word_embeddings=True,
        eos_token_id=0,
    )
    return as_policy(Qwen3ForCausalLM(config), new_tokenizer())


def step_of(groups_of_a_rank: int) -> CollectedStep:
    """Groups of random tokens."""
    stream, num_groups = torch.Generator().manual_seed(0), RANKS * groups_of_a_rank

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(20, 100, (count,), generator=stream).tolist())

    groups = []
    for draw in range(num_groups):
        sequences = [
            TokenSequence.one_turn(
                tokens(COMPLETION_TOKENS), logprobs=(-4.6,) * COMPLETION_TOKENS, finish=Finish.LENGTH
            )
            for _ in range(GROUP_SIZE)
        ]
        rollouts = tuple(Rollout(sample=place, sequence=each, text="") for place, each in enumerate(sequences))
        prompt = Prompt(id=str(draw), text="", tokens=tokens(PROMPT_TOKENS))
        groups.append(Group(prompt=prompt, draw=draw, rollouts=rollouts))
    rewards = torch.rand(num_groups, GROUP_SIZE, generator=stream, dtype=torch.float64)
    grades = Grades(names=("random",), scores=rewards[None], weights=torch.ones(1).double(), rewards=rewards)
    return CollectedStep(step=1, groups=groups, grades=grades)


def seconds_of(learner: Learner, collected: CollectedStep, step: int) -> tuple[float, float]:
    """Of one update: on the clock, and of this process's CPU."""
    batches = learner.batches(learner.credit(collected, Clock()), Clock())
    wall, cpu = perf_counter(), process_time()
    learner.learn(batches, step, Clock())
    return perf_counter() - wall, process_time() - cpu


def held_bytes(learner: Learner) -> int:
    """Parameters, as many gradients, and moments."""
    parameters = [*learner.policy.model.parameters()]
    moments = [each for state in learner.optimizer.state.values() for each in state.values() if each.ndim]
    return 2 * size_of(parameters) + size_of(moments)


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(own_part(each.detach()).nbytes for each in tensors)


if __name__ == "__main__":
    main()
