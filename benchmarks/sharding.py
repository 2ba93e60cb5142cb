"""Update tokens per second of two ranks beside one, each on one thread, and the memory of each rank.

    python benchmarks/sharding.py                     # speed, of the 100 M shape of trl/vs_trl.py
    python benchmarks/sharding.py --shape bundled     # of the model that comes with the package
    python benchmarks/sharding.py --memory            # peaks of whole runs of the 100 M shape, beside their plans
    python benchmarks/sharding.py --memory --shape 25m --only sft grpo

*Speed*: one rank and two take the same update in turn, of two micro-batches of up to 4,096 tokens: two ranks take one
each.  Seconds are the clock's, and those of the busier rank's CPU, for a machine that does other things too.

*Memory*: `posttrain rl` with a reference, the same with an adapter, and `posttrain sft`, by one rank and by two: two
steps, with checkpoints, the model saved, and a resume.
"""

import argparse
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

sys.path.append(str(Path(__file__).parent / "trl"))

import torch
import torch.distributed as dist
import yaml
from _vs_trl_inputs import random_rows, save_random_model
from _vs_trl_shapes import SHAPES
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from posttrain.algorithms.table import build_algorithm
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.sharding import own_part
from posttrain.options.model import ModelOptions
from posttrain.options.training import UpdateOptions
from posttrain.ranks.group import ONE_RANK, RankGroup, Result
from posttrain.records import Finish, Grades, Group, Prompt, Rollout, TokenSequence
from posttrain.runs.progress import Clock
from posttrain.training.collector import CollectedStep
from posttrain.training.learner import Learner, LearnerSettings

