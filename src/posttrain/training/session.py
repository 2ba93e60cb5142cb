"""The parts of an RL run, made from its config and from objects of a caller."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from typing import cast

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.table import build_algorithm
from posttrain.behaviours.behaviour_reader import BehaviourReader
from posttrain.behaviours.behaviour_table import chosen_rows
from posttrain.binding import bind
from posttrain.config import Config
from posttrain.config.reading import resolved_config
from posttrain.config.recipes import short_reward
from posttrain.errors import UserError
from posttrain.generation.engine import Engine, close_engine, load_checked, own_engine, require_engine, require_room_for
from posttrain.generation.parity import engine_in_parity
from posttrain.models.adapters.in_force import trains_adapter
from posttrain.models.loading.new_model import policy_of_run
from posttrain.models.policy import Policy
from posttrain.models.rendering import renderer_of
from posttrain.options.dataset import DatasetOptions
from posttrain.options.reward import RewardOptions, RewardSettings
from posttrain.options.rollout import HttpOptions
from posttrain.ranks.group import ONE_RANK, RankGroup
from posttrain.rewards.grading.dispatch import require_rewarded_rows
from posttrain.rewards.grading.function import RewardFunction, with_distinct_names
from posttrain.rewards.grading.grade import require_enforceable
from posttrain.rewards.grading.resources import ChecksRows, Resources, require_use_for_cache
from posttrain.rewards.model import reward_models_in
from posttrain.rewards.reward_registry import load_reward
from posttrain.runs.checkpoint import ThreadClaim, claim_threads
from posttrain.runs.named_inputs import inputs_of_run, policy_input
from posttrain.runs.reports import LEFT_OUT
from posttrain.runs.run_inputs import RunInput, RunInputs, class_name, code_input
from posttrain.runs.watchers import Watcher, require_watchers
from posttrain.tasks.base import Task, as_reward_functions, held_out_prompts, longest_prompts, task_probes, task_rewards
from posttrain.tasks.dataset import Rows
from posttrain.tasks.task_registry import load_task, require_task
from posttrain.training.collector import Collector, CollectorSettings
from posttrain.training.evaluation import Questions
from posttrain.training.learner import Learner, LearnerSettings
from posttrain.training.optimizer import OwnOptimizer
from posttrain.training.trained import RunState, Trained

Reward = Callable[..., object] | RewardFunction
"""A function, or a `reward_function` of one, with a name and a weight."""
Rewards = Reward | str | Sequence[Reward | str]
"""A text is a reward as a flag names it: of this package, FILE.py:FUNCTION, or the folder of a reward model."""


@dataclass(frozen=True, kw_only=True)
class CallerObjects:
    """Objects that replace what the config describes."""

    policy: Policy | None = None
    task: Task | None = None
    engine: Engine | None = None
    algorithm: Algorithm | None = None
    rewards: Rewards = ()
    """Rewards before those of the config."""
    functions: tuple[RewardFunction, ...] = field(init=False, default=())
    """These, loaded where a text names one, each with a name and settings."""
    rows: Rows | None = None
    """Replace a dataset's file."""
    held_out_rows: Rows | None = None
    """Evaluated on, in place of a share of the rows."""
    optimizer: OwnOptimizer | None = None
    """Replaces AdamW, over the policy's parameters."""

    def __post_init__(self) -> None:
        for name, kind, kind_name, remedy in (
            ("policy", Policy, "a Policy", "Make one of a model and its tokenizer with posttrain.as_policy"),
            ("algorithm", Algorithm, "an Algorithm", "Give an object, such as posttrain.algorithms.table.grpo()"),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise UserError(f"{name}: {value!r:.60} ({type(value).__name__}) is not {kind_name}.  {remedy}.")
        given: object = self.rewards
        if callable(given) or isinstance(given, RewardFunction | str):
            given = [given]
        if isinstance(given, list | tuple):
            given = [
                load_reward(bind(RewardOptions, short_reward(each), where="rewards")) if isinstance(each, str) else each
                for each in given
            ]
        object.__setattr__(self, "functions", as_reward_functions(given, "rewards"))
        for name, rows in (("rows", self.rows), ("held_out_rows", self.held_out_rows)):
            if isinstance(rows, Iterable) and not isinstance(rows, Sized):  # a generator gives them once
                object.__setattr__(self, name, list(rows))


NO_CALLER = CallerObjects()
"""Of a command, which has everything in the config."""


def inputs_of(config: Config, own: CallerObjects) -> RunInputs:
    """The inputs of a run by reward: the caller's objects, and the files that none of them replaces."""
    # A checkpoint does not hold the reference of a KL, unless that is refreshed.
    is_kept = own.policy is None or config.reference.refresh_every > 0
    weighed = not is_kept and (own.algorithm or build_algorithm(config.algorithm)).uses_reference
    objects, files = policy_input(own.policy, weighed=weighed), {}
    if own.task is not None:
        objects["task"] = code_input(f"{class_name(own.task)} ({getattr(own.task, 'name', '')})", type(own.task))
    if own.engine is not None:
        draws = "" if getattr(own.engine, "reproducible", True) else ", with random numbers of its own"
        objects["engine"] = code_input(class_name(own.engine) + draws, type(own.engine))
    if own.algorithm is not None:
        objects["algorithm"] = code_input(own.algorithm.name, own.algorithm)
    if own.optimizer is not None:
        objects["optimizer"] = RunInput(class_name(own.optimizer.optimizer))
    for index, reward in enumerate(own.functions):
        settings, default = reward.settings, RewardSettings()
        said = [  # a reward that is given by its name has more settings, those of a recipe's item
            f"{each.name} = {value}"
            for each in fields(RewardSettings)
            if (value := getattr(settings, each.name)) != getattr(default, each.name)
        ]
        name = f"{reward.name} ({', '.join(said)})" if said else reward.name
        objects[f"rewards[{index}]"] = code_input(name, reward.call)
        if reward.source is not None:
            files[f"rewards[{index}], by its name"] = RunInput(reward.source.name, reward.source.digest)
    return inputs_of_run(config, objects, rows=own.rows, held_out_rows=own.held_out_rows, files=files)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """Who watches a run, and whether it resumes."""

    watchers: Sequence[Watcher] = ()
    resume: bool = False
    """Whether the run in `config.run.folder` resumes from its last checkpoint."""
    from_step: int | None = None
    """The step whose checkpoint it resumes from; None is the last."""
    accept_changes: bool = False
    """Whether it also resumes where rows, rewards or files have changed."""
    recipe: str = ""
    """Where the config comes from, for the summary."""

    def __post_init__(self) -> None:
        if self.from_step is not None and not self.resume:
            step, rule = self.from_step, "only a resumed run starts from a step"
            raise UserError(
                f"from_step = {step}: {rule}; call train(config, resume=True, from_step={step}).",
                command=f"--from-step {step}: {rule}; give --resume RUN as well.",
            )
        object.__setattr__(self, "watchers", require_watchers(self.watchers))


@dataclass(slots=True, kw_only=True)
class Session:
    """The parts of an RL run; open until closed."""

    config: Config
    caller: CallerObjects
    policy: Policy
    model_name: str
    """The name of the policy's model in plans and model cards."""
    engine: Engine
    algorithm: Algorithm
    task: Task
    rewards: tuple[RewardFunction, ...]
    resources: Resources
    """Processes and caches of the rewards."""
    threads: ThreadClaim
    """The number of threads that the session needs, if it needs one."""
    collector: Collector
    learner: Learner
    trained: Trained[RunState]
    """Policy, optimiser, the learner's other state and the run's counters, as checkpoints hold them."""
    behaviours: BehaviourReader
    longest_prompt_tokens: int = 0
    """Of all known prompts; set by `require_prompts_and_rows`."""
    held_out: Questions | None = None
    """Made on first use."""

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.collector.close()
        self.threads.release()
        self.resources.close()
        if self.caller.engine is None:
            close_engine(self.engine)

    def load_weights(self, version: int | None = None) -> None:
        """Give the engine the current weights, of `version` updates.  Raises RunError if it keeps others."""
        self.policy.require_as_made()  # an engine elsewhere does not see it
        load_checked(self.engine, self.learner.weights(), self.learner.num_updates if version is None else version)

    def questions(self) -> Questions:
        """The held-out problems, judged by the task's own measure if it has one, else by the first reward.

        If training does not use the task's measure, no reward is computed for them.
        """
        if self.held_out is None:
            functions, probes = task_rewards(self.task) or self.rewards, task_probes(self.task)
            if not (self.config.evaluation.sampling_probes and self.engine.suppresses):
                probes = {name: probe for name, probe in probes.items() if not probe.samples_anew}
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
                probes={**self.behaviours.probes(), **probes},
            )
        return self.held_out

    def questions_now(self) -> Questions:
        """The questions, with the state of the run for rewards that read it."""
        state = self.trained.run
        return replace(
            self.questions(),
            trainer_state=self.collector.trainer_state(state.step + 1),
            counts=LEFT_OUT in state.before,
        )

    def require_prompts_and_rows(self) -> None:
        """Refuse prompts that leave no room for a completion, and rows that no reward can score."""
        prompts = [*longest_prompts(self.task), *self.questions().prompts]
        for prompt in prompts:
            require_room_for(prompt, self.engine)
        self.longest_prompt_tokens = max(len(prompt.tokens) for prompt in prompts)
        require_sound_rows(self)


