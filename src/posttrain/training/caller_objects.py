"""Objects that a caller in Python passes in place of what a config describes, and what a resume compares of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.table import build_algorithm
from posttrain.binding import bind
from posttrain.config import Config
from posttrain.config.recipes import short_reward
from posttrain.errors import UserError
from posttrain.generation.engine import Engine
from posttrain.models.policy import Policy
from posttrain.options.reward import RewardOptions, RewardSettings
from posttrain.rewards.grading.function import RewardFunction
from posttrain.rewards.reward_registry import load_reward
from posttrain.runs.harness import require_resume
from posttrain.runs.named_inputs import inputs_of_run, policy_input
from posttrain.runs.run_inputs import RunInput, RunInputs, class_name, code_input
from posttrain.runs.watchers import Watcher, require_watchers
from posttrain.tasks.base import Task, as_reward_functions
from posttrain.training.optimizer import OwnOptimizer

Rows = Iterable[Mapping[str, object]]
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


NOTHING_BROUGHT = CallerObjects()
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
        require_resume(self.from_step, resume=self.resume)
        object.__setattr__(self, "watchers", require_watchers(self.watchers))
