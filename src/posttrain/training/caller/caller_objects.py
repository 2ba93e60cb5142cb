"""Objects of the caller's in place of what a config describes, checked where they come in."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass

from posttrain.algorithms.algorithm import Algorithm
from posttrain.binding import bind
from posttrain.config.recipes import short_reward
from posttrain.errors import UserError
from posttrain.generation.engine import Engine
from posttrain.models.policy import Policy
from posttrain.options.reward import RewardOptions
from posttrain.rewards.grading.function import RewardFunction
from posttrain.rewards.reward_registry import load_reward
from posttrain.runs.harness import require_resume
from posttrain.runs.watchers import Watcher, require_watchers
from posttrain.tasks.base import Task, as_reward_functions
from posttrain.training.optimizer import OwnOptimizer

Rows = Iterable[Mapping[str, object]]
Reward = Callable[..., object] | RewardFunction
"""A function, or what `reward_function` makes of one: with a name and a weight of its own."""
Rewards = Reward | str | Sequence[Reward | str]
"""A text is a reward as a flag names it: of this package, FILE.py:FUNCTION, or the folder of a reward model."""


def loaded_rewards(given: Rewards) -> Rewards:
    """Rewards, with what they name in place of those that are texts."""
    if isinstance(given, str):
        return named_reward(given)
    if isinstance(given, list | tuple) and any(isinstance(each, str) for each in given):
        return [named_reward(each) if isinstance(each, str) else each for each in given]
    return given


def named_reward(text: str) -> RewardFunction:
    """The reward that a flag would name so."""
    return load_reward(bind(RewardOptions, short_reward(text), where="rewards"))


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
    held_out_rows: Rows | None = None
    """Those to evaluate on, in place of a share of the rows."""
    optimizer: OwnOptimizer | None = None
    """In place of AdamW, over the policy's parameters."""

    def __post_init__(self) -> None:
        for name, kind, remedy in (
            ("policy", Policy, "make one of a model and its tokenizer with posttrain.as_policy"),
            ("algorithm", Algorithm, "give an object, such as what posttrain.algorithms.table.grpo() returns"),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise UserError(f"{name}: {value!r:.60} ({type(value).__name__}) is no {kind.__name__}; {remedy}.")
        object.__setattr__(self, "rewards", loaded_rewards(self.rewards))
        for name, rows in (("rows", self.rows), ("held_out_rows", self.held_out_rows)):
            if isinstance(rows, Iterable) and not isinstance(rows, Sized):  # a generator gives them once
                object.__setattr__(self, name, list(rows))


NOTHING_BROUGHT = CallerObjects()
"""Of a command, all is in the config."""


def given_rewards(own: CallerObjects) -> tuple[RewardFunction, ...]:
    """The caller's rewards, each with a name and settings."""
    given = own.rewards
    one = callable(given) or isinstance(given, RewardFunction)
    return as_reward_functions([given] if one else given, "rewards")


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