MICRO_BATCH = 4096
SHAPE = SHAPES["100m"]
PROMPT_TOKENS, COMPLETION_TOKENS, GROUP_SIZE = SHAPE.prompt_tokens, SHAPE.completion_tokens, SHAPE.group_size
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
    parser.add_argument("--shape", choices=("100m", "25m", "bundled"), default="100m")
    parser.add_argument("--rounds", type=int, default=2, help="measured updates of each, after a small one that is not")
    parser.add_argument("--memory", action="store_true", help="peaks of runs, not speed")
    parser.add_argument("--only", choices=RUNS, nargs="+", default=[*RUNS], help="of the runs of --memory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = "bundled"
        if options.memory or options.shape != "bundled":
            assert SHAPE.network is not None
            half = {"hidden": 448, "heads": 7, "kv_heads": 1, "mlp": 1216} if options.shape == "25m" else {}
            save_random_model(replace(SHAPE.network, **half), Path(folder) / "model", seed=0, ends=options.memory)
            model = str(Path(folder) / "model")
        if options.memory:
            show_peaks(Path(folder), options.only)
            return
        context, port = multiprocessing.get_context("spawn"), free_port()
        ranks = [context.Process(target=measure, args=(rank, port, model, options.rounds)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def measure(rank: int, port: int, model: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    together, small, collected = Together(), step_of(1), step_of(MICRO_BATCH // GROUP_TOKENS)
    num_tokens = sum(
        len(group.prompt.tokens) + sum(len(rollout.tokens) for rollout in group.rollouts) for group in collected.groups
    )
    learners = {RANKS: learner_of(model, together)}
    if rank == 0:
        learners[1] = learner_of(model, ONE_RANK)
    found: dict[int, list[tuple[float, float]]] = {1: [], RANKS: []}
    for turn in range(rounds + 1):
        for size in (1, RANKS):
            dist.barrier()
            if size in learners:
                found[size].append(seconds_of(learners[size], collected if turn else small, turn + 1))
            together.gathered(None)
    cpu = max(together.gathered(min(cpu for _, cpu in found[RANKS][1:])))
    held = {size: held_bytes(learner) for size, learner in learners.items()}
    if rank == 0:
        one, two = (min(wall for wall, _ in found[size][1:]) for size in (1, RANKS))
        one_cpu = min(cpu for _, cpu in found[1][1:])
        print(f"{model}: {num_tokens} tokens an update, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        print(f"1 rank   {num_tokens / one:8.0f} tokens/s   {num_tokens / one_cpu:8.0f} per CPU second")
        print(f"2 ranks  {num_tokens / two:8.0f} tokens/s   {num_tokens / cpu:8.0f} per CPU second of the busier rank")
        print(f"ratio    {one / two:8.2f}              {one_cpu / cpu:8.2f}")
        print(f"parameters, gradients and moments of a rank: {held[RANKS] / held[1]:.3f} of one rank's {held[1]} bytes")
    dist.destroy_process_group()


def learner_of(model: str, ranks: RankGroup) -> Learner:
    settings = LearnerSettings(
        update=UpdateOptions(learning_rate=1e-6, tokens_per_microbatch=MICRO_BATCH),
        max_completion_tokens=COMPLETION_TOKENS,
    )
    policy = replace(load_policy(ModelOptions(path=model)), ranks=ranks)
    return Learner(policy, build_algorithm({"name": "grpo"}), settings)


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


WITH_REFERENCE = {
    "algorithm": {"name": "grpo", "kl": {"coefficient": 0.1, "estimator": "k3", "place": "loss"}},
    "rollout": {"prompts_per_step": 2, "group_size": 4, "max_completion_tokens": 16},
    "update": {"tokens_per_microbatch": 256},
    "evaluation": {"every_steps": 0},
}
RUNS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "grpo": ("rl", WITH_REFERENCE),
    "lora": ("rl", {**WITH_REFERENCE, "model": {"adapter": {"rank": 16}}}),
    "sft": ("sft", {"sft": {"tokens_per_batch": 512, "tokens_per_microbatch": 256, "max_length": 128}}),
}
"""Command and sections of the recipe."""
RANK = """
import sys
from pathlib import Path
from posttrain.cli import main
from posttrain.runs.progress import peak_memory_bytes

code = main(sys.argv[2:])
Path(sys.argv[1]).write_text(str(peak_memory_bytes()))
sys.exit(code)
"""
REWARD = """
def reward(completion_ids):
    return [sum(ids) % 7 / 7 for ids in completion_ids]
"""


def show_peaks(folder: Path, names: Iterable[str]) -> None:
    """Each rank's peak in a run and in its resume, beside the plan; in GB."""
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    for name in names:
        for size in (1, RANKS):
            recipe = recipe_of(folder, name, size)
            command, place = RUNS[name][0], folder / f"{name}-{size}"
            asked = [sys.executable, "-m", "posttrain", "plan", recipe, "--ranks", str(size), "--json", *PROMPT]
            planned = json.loads(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)["plans"][
                "recipe"
            ]
            found = peaks_of([command, recipe], size, place)
            more = peaks_of([command, "--resume", str(place), "--run.num-steps", "3"], size, place)
            print(f"{name}, {size} ranks: plan {planned['peak'] / 1e9:.2f}", end="")
            for what, peaks in (("run", found), ("resume", more)):
                said = ", ".join(f"{peak / 1e9:.2f} ({planned['peak'] / peak - 1:+.0%})" for peak in peaks)
                print(f"   {what} {said}", end="")
            print(flush=True)


PROMPT = ("--prompt-tokens", "64")


def recipe_of(folder: Path, name: str, size: int) -> str:
    command, sections = RUNS[name]
    rows = [{**row, "completion": "1" * 63} for row in random_rows(0, 8, 64)]
    (folder / f"{command}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    recipe = {
        **sections,
        "model": {"path": str(folder / "model"), **sections.get("model", {})},
        "task": {"name": "dataset", "path": str(folder / f"{command}.jsonl"), "held_out_share": 0.0},
        "run": {"num_steps": 2, "threads": 1, "curves": False, "folder": str(folder / f"{name}-{size}")},
        **({"rewards": [{"path": f"{folder}/reward.py:reward"}]} if command == "rl" else {}),
    }
    file = folder / f"{name}-{size}.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return str(file)


def peaks_of(argv: list[str], size: int, place: Path) -> list[int]:
    """The peak of each rank of a command, in bytes."""
    shared, started, files = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}, [], []
    for rank in range(size):
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        environment = {**os.environ, **(shared | numbers if size > 1 else {})}
        files.append(place.with_name(f"{place.name}-peak-{rank}"))
        command = [sys.executable, "-c", RANK, str(files[-1]), *argv]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    if [code for process in started if (code := process.wait())]:
        sys.exit("a rank failed")
    return [int(file.read_text()) for file in files]


if __name__ == "__main__":
    main()
