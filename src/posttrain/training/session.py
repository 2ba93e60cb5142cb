"""Everything that a run by reward works with, made from its config and from what a caller brings."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import cast

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.table import build_algorithm
from posttrain.behaviours.behaviour_reader import BehaviourReader
from posttrain.behaviours.behaviour_table import chosen_rows
from posttrain.config import Config
from posttrain.config.kinds import resolved_config
from posttrain.errors import UserError
from posttrain.generation.engine import Engine, load_checked, own_engine, require_engine
from posttrain.generation.groups import require_room_for
from posttrain.generation.parity import engine_in_parity
from posttrain.models.adapters.in_force import trains_adapter
from posttrain.models.loading.devices import require_device_of
from posttrain.models.loading.model_folder import load_policy, load_policy_to_train
from posttrain.models.policy import Policy
from posttrain.models.rendering import renderer_of
from posttrain.options.dataset import DatasetOptions
from posttrain.options.task import TaskOptions
from posttrain.rewards.grading.function import RewardFunction, with_distinct_names
from posttrain.rewards.grading.gates import require_rewarded_rows
from posttrain.rewards.grading.grade import require_enforceable
from posttrain.rewards.grading.resources import Resources, row_check
from posttrain.rewards.grading.score_cache import require_use_for_cache
from posttrain.rewards.model import reward_models_in
from posttrain.rewards.reward_registry import load_reward
from posttrain.runs.summary import LEFT_OUT
from posttrain.runs.threads import ThreadClaim, claim_threads
from posttrain.tasks.base import Probe, Task, held_out_prompts, longest_prompts, task_probes, task_rewards
from posttrain.tasks.dataset import DatasetTask
from posttrain.tasks.task_registry import load_task, require_task
from posttrain.training.caller.caller_objects import NOTHING_BROUGHT, CallerObjects, given_rewards
from posttrain.training.collector import Collector, CollectorSettings
from posttrain.training.evaluation import Questions
from posttrain.training.learner import Learner, LearnerSettings
from posttrain.training.reference import UncopiedPolicy
from posttrain.training.trained import RunState, Trained


@dataclass(slots=True, kw_only=True)
class Session:
    """The stages of a step and what else a run needs; open until closed."""

    config: Config
    own: CallerObjects
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
    trained: Trained[RunState]
    """Policy, optimiser, the learner's other state and the run's counters, as checkpoints hold them."""
    behaviours: BehaviourReader
    longest_prompt_tokens: int = 0
    """Of all prompts that are known; found by `require_room`."""
    held_out: Questions | None = None
    """Made when first asked for."""

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.threads.release()
        self.resources.close()

    def load_weights(self) -> None:
        """Have the engine sample from the weights as they are now.  Raises RunError where it holds on to others."""
        self.policy.require_as_made()  # an engine elsewhere does not see it
        load_checked(self.engine, self.learner.weights(), self.learner.num_updates)

    def questions(self) -> Questions:
        """The held-out problems, judged by the task's own measure where it has one, else by the first reward.

        A measure of the task's own that training does not pay for stands alone: no reward is asked about them.
        """
        if self.held_out is None:
            functions = task_rewards(self.task) or self.rewards
            self.held_out = Questions(
                task=self.task.name,
                prompts=held_out_prompts(self.task),
                judge=functions[0].unconditional(),
                rewards=self.rewards if functions == self.rewards else (),
                max_completion_tokens=self.config.rollout.max_completion_tokens,
                seed=self.config.run.seed,
                grading=self.config.grading,
                on_error=self.config.rollout.on_reward_error,
                resources=self.resources,
                probes={**self.behaviours.probes(), **self.probes_of_task()},
            )
        return self.held_out

    def probes_of_task(self) -> Mapping[str, Probe]:
        probes = task_probes(self.task)
        if self.config.evaluation.sampling_probes and self.engine.suppresses:
            return probes
        return {name: probe for name, probe in probes.items() if not probe.samples_anew}

    def questions_now(self) -> Questions:
        state = self.trained.run
        return replace(
            self.questions(),
            trainer_state=self.collector.trainer_state(state.step + 1),
            counts=LEFT_OUT in state.before,
        )


def open_session(config: Config, own: CallerObjects = NOTHING_BROUGHT, *, inference: bool = False) -> Session:
    """Load the model and make everything else, but for what the caller brings; `inference` trains nothing."""
    require_training_by_reward(config)
    config = resolved_config(config, adapter=None if own.policy is None else trains_adapter(own.policy.model))
    with ExitStack() as opened:
        threads = opened.enter_context(claim_threads(config.run.threads))
        resources = opened.enter_context(Resources(config.sandbox))
        session = assembled(config, own, resources, threads, inference=inference)
        opened.pop_all()  # from here on it is the session that closes them
    return session


def require_training_by_reward(config: object) -> None:
    if not isinstance(config, Config):
        kind = type(config).__name__
        raise UserError(f"config: a {kind} is given, and a Config is needed, such as load_recipe() makes.")


def assembled(
    config: Config, own: CallerObjects, resources: Resources, threads: ThreadClaim, *, inference: bool
) -> Session:
    """A session of these parts and of what the config describes."""
    behaviours = BehaviourReader(chosen_rows(config.behaviours))
    policy = own.policy
    if policy is None and inference:
        policy = load_policy(config.model, seed=config.run.seed, inference=True)
    policy = policy or load_policy_to_train(config.model, seed=config.run.seed)
    policy.require_as_made()
    require_device_of(policy.device, config.model.device)
    task = task_of(config, own, policy)
    algorithm = own.algorithm or build_algorithm(config.algorithm)
    engine, policy = engine_of(config, own, task, policy)
    rewards = rewards_of(config, own, task, policy)
    collector = Collector(
        task,
        engine,
        rewards,
        CollectorSettings(
            rollout=config.rollout,
            grading=config.grading,
            seed=config.run.seed,
            resample=algorithm.resample,
            informative=algorithm.informative,
            num_steps=config.run.num_steps,
            num_rows=len(task.training_rows) if isinstance(task, DatasetTask) else 0,
        ),
        resources=resources,
    )
    learner = Learner(policy, algorithm, learner_settings(config), own_optimizer=own.optimizer)
    return Session(
        config=config,
        own=own,
        policy=policy,
        model_name=config.model.path if own.policy is None else own.policy.model.name_or_path or "a model object",
        engine=engine,
        algorithm=algorithm,
        task=task,
        rewards=rewards,
        resources=resources,
        threads=threads,
        collector=collector,
        learner=learner,
        trained=trained_by_reward(learner),
        behaviours=behaviours,
    )


def trained_by_reward(learner: Learner) -> Trained[RunState]:
    optimizer, updates = learner.own_optimizer or learner.optimizer, learner.passes.updates
    return Trained(learner.policy, optimizer, RunState(), parts=[learner], updates_per_step=updates)


def learner_settings(config: Config) -> LearnerSettings:
    return LearnerSettings(
        update=config.update,
        max_completion_tokens=config.rollout.max_completion_tokens,
        temperature=config.rollout.temperature,
        seed=config.run.seed,
        num_steps=config.run.num_steps,
        refresh_reference_every=config.reference.refresh_every,
        reference_path=config.reference.path,
        template_options=config.model.template_options,
        keep_token_columns=config.run.keep_token_columns,
    )


def engine_of(config: Config, own: CallerObjects, task: Task, policy: Policy) -> tuple[Engine, Policy]:
    """The engine that samples: the caller's, the recipe's or ours; and the policy that agrees with it."""
    if own.engine is not None:
        return require_engine(own.engine), policy
    if isinstance(config.engine, Mapping):
        return own_engine(config.engine, policy), policy
    prompt_tokens = max((len(prompt.tokens) for prompt in longest_prompts(task)), default=0)
    longest = config.rollout.max_completion_tokens + prompt_tokens
    tried = engine_in_parity(policy, max_rows=config.rollout.max_rows, longest=longest)
    return cast(Engine, tried), tried.policy


def task_of(config: Config, own: CallerObjects, policy: Policy) -> Task:
    if own.task is not None:
        if own.rows is not None or own.held_out_rows is not None:
            named = "rows" if own.rows is not None else "held_out_rows"
            raise UserError(f"{named}: a task is given as well, which makes its own prompts.  Give one of them.")
        return require_task(own.task, "task")
    return load_task(
        with_longest_prompt(config, policy),
        renderer_of(policy, config.model.template_options),
        seed=config.run.seed,
        prompts_per_step=config.rollout.prompts_per_step,
        rows=own.rows,
        held_out_rows=own.held_out_rows,
    )


def with_longest_prompt(config: Config, policy: Policy) -> TaskOptions | Mapping[str, object]:
    """The task's options; where long prompts are left out or cut, with the length that leaves room for an answer."""
    task = config.task
    if not isinstance(task, DatasetOptions) or task.over_long == "error" or task.max_prompt_tokens is not None:
        return task
    completion, budget = config.rollout.max_completion_tokens, config.update.tokens_per_microbatch
    left = min(policy.max_positions, budget) - completion
    if left < 1:
        raise UserError(
            f"task.over_long = {task.over_long}: rollout.max_completion_tokens = {completion} leaves no prompt any room"
            f" in the model's context of {policy.max_positions}.  Lower it, or say task.max_prompt_tokens."
        )
    return replace(task, max_prompt_tokens=left)


