"""A task for tiny models, and the loop of a step over it: sample, reward, advantages, batch, update."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.table import build_algorithm
from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import StreamKey
from posttrain.models.policy import Policy
from posttrain.options.rollout import SamplingParams
from posttrain.options.training import UpdateOptions
from posttrain.records import Group
from posttrain.training.metrics import update_metrics
from posttrain.training.optimizer import learning_rate, new_optimizer
from posttrain.training.reference import reference_of
from posttrain.training.update import Objective, group_logprobs, update
from tests.support.tiny import advantage, batch_of, request, some_prompts


@dataclass(frozen=True, kw_only=True)
class Toy:
    """How the toy task is trained on."""

    algorithm: Mapping[str, object]
    update: UpdateOptions
    group_size: int
    temperature: float = 1.0
    num_steps: int = 20
    shuffled: bool = False
    """Deal the rewards of a step out to its rollouts at random: nothing can be learned from them."""


def share_of_even_tokens(groups: Sequence[Group]) -> torch.Tensor:
    """The reward of the toy task, [prompt group]."""
    rewards = [[np.mean([token % 2 == 0 for token in rollout.tokens]) for rollout in g.rollouts] for g in groups]
    return torch.tensor(rewards, dtype=torch.float64)


def train_on(toy: Toy, policy: Policy) -> Iterator[dict[str, float]]:
    """Train the policy; the metrics of each step."""
    algorithm: Algorithm = build_algorithm(toy.algorithm)
    engine = InProcessEngine(policy, max_rows=12)
    optimizer = new_optimizer(policy.model.parameters(), toy.update)
    reference = reference_of(policy) if algorithm.uses_reference else None
    objective = Objective(algorithm=algorithm, temperature=toy.temperature, reference=reference)
    random = np.random.Generator(np.random.Philox(0))
    for step in range(toy.num_steps):
        prompts = some_prompts([3, 6, 1, 4], seed=step)
        asked = request(toy.group_size, 10, SamplingParams(temperature=toy.temperature), key=StreamKey(0, "toy", step))
        groups = sample_groups(engine, prompts, asked)
        rewards = share_of_even_tokens(groups)
        earned = rewards.mean().item()
        if toy.shuffled:
            rewards = torch.from_numpy(random.permutation(rewards.flatten().numpy())).view_as(rewards)
        log_ref = None
        if reference is not None:
            with reference.entered() as then:
                log_ref = group_logprobs(then, groups, temperature=toy.temperature, max_tokens=100)
        batch = batch_of(groups, advantage(algorithm, rewards).tolist(), algorithm, reference_logprobs=log_ref)
        rate = learning_rate(toy.update, step, toy.num_steps)
        taken = [update(policy, optimizer, batch, objective, toy.update, rate)] if batch.completions else []
        yield {"reward": earned, **update_metrics(taken)}
