"""The configuration of `posttrain collect`: whose completions, made into which pairs, judged by whom."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from posttrain.errors import UserError
from posttrain.options.collect import (
    CollectOptions,
    CollectRunOptions,
    JudgeOptions,
    LlmJudgeOptions,
    PersonJudgeOptions,
    RewardJudgeOptions,
)
from posttrain.options.countdown import CountdownOptions
from posttrain.options.engine import EngineOptions, InProcessOptions
from posttrain.options.grading import GradingOptions
from posttrain.options.model import ModelOptions
from posttrain.options.reward import RewardOptions
from posttrain.options.rollout import SamplingOptions
from posttrain.options.sandbox import SandboxOptions
from posttrain.options.task import TaskOptions
from posttrain.schemas import require_left_out

RL_ONLY = ("max_unscored_steps", "max_same_reward_steps", "on_unscored_row")
"""Options of `grading` about training steps."""


@dataclass(frozen=True, kw_only=True)
class CollectConfig:
    """Everything that decides which preferences are collected."""

    model: ModelOptions = field(default_factory=ModelOptions)
    """The policy whose completions are compared."""
    task: TaskOptions | Mapping[str, object] = field(default_factory=CountdownOptions)
    """Where prompts come from; its class depends on the task.  Of a class of your own, its path and options."""
    rewards: tuple[RewardOptions, ...] = ()
    """What completions are scored by, where they are; none means the task's own."""
    engine: EngineOptions = field(default_factory=InProcessOptions)
    """What samples; of a class of your own, its path and options."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    collect: CollectOptions = field(default_factory=CollectOptions)
    judge: JudgeOptions = field(default_factory=RewardJudgeOptions)
    """Who says which of two completions is better."""
    grading: GradingOptions = field(default_factory=GradingOptions)
    sandbox: SandboxOptions = field(default_factory=SandboxOptions)
    run: CollectRunOptions = field(default_factory=CollectRunOptions)

    def __post_init__(self) -> None:
        if self.sampling.temperature == 0:
            raise UserError(
                "sampling.temperature = 0 makes all completions of a prompt the same, and no pair of them; use > 0"
            )
        require_left_out(self.grading, RL_ONLY, "is for `posttrain rl`", where="grading.")
        judge = self.judge
        if isinstance(judge, LlmJudgeOptions) and not (judge.endpoint and judge.model):
            raise UserError(
                "judge.name = llm asks a model behind an endpoint: give judge.endpoint, such as"
                " http://127.0.0.1:8000/v1, and judge.model"
            )
        if self.rewards and not self.scored:
            raise UserError(
                f"rewards: judge.name = {judge.name} and collect.pairs = {self.collect.pairs} ask no reward.  Leave the"
                " section out, or use collect.pairs = best_worst to have rewards choose the pairs that are judged."
            )

    @property
    def scored(self) -> bool:
        """Whether completions are scored by rewards: to judge them, or to choose pairs by."""
        return isinstance(self.judge, RewardJudgeOptions) or self.collect.pairs == "best_worst"

    @property
    def by_person(self) -> bool:
        """Whether people judge."""
        return isinstance(self.judge, PersonJudgeOptions)