def rewards_of(config: Config, own: CallerObjects, task: Task, policy: Policy) -> tuple[RewardFunction, ...]:
    """The caller's rewards and those of the config, or else the task's own."""
    rewards = (*given_rewards(own), *(load_reward(item) for item in config.rewards)) or task_rewards(task)
    if not rewards:
        raise UserError(
            "rewards: the task has no reward function of its own, and none is given."
            "  Name one under `rewards`, such as my_rewards.py:solved, or in Python train(config, rewards=[solved])."
        )
    require_use_for_cache(rewards, config.grading)
    for function in rewards:
        require_enforceable(function, config.grading)
        for model in reward_models_in(function.call):
            model.require_apart(policy.model)
    return with_distinct_names(rewards)


def require_sound_rows(session: Session) -> None:
    """Refuse rows that no reward is for, or that one could score nobody by, where that can be told before training."""
    if not isinstance(session.task, DatasetTask):
        return
    column = session.task.options.prompt_column
    rows = [  # a check looks for the prompt under that name
        (row.where, {**row.columns, "prompt": row.columns[column]})
        for row in (*session.task.training_rows, *session.task.held_out_rows)
    ]
    require_rewarded_rows(rows, session.rewards)
    for function in session.rewards:
        if (checked := row_check(function.call)) is not None:
            checked.check_rows([row for row in rows if function.settings.applies(row[1])], session.resources)


def require_room(session: Session) -> None:
    prompts = [*longest_prompts(session.task), *session.questions().prompts]
    for prompt in prompts:
        require_room_for(prompt, session.engine)
    session.longest_prompt_tokens = max(len(prompt.tokens) for prompt in prompts)
    session.config.require_room(session.longest_prompt_tokens)
    require_context_of_others(session)


def require_context_of_others(session: Session) -> None:
    """Refuse a reference, a teacher or a critic that cannot read to the end of the longest completion."""
    config, learner = session.config, session.learner
    longest = session.longest_prompt_tokens + config.rollout.max_completion_tokens
    longest = min(longest, session.policy.max_positions)  # where completions end at the latest
    others = {
        "reference.path": learner.reference,
        "algorithm.teacher.model": learner.teacher,
        "algorithm.critic.path": None if learner.critic is None else UncopiedPolicy(learner.critic.trunk),
    }
    for option, other in others.items():
        if other is None:
            continue
        with other.entered() as policy:
            if policy.max_positions < longest:
                raise UserError(
                    f"{option}: the model reads {policy.max_positions} tokens, and the longest prompt with its"
                    f" completion has up to {longest}.  Give one with a longer context, or lower"
                    " rollout.max_completion_tokens."
                )
