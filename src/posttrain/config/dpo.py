"""What decides a run of direct preference optimisation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from posttrain.binding import is_own
from posttrain.config.reward_model import require_one_end
from posttrain.config.sections import Config, own_sections, require_use_for_tracker
from posttrain.errors import UserError
from posttrain.options.dataset import DatasetOptions
from posttrain.options.dpo import DpoOptions
from posttrain.options.engine import EngineOptions, InProcessOptions
from posttrain.options.grading import GradingOptions
from posttrain.options.model import ModelOptions
from posttrain.options.reward import RewardOptions
from posttrain.options.rollout import RolloutOptions
from posttrain.options.sandbox import SandboxOptions
from posttrain.options.task import TaskOptions
from posttrain.options.tracker import TrackerOptions
from posttrain.options.training import (
    CheckpointOptions,
    EvaluationOptions,
    RunOptions,
    UpdateOptions,
    require_adapter_decay,
)
from posttrain.schemas import require_left_out

ROWS_ONLY = ("max_length", "long_pairs", "learn_closing", "eval_every")
"""Options of `dpo` that are about rows."""
ROUNDS_ONLY = ("steps_per_round", "prompts_per_round", "pairs_per_prompt", "refresh_reference")
"""Options of `dpo` that are about rounds."""
FOR_PROMPTS = ("shuffle", "last_assistant_message", "prefill", "over_long", "max_prompt_tokens")
"""Options of the task `dataset` that say nothing of rows with two answers."""

ROWS_NEEDED = (
    "task: without rounds what is learned are rows with the columns chosen and rejected.  Name their file as task.path,"
    " or have pairs sampled from the policy: dpo.rounds = 4."
)


FOR_ROUNDS = "is for rounds, and dpo.rounds = 0 learns the pairs of rows, which are judged already.  Leave it out."


def require_rows_or_rounds(sections: Mapping[str, object]) -> None:
    """Refuse a user's class where there are no rounds, from a recipe's content: nothing of it is imported."""
    options = sections.get("dpo")
    if isinstance(options, Mapping) and options.get("rounds") not in (None, 0):
        return
    if is_own("task", sections.get("task")):
        raise UserError(ROWS_NEEDED)
    if is_own("engine", sections.get("engine")):
        raise UserError(f"engine: {FOR_ROUNDS}")


@dataclass(frozen=True, kw_only=True)
class DpoConfig:
    """Everything that decides a run on pairs of answers, those of rows or those that are sampled in rounds."""

    model: ModelOptions = field(default_factory=ModelOptions)
    task: TaskOptions | Mapping[str, object] = field(default_factory=DatasetOptions)
    """The rows with two answers each; or, of rounds, where prompts come from."""
    rewards: tuple[RewardOptions, ...] = ()
    """Of rounds: what completions are judged by; none means the task's own."""
    grading: GradingOptions = field(default_factory=GradingOptions)
    sandbox: SandboxOptions = field(default_factory=SandboxOptions)
    engine: EngineOptions = field(default_factory=InProcessOptions)
    """Of rounds: what samples."""
    rollout: RolloutOptions = field(default_factory=RolloutOptions)
    """Of rounds: how completions are sampled."""
    dpo: DpoOptions = field(default_factory=DpoOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    """Of rounds: how held-out problems are measured."""
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    tracker: TrackerOptions = field(default_factory=TrackerOptions)
    run: RunOptions = field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        require_use_for_tracker(self.tracker, self.run)
        for name, section in own_sections(self).items():
            object.__setattr__(self, name, section)
        if self.model.trains_adapter:
            require_adapter_decay(self.dpo, "dpo")
        for option in ("early_stop_evaluations", "token_limit"):
            if (value := getattr(self.run, option)) is not None:
                raise UserError(f"run.{option} = {value} stops runs of `posttrain rl` only.  Leave it out.")
        if self.dpo.rounds:
            self._require_rounds()
        else:
            self._require_rows()

    @property
    def num_steps(self) -> int:
        """Updates of all rounds; of rows what the recipe says, which epochs may overrule."""
        return self.dpo.rounds * self.dpo.steps_per_round or self.run.num_steps

    def sampling_half(self) -> Config:
        """The recipe by which `posttrain rl` would sample and judge what a round does."""
        return Config(
            model=self.model,
            task=self.task,
            rewards=self.rewards,
            grading=self.grading,
            sandbox=self.sandbox,
            engine=self.engine,
            rollout=replace(self.rollout, prompts_per_step=self.dpo.prompts_per_round),
            update=UpdateOptions(tokens_per_microbatch=2**62, learning_rate=self.dpo.learning_rate),
            evaluation=self.evaluation,
            run=replace(self.run, num_steps=max(1, self.dpo.rounds)),
        )

    def _require_rows(self) -> None:
        self._require_none(self.dpo.given(*ROUNDS_ONLY), "is of rounds, and dpo.rounds = 0 learns rows")
        task = self.task
        if not isinstance(task, DatasetOptions) or task.name != DatasetOptions.name:
            raise UserError(ROWS_NEEDED)
        for section, options in {
            "rewards": self.rewards,
            "engine": self.engine != InProcessOptions(),
            "rollout": self.rollout != RolloutOptions(),
            "evaluation": self.evaluation != EvaluationOptions(),
            "grading": self.grading != GradingOptions(),
            "sandbox": self.sandbox != SandboxOptions(),
        }.items():
            if options:
                raise UserError(f"{section}: {FOR_ROUNDS}")
        for option in FOR_PROMPTS:
            value = getattr(task, option)
            if value != getattr(DatasetOptions(), option):
                raise UserError(
                    f"task.{option} = {value} is for prompts that are sampled from; rows hold whole answers.  Leave it"
                    " out; how long pairs may be says dpo.max_length."
                )
        if any(source.weight is not None for source in task.sources):
            raise UserError("task.sources: an epoch has each pair once, so that weights say nothing.  Leave them out.")
        require_one_end(self.run, self.dpo)

    def _require_rounds(self) -> None:
        steps = ("max_unscored_steps", "max_same_reward_steps")
        require_left_out(self.grading, steps, "is for `posttrain rl`", where="grading.")
        epochs = ["num_epochs"] if self.dpo.resolved().num_epochs is not None else []
        self._require_none([*epochs, *self.dpo.given(*ROWS_ONLY)], "is for rows, and dpo.rounds has pairs sampled")
        if self.rollout.group_size < 2:
            raise UserError(f"rollout.group_size = {self.rollout.group_size} makes no pair of a prompt; use >= 2.")
        if self.rollout.prompts_per_step != RolloutOptions().prompts_per_step:
            raise UserError(
                f"rollout.prompts_per_step = {self.rollout.prompts_per_step}: a round samples the completions of many"
                " updates at once.  Say how many prompts it has as dpo.prompts_per_round."
            )
        if self.run.num_steps != RunOptions().num_steps:
            raise UserError(
                f"run.num_steps = {self.run.num_steps}: a run in rounds has dpo.rounds × dpo.steps_per_round ="
                f" {self.num_steps} updates.  Leave it out."
            )
        self.sampling_half()  # holds the rules between its sections

    def _require_none(self, given: Sequence[str], rule: str) -> None:
        if given:
            raise UserError(f"dpo.{given[0]} = {getattr(self.dpo, given[0])} {rule}.  Leave it out.")
