"""Everything that a run by reward works with, made from its config and from what a caller brings."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from posttrain.algorithms.table import Algorithm, build_algorithm
from posttrain.config import Config
from posttrain.errors import UserError
from posttrain.generation.engine import Engine, require_engine, require_room_for
from posttrain.generation.in_process import InProcessEngine
from posttrain.models.policy import Policy, load_policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.rewards.grading.function import RewardFunction, reward_function
from posttrain.rewards.grading.pending_scores import require_enforceable
from posttrain.rewards.grading.resources import Resources, row_check
from posttrain.rewards.reward_registry import load_reward
from posttrain.runs.threads import ThreadClaim, claim_threads
from posttrain.tasks.base import Task
from posttrain.tasks.dataset import DatasetTask
from posttrain.tasks.task_registry import load_task, require_task
from posttrain.training.collector import Collector, CollectorSettings
from posttrain.training.evaluation import Questions
from posttrain.training.learner import Learner, LearnerSettings
from posttrain.training.state import TrainedByReward

Rows = Sequence[Mapping[str, object]]
Rewards = Sequence[Callable[..., object] | RewardFunction]
"""Functions, or what `reward_function` makes of one: with a name and a weight of its own."""


@dataclass(frozen=True, kw_only=True)
class CallerObjects:
    """What a caller in Python brings in place of what the config describes."""

    policy: Policy | None = None
    task: Task | None = None
    engine: Engine | None = None
    algorithm: Algorithm | None = None
    rewards: Rewards = ()
    """They go before those of the config."""
    rows: Rows | None = None
    """In place of a dataset's file."""

    def __post_init__(self) -> None:
        for name, kind, remedy in (
            ("policy", Policy, "make one of a model and its tokenizer with posttrain.as_policy"),
            ("algorithm", Algorithm, "give an object, such as what posttrain.algorithms.table.grpo() returns"),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise UserError(f"{name}: {value!r:.60} ({type(value).__name__}) is no {kind.__name__}; {remedy}.")


@dataclass(slots=True, kw_only=True)
class Session:
    """The stages of a step and what else a run needs; open until closed."""

    config: Config
    policy: Policy
    model_name: str
    """What plans and model cards call the policy's model."""
    engine: Engine
    algorithm: Algorithm
    task: Task
    rewards: tuple[RewardFunction, ...]
    resources: Resources
    """What scoring keeps open, and what it remembers."""
    threads: ThreadClaim
    """The number of threads that the session needs, if it needs one."""
    collector: Collector
    learner: Learner
    trained: TrainedByReward
    """The learner with the counters of its run."""
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

    def load_weights(self) -> None:
        """Have the engine sample from the weights as they are now."""
        self.engine.load(self.learner.weights(), self.learner.num_updates)

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
                probes=self.task.probes(),
            )
        return self.held_out


def open_session(config: Config, own: CallerObjects = CallerObjects()) -> Session:
    """Load the model and make everything else, but for what the caller brings."""
    with ExitStack() as opened:
        threads = opened.enter_context(claim_threads(config.run.threads))
        resources = opened.enter_context(Resources(config.sandbox))
        session = assembled(config, own, resources, threads)
        opened.pop_all()  # from here on it is the session that closes them
    return session


def assembled(config: Config, own: CallerObjects, resources: Resources, threads: ThreadClaim) -> Session:
    """A session of these parts and of what the config describes."""
    policy = own.policy or load_policy(config.model)
    task = task_of(config, own, policy)
    algorithm = own.algorithm or build_algorithm(config.algorithm)
    engine = InProcessEngine(policy, max_rows=config.rollout.max_rows)
    chosen_engine = engine if own.engine is None else require_engine(own.engine)
    rewards = rewards_of(config, own, task)
    collector = Collector(
        task,
        chosen_engine,
        rewards,
        CollectorSettings(
            rollout=config.rollout, grading=config.grading, seed=config.run.seed, resample=algorithm.resample
        ),
        resources=resources,
    )
    learner = Learner(
        policy,
        algorithm,
        LearnerSettings(
            update=config.update,
            max_completion_tokens=config.rollout.max_completion_tokens,
            temperature=config.rollout.temperature,
            seed=config.run.seed,
            num_steps=config.run.num_steps,
            refresh_reference_every=config.reference.refresh_every,
        ),
    )
    return Session(
        config=config,
        policy=policy,
        model_name=config.model.path if own.policy is None else own.policy.model.name_or_path or "a model object",
        engine=chosen_engine,
        algorithm=algorithm,
        task=task,
        rewards=rewards,
        resources=resources,
        threads=threads,
        collector=collector,
        learner=learner,
        trained=TrainedByReward(learner),
    )


def task_of(config: Config, own: CallerObjects, policy: Policy) -> Task:
    """The caller's task, or that of the config."""
    if own.task is not None:
        if own.rows is not None:
            raise UserError("rows: a task is given as well, which makes its own prompts.  Give one of them.")
        return require_task(own.task, "task")
    return load_task(
        config.task,
        TokenizerRenderer(policy.tokenizer),
        seed=config.run.seed,
        prompts_per_step=config.rollout.prompts_per_step,
        rows=own.rows,
    )


def rewards_of(config: Config, own: CallerObjects, task: Task) -> tuple[RewardFunction, ...]:
    """The caller's rewards and those of the config, or else the task's own."""
    given = (each if isinstance(each, RewardFunction) else reward_function(each) for each in own.rewards)
    rewards = (*given, *(load_reward(item) for item in config.rewards)) or tuple(task.reward_functions)
    if not rewards:
        raise UserError(
            "rewards: the task has no reward function of its own, and none is given."
            "  Name one under `rewards`, such as my_rewards.py:solved."
        )
    for function in rewards:
        require_enforceable(function, config.grading)
    return rewards


def require_sound_rows(session: Session) -> None:
    """Refuse rows by which a reward could score nobody, where it can tell: in step 900 they would be a silent 0."""
    if not isinstance(session.task, DatasetTask):
        return
    rows = [(row.where, row.columns) for row in (*session.task.training_rows, *session.task.held_out_rows)]
    for function in session.rewards:
        if (checked := row_check(function.call)) is not None:
            checked.check_rows([row for row in rows if function.settings.applies(row[1])], session.resources)


def require_room(session: Session) -> None:
    """Refuse a prompt that leaves no room for a completion, in the model's context or in a micro-batch."""
    prompts = [*session.task.longest_prompts(), *session.questions().prompts]
    for prompt in prompts:
        require_room_for(prompt, session.engine)
    session.config.require_room(max(len(prompt.tokens) for prompt in prompts))
