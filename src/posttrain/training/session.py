"""The parts of an RL run, made from its config and from a caller's objects."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.table import build_algorithm
from posttrain.behaviours.behaviour_reader import BehaviourReader
from posttrain.behaviours.behaviour_table import chosen_rows
from posttrain.binding import bind
from posttrain.config import Config
from posttrain.config.reading import resolved_config
from posttrain.config.recipes import short_reward
from posttrain.config.sections import CollectConfig, require_one_turn
from posttrain.environments.protocol import Own
from posttrain.environments.run_environment import RepliesOfRun, ReplySettings, RunEnvironment
from posttrain.errors import UserError
from posttrain.generation.engine import (
    Engine,
    EngineElsewhere,
    close_engine,
    load_checked,
    own_engine,
    require_engine,
    require_room_for,
)
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.parity import engine_in_parity
from posttrain.models.adapters.in_force import trains_adapter
from posttrain.models.loading.new_model import policy_of_run
from posttrain.models.policy import Policy
from posttrain.models.sharding import sharded, whole_weights
from posttrain.options.reward import RewardOptions, RewardSettings
from posttrain.options.rollout import HttpOptions, InProcessOptions
from posttrain.ranks.group import ONE_RANK, RankGroup
from posttrain.rewards.grading.function import RewardFunction
from posttrain.rewards.grading.resources import Resources
from posttrain.rewards.reward_registry import load_reward
from posttrain.runs.checkpoint import ThreadClaim, claim_threads
from posttrain.runs.named_inputs import inputs_of_run, policy_input
from posttrain.runs.reply_journal import ReplyFile
from posttrain.runs.reports import LEFT_OUT
from posttrain.runs.run_inputs import RunInput, RunInputs, class_name, code_input
from posttrain.tasks.base import Task, as_reward_functions, held_out_prompts, longest_prompts, task_probes, task_rewards
from posttrain.tasks.dataset import Rows
from posttrain.training.collector import Collector, CollectorSettings
from posttrain.training.evaluation import Questions
from posttrain.training.learner import Learner, LearnerSettings
from posttrain.training.optimizer import OwnOptimizer
from posttrain.training.session_task import require_sound_rows, rewards_of, task_of, without_environment
from posttrain.training.trained import RunState, Trained

if TYPE_CHECKING:
    from posttrain.environments.method_tools import MethodTools

Tools = Sequence[str | Callable[..., Any]]
Reward = Callable[..., object] | RewardFunction
"""A function, or a `reward_function` with a name and a weight."""
Rewards = Reward | str | Sequence[Reward | str]
"""A text names a reward as in a flag: one of this package, FILE.py:FUNCTION, or the folder of a reward model."""


@dataclass(frozen=True, kw_only=True)
class CallerObjects:
    """Objects that replace what the config describes."""

    policy: Policy | None = None
    task: Task | None = None
    engine: Engine | None = None
    algorithm: Algorithm | None = None
    rewards: Rewards = ()
    """Rewards that come before those of the config."""
    functions: tuple[RewardFunction, ...] = field(init=False, default=())
    """These rewards, loaded if a text names them, each with a name and settings."""
    rows: Rows | None = None
    """Rows that replace a dataset's file."""
    held_out_rows: Rows | None = None
    """Rows for evaluation, instead of a share of the rows."""
    optimizer: OwnOptimizer | None = None
    environment: "Own | MethodTools" = None
    """A class or a factory, called once per completion, or Environments."""
    tools: Tools = ()
    """Functions that the policy may call, instead of the config's."""

    def __post_init__(self) -> None:
        for name, kind, kind_name, remedy in (
            ("policy", Policy, "a Policy", "Make one from a model and its tokenizer with posttrain.as_policy"),
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
"""The objects of a command: none, since everything is in the config."""


def inputs_of(config: Config, own: CallerObjects) -> RunInputs:
    """The inputs of an RL run: the caller's objects, and the files that they do not replace."""
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
    if own.environment is not None:
        made_by = getattr(own.environment, "factory", own.environment)
        objects["environment"] = code_input(getattr(made_by, "__name__", class_name(made_by)), made_by)
    for index, tool in enumerate(own.tools):
        objects[f"tools[{index}]"] = RunInput(tool) if isinstance(tool, str) else code_input(tool.__name__, tool)
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


@dataclass(slots=True, kw_only=True)
class Session:
    """The parts of an RL run; open until `close`."""

    config: Config
    caller: CallerObjects
    policy: Policy
    model_name: str
    engine: Engine
    algorithm: Algorithm
    task: Task
    rewards: tuple[RewardFunction, ...]
    resources: Resources
    """Processes and caches of the rewards."""
    threads: ThreadClaim
    """The claimed number of threads, if the session needs one."""
    collector: Collector
    learner: Learner
    trained: Trained[RunState]
    """Policy, optimiser, the learner's other state and the run's counters, as checkpoints hold them."""
    behaviours: BehaviourReader
    environment: RunEnvironment
    opened: ExitStack
    """Resources to close with the session: reply threads, tool sandboxes."""
    longest_prompt_tokens: int = 0
    """The longest of all known prompts; set by `require_prompts_and_rows`."""
    held_out: Questions | None = None
    """Made on first use."""
    replies: ReplyFile | None = None

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as last:
            for close in (self.resources.close, self.threads.release, self.opened.close, self.collector.close):
                last.callback(close)  # the last one first

    def load_weights(self, version: int | None = None, *, transfer: Path | None = None) -> None:
        """Give the engine the current weights, after `version` updates.  Raises RunError if it keeps other weights.

        From now on, an engine that writes files of weights writes them to the folder `transfer`.
        """
        if transfer is not None and isinstance(self.engine, EngineElsewhere):
            self.engine.transfer_in(transfer)
        self.policy.require_as_made()  # an engine elsewhere does not see it
        load_checked(self.engine, self.learner.weights(), self.learner.num_updates if version is None else version)

    def questions(self) -> Questions:
        """The held-out problems, judged by the task's measure if it has one, else by the first reward.

        If training does not use the task's measure, rewards are not computed for them.
        """
        if self.held_out is None:
            functions, probes = task_rewards(self.task) or self.rewards, task_probes(self.task)
            if not (self.config.evaluation.sampling_probes and self.engine.suppresses):
                probes = {name: probe for name, probe in probes.items() if not probe.samples_anew}
            self.held_out = Questions(
                task=self.task.name,
                prompts=held_out_prompts(self.task),
                judge=functions[0].unconditional(),
                rewards=self.rewards if functions in (self.rewards, without_environment(self.rewards)) else (),
                max_completion_tokens=self.config.rollout.max_completion_tokens,
                seed=self.config.run.seed,
                grading=self.config.grading,
                on_error=self.config.rollout.on_reward_error,
                resources=self.resources,
                probes={**self.behaviours.probes(), **probes},
                workers=self.environment.workers,
            )
        return self.held_out

    def keep_replies(self, file: ReplyFile) -> None:
        """Write replies that are not reproducible to a run's folder, where a resumed step reads them."""
        if self.environment.workers is not None:
            self.environment.workers.journal = self.replies = file

    def questions_now(self) -> Questions:
        """The questions, with the state of the run for rewards that read it."""
        state, file = self.trained.run, self.replies
        return replace(
            self.questions(),
            trainer_state=self.collector.trainer_state(state.step + 1),
            replies=nullcontext if file is None else lambda name: file.at(f"evaluation at {state.step}, {name}"),
            counts=LEFT_OUT in state.before,
        )

    def require_prompts_and_rows(self) -> None:
        """Reject prompts that leave no room for a completion, and rows that no reward can score."""
        prompts = [*longest_prompts(self.task), *self.questions().prompts]
        for prompt in prompts:
            require_room_for(prompt, self.engine)
        self.longest_prompt_tokens = max(len(prompt.tokens) for prompt in prompts)
        require_sound_rows(self.task, self.rewards, self.resources)


def open_session(
    config: Config,
    caller: CallerObjects = NO_CALLER,
    *,
    inference: bool = False,
    samples: bool = True,
    ranks: RankGroup = ONE_RANK,
) -> Session:
    """Load the model and make everything that the caller does not provide; `inference` trains nothing.

    With `samples` false, rollouts are already known, so servers are not contacted and environments are not made.
    """
    require_training_by_reward(config)
    config = resolved_config(config, adapter=None if caller.policy is None else trains_adapter(caller.policy.model))
    behaviours = BehaviourReader(chosen_rows(config.behaviours))
    with ExitStack() as opened:
        threads = opened.enter_context(claim_threads(config.run.threads))
        seed = config.run.seed
        policy, name = policy_of_run(config.model, caller.policy, seed=seed, inference=inference, ranks=ranks)
        replies = opened.enter_context(ExitStack())
        answers = replies_of(config, caller, policy, replies)
        task = task_of(
            config,
            answers.renderer,
            given=caller.task,
            rows=caller.rows,
            held_out_rows=caller.held_out_rows,
            context=policy.max_positions,
        )
        environment = answers.open(lambda: longest_prompts(task)) if samples else answers.unopened()
        longest = config.rollout.max_completion_tokens + longest_of(task)
        longest = longest if answers.toolbox is None else policy.max_positions  # replies are of any length
        with ranks.leading("open", longest):
            engine, policy = engine_of(config, caller, policy, longest, samples=samples)
            replies.callback(close_engine, None if caller.engine else engine)
            algorithm = caller.algorithm or build_algorithm(config.algorithm)
            learner = learner_of(config, caller, policy, algorithm)
        rewards = rewards_of(config, caller.functions, task, policy, replies_pay=environment.rewards)
        resources = opened.enter_context(Resources(config.sandbox))
        collecting = collector_settings(config, algorithm, task)
        session = Session(
            config=config,
            caller=caller,
            policy=learner.policy,
            model_name=name,
            engine=engine,
            algorithm=algorithm,
            task=task,
            rewards=rewards,
            resources=resources,
            threads=threads,
            collector=Collector(task, engine, rewards, collecting, resources=resources, workers=environment.workers),
            learner=learner,
            trained=trained_by_reward(learner),
            behaviours=behaviours,
            environment=environment,
            opened=replies,
        )
        opened.pop_all()  # the session closes them
        return session


def collector_settings(config: Config, algorithm: Algorithm, task: Task) -> CollectorSettings:
    return CollectorSettings(
        rollout=config.rollout,
        grading=config.grading,
        seed=config.run.seed,
        resample=algorithm.resample,
        informative=algorithm.informative,
        num_steps=config.run.num_steps,
        num_rows=task.num_rows,
    )


def require_training_by_reward(config: object) -> None:
    """Reject a config of another kind, which `load_recipe` returns for recipes of other commands."""
    if not isinstance(config, Config):
        kind = type(config).__name__
        raise UserError(f"config: a {kind} is given, but a Config is required.  Make one with load_recipe().")


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


def replies_of(config: Config | CollectConfig, caller: CallerObjects, policy: Policy, stack: ExitStack) -> RepliesOfRun:
    """What replies to the policy: the caller's environment or tools, or the recipe's."""
    section = "rollout" if isinstance(config, Config) else "sampling"
    settings = ReplySettings(
        environment=config.environment,
        tools=caller.tools or config.tools,
        tools_at=config.tools_at,
        sampling=getattr(config, section),
        sandbox=config.sandbox,
        own=caller.environment,
    )
    if not settings.anyone:
        require_one_turn(config, section)
    return RepliesOfRun(policy, settings, config.model.template_options, stack)


def engine_of(
    config: Config | CollectConfig, caller: CallerObjects, policy: Policy, longest: int, *, samples: bool = True
) -> tuple[Engine, Policy]:
    """The engine that samples: the caller's, the recipe's or ours; and the policy that agrees with it.

    `longest` is the maximum number of tokens of a prompt with its completion.  With several ranks, each samples a
    share.  If nothing is sampled, our engine replaces one elsewhere; the policy is the same as with that engine.
    """
    if isinstance(config.engine, InProcessOptions) and config.engine.native:
        policy = replace(policy, native_reason=None)
    if caller.engine is not None:
        return require_engine(caller.engine), policy
    if not samples and isinstance(config.engine, Mapping | HttpOptions):
        return InProcessEngine(policy), policy
    if isinstance(config.engine, Mapping):
        return own_engine(config.engine, policy), policy
    if isinstance(config.engine, HttpOptions):
        from posttrain.generation.http.http_engine import HttpEngine

        longest = min(longest, policy.max_positions)
        sampling = config.rollout if isinstance(config, Config) else config.sampling
        return HttpEngine(policy, config.engine, longest=longest, sampling=sampling.sampling), policy
    max_rows = config.rollout.max_rows if isinstance(config, Config) else config.collect.max_rows
    with whole_weights(sharded(policy)) as whole:
        tried = engine_in_parity(whole, max_rows=max_rows, longest=longest)
    if policy.ranks.size == 1:
        return cast(Engine, tried), tried.policy
    if isinstance(config, Config) and config.rollout.max_staleness:
        raise UserError(
            f"rollout.max_staleness = {config.rollout.max_staleness}: {policy.ranks.size} ranks take turns at sampling"
            " and training.  Set it to 0, or sample on servers (engine.name = http)."
        )
    from posttrain.generation.rank_sampling import RankEngine, RankShare

    return RankEngine(RankShare(tried, policy.ranks)), tried.policy
