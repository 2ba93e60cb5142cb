"""The configs of runs on rows and on pairs, sft, reward-model and dpo, and the rules that they share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from posttrain.binding import is_own
from posttrain.config.sections import Config, own_sections, require_use_for_tracker
from posttrain.errors import UserError
from posttrain.options.countdown import CountdownOptions
from posttrain.options.dataset import DatasetOptions
from posttrain.options.demonstrator import Demonstrator
from posttrain.options.dpo import DpoOptions
from posttrain.options.engine import EngineOptions, InProcessOptions
from posttrain.options.grading import GradingOptions
from posttrain.options.model import ModelOptions
from posttrain.options.new_model import NewModelOptions
from posttrain.options.pairs import PairOptions
from posttrain.options.reward import RewardOptions
from posttrain.options.reward_training import RewardTrainingOptions
from posttrain.options.rollout import RolloutOptions
from posttrain.options.sandbox import SandboxOptions
from posttrain.options.task import TaskOptions
from posttrain.options.tracker import TrackerOptions
from posttrain.options.training import (
    CheckpointOptions,
    EvaluationOptions,
    RunOptions,
    SftOptions,
    UpdateOptions,
    require_adapter_decay,
    require_no_token_columns,
)
from posttrain.schemas import require_left_out

FOR_PROMPTS = ("shuffle", "last_assistant_message", "prefill", "over_long", "max_prompt_tokens")
"""Options of the task `dataset` about prompts that are sampled from."""
SFT_ROWS = ("loss_on", "split_turns", "max_length", "long_rows", "num_epochs", "rows_per_batch")
"""Options of `sft` about rows."""
DPO_ROWS = ("max_length", "long_pairs", "learn_closing", "eval_every")
"""Options of `dpo` about rows."""
DPO_ROUNDS = ("steps_per_round", "prompts_per_round", "pairs_per_prompt", "refresh_reference")
"""Options of `dpo` about rounds."""
LIMITS = ("token_limit", "early_stop_evaluations", "time_limit_minutes")
"""Options of `run` that stop a run by reward early."""
ROWS_NEEDED = (
    "task: without rounds what is learned are rows with the columns chosen and rejected.  Name their file as task.path,"
    " or have pairs sampled from the policy: dpo.rounds = 4."
)

FOR_ROUNDS = "is for rounds, and dpo.rounds = 0 learns the pairs of rows, which are judged already.  Leave it out."


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Everything that decides a supervised run."""

    model: NewModelOptions | ModelOptions = field(default_factory=NewModelOptions)
    """A model that exists, where `path` is given, and else a small one that is made from nothing."""
    task: TaskOptions = field(default_factory=CountdownOptions)
    """The rows that are learned, or the problems that are demonstrated."""
    demonstrator: Demonstrator = field(default_factory=Demonstrator)
    sft: SftOptions = field(default_factory=SftOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    tracker: TrackerOptions = field(default_factory=TrackerOptions)
    run: RunOptions = field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        require_shared_rules(self, self.sft, LIMITS)
        require_one_end(self.run, self.sft)
        if isinstance(self.task, DatasetOptions):
            self._require_rows(self.task)
            return
        require_defaults(self.sft, SFT_ROWS, f"is for rows; demonstrations of {self.task.name} go without")
        if self.task.name != CountdownOptions.name and self.demonstrator != Demonstrator():
            raise UserError(
                f"demonstrator: its options are those of Countdown's; that of {self.task.name} has none.  Leave the"
                " section out."
            )

    def _require_rows(self, task: DatasetOptions) -> None:
        if task.name != DatasetOptions.name:
            raise UserError(
                f"task.name = {task.name}: what is learned are rows (dataset) or demonstrations (countdown,"
                " arithmetic, sentences)."
            )
        require_defaults(self.sft, ("num_demonstrations",), "is for demonstrations; rows are what they are")
        if self.sft.eval_size != SftOptions().eval_size:
            raise UserError(
                f"sft.eval_size = {self.sft.eval_size} is for demonstrations; of rows use task.held_out_size"
            )
        if self.demonstrator != Demonstrator():
            raise UserError("demonstrator: nothing is demonstrated where rows are learned.  Leave the section out.")
        require_learned_rows(task, self.sft)


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """Everything that decides how a reward model is trained."""

    model: ModelOptions = field(default_factory=ModelOptions)
    """The language model whose body is trained under a new head."""
    task: TaskOptions = field(default_factory=DatasetOptions)
    """The pairs: rows with `chosen` and `rejected`, and `prompt` unless it is what both begin with."""
    reward_model: RewardTrainingOptions = field(default_factory=RewardTrainingOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    tracker: TrackerOptions = field(default_factory=TrackerOptions)
    run: RunOptions = field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        require_shared_rules(self, self.reward_model, LIMITS)
        require_one_end(self.run, self.reward_model)
        if not isinstance(self.task, DatasetOptions) or self.task.name != DatasetOptions.name:
            raise UserError(
                f"task.name = {self.task.name}: what is learned are pairs, rows with `chosen` and `rejected`.  Name"
                " their file as task.path."
            )
        require_learned_rows(self.task, self.reward_model)
        adapter = self.model.adapter
        if adapter is not None and adapter.save != "merged":  # a reward model is read as a whole
            object.__setattr__(self, "model", replace(self.model, adapter=replace(adapter, save="merged")))


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
        for name, section in own_sections(self).items():
            object.__setattr__(self, name, section)
        require_shared_rules(self, self.dpo, LIMITS[:2])
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
        require_defaults(self.dpo, DPO_ROUNDS, "is of rounds, and dpo.rounds = 0 learns rows")
        if not isinstance(self.task, DatasetOptions) or self.task.name != DatasetOptions.name:
            raise UserError(ROWS_NEEDED)
        defaults: dict[str, object] = {
            "rewards": (),
            "engine": InProcessOptions(),
            "rollout": RolloutOptions(),
            "evaluation": EvaluationOptions(),
            "grading": GradingOptions(),
            "sandbox": SandboxOptions(),
        }
        for section, default in defaults.items():
            if getattr(self, section) != default:
                raise UserError(f"{section}: {FOR_ROUNDS}")
        require_learned_rows(self.task, self.dpo)
        require_one_end(self.run, self.dpo)

    def _require_rounds(self) -> None:
        steps = ("max_unscored_steps", "max_same_reward_steps")
        require_left_out(self.grading, steps, "is for `posttrain rl`", where="grading.")
        rule = "is for rows, and dpo.rounds has pairs sampled"
        require_defaults(self.dpo.resolved(), ("num_epochs",), rule, DpoOptions(num_epochs=None))
        require_defaults(self.dpo, DPO_ROWS, rule)
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


def require_rows_or_rounds(sections: Mapping[str, object]) -> None:
    """Refuse a user's class where there are no rounds, from a recipe's content: nothing of it is imported."""
    options = sections.get("dpo")
    if isinstance(options, Mapping) and options.get("rounds") not in (None, 0):
        return
    if is_own("task", sections.get("task")):
        raise UserError(ROWS_NEEDED)
    if is_own("engine", sections.get("engine")):
        raise UserError(f"engine: {FOR_ROUNDS}")


def require_shared_rules(
    config: SftConfig | RewardModelConfig | DpoConfig, options: SftOptions | PairOptions, limits: Sequence[str]
) -> None:
    """Refuse a tracker's options without one, weight decay of an adapter, and limits of runs by reward."""
    require_use_for_tracker(config.tracker, config.run)
    require_no_token_columns(config.run)
    if isinstance(config.model, ModelOptions) and config.model.trains_adapter:
        require_adapter_decay(options, options.section)
    for option in limits:
        if (value := getattr(config.run, option)) is not None:
            raise UserError(f"run.{option} = {value} stops runs of `posttrain rl` only.  Leave it out.")


def require_one_end(run: RunOptions, options: SftOptions | PairOptions) -> None:
    """Refuse steps beside epochs, and no steps."""
    if run.num_steps < 1:
        raise UserError(f"run.num_steps = {run.num_steps} trains nothing; use >= 1")
    if options.num_epochs is not None and run.num_steps != RunOptions().num_steps:
        raise UserError(
            f"run.num_steps = {run.num_steps} and {options.section}.num_epochs = {options.num_epochs:g} both say when"
            f" the run ends.  Leave the first out, or give {options.section}.num_epochs = null."
        )


def require_learned_rows(task: DatasetOptions, options: SftOptions | PairOptions) -> None:
    """Refuse options of a dataset that say nothing of rows that are learned."""
    for option in FOR_PROMPTS:
        value = getattr(task, option)
        if value != getattr(DatasetOptions(), option):
            raise UserError(
                f"task.{option} = {value} is for prompts that are sampled from; rows and pairs hold whole answers."
                f"  Leave it out; {options.section}.max_length is the longest that they may be."
            )
    if any(source.weight is not None for source in task.sources):
        raise UserError("task.sources: an epoch has each row once, so that weights say nothing.  Leave them out.")


def require_defaults(
    options: SftOptions | PairOptions, names: Sequence[str], rule: str, default: object = None
) -> None:
    """Refuse options that have another value than by default, and no use here."""
    default = default or type(options)()
    for name in names:
        if (value := getattr(options, name)) != getattr(default, name):
            raise UserError(f"{options.section}.{name} = {value} {rule}.  Leave it out.")
