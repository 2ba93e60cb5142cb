"""A program: two steps of training on models of given shapes, and what each held beyond the imports.

By reward, or of shapes with `sft` on rows.

`python -m tests.support.memory_probe '{"NAME": {"model": {...}, ...}}'` prints bytes by name.  Each is run in a process
of its own, forked from one that has imported everything: forked ones count their peak from there.
"""

import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from posttrain.algorithms.table import build_algorithm
from posttrain.config import SftConfig
from posttrain.generation.in_process import InProcessEngine
from posttrain.models.adapters.adaptable import add_adapter
from posttrain.models.loading.new_model import new_tokenizer
from posttrain.models.policy import Policy, as_policy
from posttrain.options.dataset import DatasetOptions
from posttrain.options.model import AdapterOptions
from posttrain.options.rollout import RolloutOptions
from posttrain.options.training import SftOptions, UpdateOptions
from posttrain.records import Example, Prompt, TokenSequence
from posttrain.rewards.grading.grade import reward_function
from posttrain.runs.progress import Clock, peak_memory_bytes
from posttrain.tasks.base import Task
from posttrain.training.collector import Collector, CollectorSettings, discard_scores
from posttrain.training.fit_session import FitSession
from posttrain.training.learner import Learner, LearnerSettings
from posttrain.training.sft.sft_run import SftObjective
from tests.support.stages import even_tokens

PROMPT_TOKENS = 32
NEVER = 10**9
"""A stop token that no model samples: completions are as long as they may be."""


class RandomTokens(Task):
    """Prompts of random tokens, all of one length."""

    name = "random tokens"
    reward_functions = (reward_function(even_tokens),)

    def prompts(self, step: int, draws: range) -> list[Prompt]:
        stream = random.Random(step)
        tokens = [tuple(stream.randrange(20, 300) for _ in range(PROMPT_TOKENS)) for _ in draws]
        return [
            Prompt(id=f"draw {draw}", text="", tokens=each, columns={})
            for draw, each in zip(draws, tokens, strict=True)
        ]

    def held_out(self) -> list[Prompt]:
        return []


def held_now() -> int:
    """Physical memory of this process, in bytes."""
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return resident * 4096


def held_more(shape: dict) -> int:
    """Bytes that the steps held at most, beyond what this process holds now."""
    imported = held_now()
    model = Qwen3ForCausalLM(Qwen3Config(**shape["model"]))
    if "adapter_rank" in shape:
        add_adapter(model, AdapterOptions(rank=shape["adapter_rank"]), seed=0)
    policy = replace(as_policy(model, new_tokenizer()), stop_ids=(NEVER,))
    learn_rows(policy, shape["sft"]) if "sft" in shape else learn_by_reward(policy, shape)
    return peak_memory_bytes() - imported


def learn_rows(policy: Policy, options: dict) -> None:
    """Two updates on rows of one length, all of which is learned."""
    sft = SftOptions(**options)
    length = sft.max_length or 0

    class Rows:
        """A source of random rows."""

        def batch(self, first: int, options: SftOptions) -> list[Example]:
            rows = [
                [(7 * (first + row) + place) % 300 + 20 for place in range(length)]
                for row in range(options.tokens_per_batch // length)
            ]
            sampled = (False, *[True] * (length - 1))
            return [Example(TokenSequence(tokens=tuple(row), sampled=sampled)) for row in rows]

        def num_steps(self, options: SftOptions) -> int:
            return 2

        def described(self) -> list[str]:
            return []

        def summary(self) -> dict[str, object]:
            return {}

    config = SftConfig(sft=sft, task=DatasetOptions(path="rows.jsonl"))
    session = FitSession(config, "", Rows(), SftObjective(config, policy, []))
    for step in (1, 2):
        session.learn(step)


def learn_by_reward(policy: Policy, shape: dict) -> None:
    """Two steps of completions of random prompts, as long as they may be."""
    rollout = RolloutOptions(**shape["rollout"])
    collector = Collector(
        RandomTokens(),
        InProcessEngine(policy, max_rows=rollout.max_rows),
        RandomTokens.reward_functions,
        CollectorSettings(rollout=rollout, resample=None),
    )
    update = UpdateOptions(tokens_per_microbatch=shape["tokens_per_microbatch"])
    settings = LearnerSettings(update=update, max_completion_tokens=rollout.max_completion_tokens, num_steps=2)
    learner = Learner(policy, build_algorithm(shape["algorithm"]), settings)
    for step in (1, 2):  # from the second on there are moments
        credited = learner.credit(collector.collect(step, discard_scores, Clock()), Clock())
        learner.remember(credited)
        learner.learn(learner.batches(credited, Clock()), step, Clock())


def in_a_fork(shape: dict) -> int:
    """The same in a process that has done nothing else."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, str(held_more(shape)).encode())
        os._exit(0)
    os.close(writer)
    os.wait()
    with os.fdopen(reader) as answer:
        return int(answer.read())


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({name: in_a_fork(shape) for name, shape in json.loads(sys.argv[1]).items()}))