def open_session(
    config: Config, caller: CallerObjects = NO_CALLER, *, inference: bool = False, ranks: RankGroup = ONE_RANK
) -> Session:
    """Load the model and make everything else that the caller does not bring; `inference` trains nothing."""
    require_training_by_reward(config)
    config = resolved_config(config, adapter=None if caller.policy is None else trains_adapter(caller.policy.model))
    behaviours = BehaviourReader(chosen_rows(config.behaviours))
    with ExitStack() as opened:
        threads = opened.enter_context(claim_threads(config.run.threads))
        policy, name = policy_of_run(config.model, caller.policy, seed=config.run.seed, inference=inference)
        policy = replace(policy, ranks=ranks)
        task = task_of(config, caller, policy)
        longest = config.rollout.max_completion_tokens + longest_of(task)
        with ranks.leading("open", longest):
            engine, policy = engine_of(config, caller, policy, longest)
            if caller.engine is None:
                opened.callback(close_engine, engine)
            algorithm = caller.algorithm or build_algorithm(config.algorithm)
            learner = learner_of(config, caller, policy, algorithm)
        rewards = rewards_of(config, caller, task, policy)
        resources = opened.enter_context(Resources(config.sandbox))
        collecting = CollectorSettings(
            rollout=config.rollout,
            grading=config.grading,
            seed=config.run.seed,
            resample=algorithm.resample,
            informative=algorithm.informative,
            num_steps=config.run.num_steps,
            num_rows=task.num_rows,
        )
        session = Session(
            config=config,
            caller=caller,
            policy=policy,
            model_name=name,
            engine=engine,
            algorithm=algorithm,
            task=task,
            rewards=rewards,
            resources=resources,
            threads=threads,
            collector=Collector(task, engine, rewards, collecting, resources=resources),
            learner=learner,
            trained=trained_by_reward(learner),
            behaviours=behaviours,
        )
        opened.pop_all()  # the session closes them
        return session


