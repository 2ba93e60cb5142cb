"""Everything that a reinforcement-learning run works with, made from its config."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from posttrain.algorithms.table import Algorithm, build_algorithm
from posttrain.config import Config
from posttrain.errors import UserError
from posttrain.generation.engine import Engine, require_room_for
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import Request
from posttrain.generation.streams import StreamKey
from posttrain.models.policy import Policy, load_policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.rewards.grading.function import RewardFunction, reward_function
from posttrain.rewards.grading.pending_scores import require_enforceable
from posttrain.rewards.grading.resources import Resources
from posttrain.rewards.reward_registry import load_reward
from posttrain.tasks.base import Task
from posttrain.tasks.task_registry import load_task
from posttrain.training.evaluation import Questions
from posttrain.training.optimizer import new_optimizer
from posttrain.training.threads import ThreadClaim, claim_threads

Rows = Sequence[Mapping[str, object]]
Rewards = Sequence[Callable[..., object] | RewardFunction]
"""Functions, or what `reward_function` makes of one: with a name and a weight of its own."""


@dataclass(slots=True)
class Session:
    """What the stages of a step share; open until closed.  Only `reference` is replaced during a run."""

    config: Config
    policy: Policy
    engine: Engine
    optimizer: torch.optim.Optimizer
    algorithm: Algorithm
    task: Task
    rewards: tuple[RewardFunction, ...]
    reference: Policy | None
    resources: Resources = field(default_factory=Resources)
    """What scoring keeps open, and what it remembers."""
    threads: ThreadClaim = field(default_factory=ThreadClaim)
    """The number of threads that the session needs, if it needs one."""
    held_out: Questions | None = None
    """Made when first asked for."""

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what the session has started (the processes of its rewards, its caches), and release its threads."""
        self.threads.release()
        self.resources.close()

    def request(self, step: int, *, first_draw: int = 0, purpose: str = "rollout") -> Request:
        """What a training step samples."""
        options = self.config.rollout
        return Request(
            group_size=options.group_size,
            max_completion_tokens=options.max_completion_tokens,
            sampling=options.sampling,
            key=StreamKey(self.config.run.seed, purpose, step, first_draw),
        )

    def questions(self) -> Questions:
        """The held-out problems, judged by the task's own measure where it has one, else by the first reward."""
        if self.held_out is None:
            functions = self.task.reward_functions or self.rewards
            self.held_out = Questions(
                prompts=self.task.held_out(),
                judge=functions[0].unconditional(),
                max_completion_tokens=self.config.rollout.max_completion_tokens,
                seed=self.config.run.seed,
                grading=self.config.grading,
                resources=self.resources,
            )
        return self.held_out

    def update_index(self, step: int) -> int:
        """Number of the step's first update in the learning-rate schedule; steps count from 1."""
        return (step - 1) * self.updates_per_step

    @property
    def updates_per_step(self) -> int:
        """Optimiser updates of a step in which every group is informative."""
        return self.config.update.epochs_per_step * self.config.update.minibatches_per_epoch


def open_session(config: Config, *, rewards: Rewards = (), rows: Rows | None = None) -> Session:
    """Load the model and make everything else.  `rewards` and `rows` come from Python callers and go first."""
    with ExitStack() as opened:
        threads = opened.enter_context(claim_threads(config.run.threads))
        resources = opened.enter_context(Resources(config.sandbox))
        session = assembled(config, rewards, rows, resources, threads)
        opened.pop_all()  # from here on it is the session that closes them
    return session


def assembled(
    config: Config, rewards: Rewards, rows: Rows | None, resources: Resources, threads: ThreadClaim
) -> Session:
    """A session of these parts and of what the config describes."""
    policy = load_policy(config.model)
    task = load_task(
        config.task,
        TokenizerRenderer(policy.tokenizer),
        seed=config.run.seed,
        prompts_per_step=config.rollout.prompts_per_step,
        rows=rows,
    )
    algorithm = build_algorithm(config.algorithm)
    own = (each if isinstance(each, RewardFunction) else reward_function(each) for each in rewards)
    chosen = (*own, *(load_reward(item) for item in config.rewards))
    if not chosen and not task.reward_functions:
        raise UserError(
            "rewards: the task has no reward function of its own, and none is given."
            "  Name one under `rewards`, such as my_rewards.py:solved."
        )
    rewards_used = chosen or task.reward_functions
    for function in rewards_used:
        require_enforceable(function, config.grading)
    return Session(
        config=config,
        policy=policy,
        engine=InProcessEngine(policy, max_rows=config.rollout.max_rows),
        optimizer=new_optimizer(policy.model.parameters(), config.update),
        algorithm=algorithm,
        task=task,
        rewards=rewards_used,
        reference=frozen_copy(policy) if algorithm.uses_reference else None,
        resources=resources,
        threads=threads,
    )


def require_room(session: Session) -> None:
    """Refuse a prompt that leaves no room for a completion, in the model's context or in a micro-batch."""
    prompts = [*session.task.longest_prompts(), *session.questions().prompts]
    for prompt in prompts:
        require_room_for(prompt, session.engine)
    session.config.require_room(max(len(prompt.tokens) for prompt in prompts))


def frozen_copy(policy: Policy) -> Policy:
    """The policy as it is now, for a KL term to compare with; its weights take no gradient."""
    made = policy.copy()
    made.model.requires_grad_(False)
    return made