def require_training_by_reward(config: object) -> None:
    """Refuse a config of another kind, as `load_recipe` makes of recipes for other commands."""
    if not isinstance(config, Config):
        kind = type(config).__name__
        raise UserError(f"config: a {kind} is given, and a Config is needed, such as load_recipe() makes.")


def trained_by_reward(learner: Learner) -> Trained[RunState]:
    optimizer, updates = learner.own_optimizer or learner.optimizer, learner.passes.updates
    return Trained(learner.policy, optimizer, RunState(), parts=[learner], updates_per_step=updates)


def learner_of(config: Config, caller: CallerObjects, policy: Policy, algorithm: Algorithm) -> Learner:
    settings = LearnerSettings(
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
    return Learner(policy, algorithm, settings, own_optimizer=caller.optimizer)


def longest_of(task: Task) -> int:
    return max((len(prompt.tokens) for prompt in longest_prompts(task)), default=0)


def engine_of(config: Config, caller: CallerObjects, policy: Policy, longest: int) -> tuple[Engine, Policy]:
    """The engine that samples: the caller's, the recipe's or ours; and the policy that agrees with it.

    `longest` is the most tokens of a prompt with its completion.  With several ranks each samples a share.
    """
    if caller.engine is not None:
        return require_engine(caller.engine), policy
    if isinstance(config.engine, Mapping):
        return own_engine(config.engine, policy), policy
    if isinstance(config.engine, HttpOptions):
        from posttrain.generation.http.http_engine import HttpEngine

        longest = min(longest, policy.max_positions)
        return HttpEngine(policy, config.engine, longest=longest, sampling=config.rollout.sampling), policy
    tried = engine_in_parity(policy, max_rows=config.rollout.max_rows, longest=longest)
    if policy.ranks.size == 1:
        return cast(Engine, tried), tried.policy
    from posttrain.generation.rank_sampling import RankEngine, RankShare

    return RankEngine(RankShare(tried, policy.ranks)), tried.policy


def task_of(config: Config, caller: CallerObjects, policy: Policy) -> Task:
    """The caller's task, or that of the config; long prompts that are skipped or cut leave room for a completion."""
    if caller.task is not None:
        for name, given in (("rows", caller.rows), ("held_out_rows", caller.held_out_rows)):
            if given is not None:
                raise UserError(f"{name}: a task is given as well, which makes its own prompts.  Give one of them.")
        return require_task(caller.task, "task")
    task = config.task
    if isinstance(task, DatasetOptions) and task.over_long != "error" and task.max_prompt_tokens is None:
        completion, context = config.rollout.max_completion_tokens, policy.max_positions
        left = min(context, config.update.tokens_per_microbatch) - completion
        if left < 1:
            raise UserError(
                f"task.over_long = {task.over_long}: rollout.max_completion_tokens = {completion} leaves no prompt any"
                f" room in the model's context of {context}.  Lower it, or set task.max_prompt_tokens."
            )
        task = replace(task, max_prompt_tokens=left)
    return load_task(
        task,
        renderer_of(policy, config.model.template_options),
        seed=config.run.seed,
        prompts_per_step=config.rollout.prompts_per_step,
        rows=caller.rows,
        held_out_rows=caller.held_out_rows,
    )


def rewards_of(config: Config, caller: CallerObjects, task: Task, policy: Policy) -> tuple[RewardFunction, ...]:
    """The caller's rewards and those of the config, else the task's."""
    rewards = (*caller.functions, *(load_reward(item) for item in config.rewards)) or task_rewards(task)
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
    """Refuse rows that no reward applies to, or that a reward's check rejects."""
    if not (rows := session.task.rows_to_reward()):
        return
    require_rewarded_rows(rows, session.rewards)
    for function in session.rewards:
        checked: object = function.call
        if isinstance(checked, ChecksRows):
            checked.check_rows([row for row in rows if function.settings.applies(row[1])], session.resources)
