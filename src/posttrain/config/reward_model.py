"""The config of a reward model's training, and the rules that recipes of pairs have in common."""

from dataclasses import dataclass, field, replace

from posttrain.config.sections import PROMPTS_ONLY, require_use_for_tracker
from posttrain.errors import UserError
from posttrain.options.dataset import DatasetOptions
from posttrain.options.model import ModelOptions
from posttrain.options.pairs import PairOptions
from posttrain.options.reward_training import RewardTrainingOptions
from posttrain.options.task import TaskOptions
from posttrain.options.tracker import TrackerOptions
from posttrain.options.training import CheckpointOptions, RunOptions, require_adapter_decay, require_no_token_columns


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
        require_use_for_tracker(self.tracker, self.run)
        if self.model.trains_adapter:
            require_adapter_decay(self.reward_model, "reward_model")
        require_rows_of_pairs(self.task)
        require_end_of_pairs(self.run, self.reward_model)
        adapter = self.model.adapter
        if adapter is not None and adapter.save != "merged":
            object.__setattr__(self, "model", merged_when_saved(self.model))


def merged_when_saved(model: ModelOptions) -> ModelOptions:
    """The same, its adapter merged into what is saved: a reward model is read as a whole."""
    assert model.adapter is not None
    return replace(model, adapter=replace(model.adapter, save="merged"))


def require_rows_of_pairs(task: TaskOptions) -> None:
    """Refuse a task that has no rows, and options of rows that say nothing of pairs."""
    if not isinstance(task, DatasetOptions) or task.name != DatasetOptions.name:
        raise UserError(
            f"task.name = {task.name}: what is learned are pairs, rows with `chosen` and `rejected`.  Name their file"
            " as task.path."
        )
    for option in PROMPTS_ONLY:
        value = getattr(task, option)
        if value != getattr(DatasetOptions(), option):
            raise UserError(
                f"task.{option} = {value} is for prompts that are sampled from; pairs hold whole answers.  Leave it"
                " out; how long they may be says the option max_length of pairs."
            )
    if any(source.weight is not None for source in task.sources):
        raise UserError("task.sources: an epoch has each pair once, so that weights say nothing.  Leave them out.")


def require_one_end(run: RunOptions, options: PairOptions) -> None:
    """Refuse steps beside epochs, and no steps."""
    if run.num_steps < 1:
        raise UserError(f"run.num_steps = {run.num_steps} trains nothing; use >= 1")
    if options.num_epochs is not None and run.num_steps != RunOptions().num_steps:
        raise UserError(
            f"run.num_steps = {run.num_steps} and {options.section}.num_epochs = {options.num_epochs:g} both say when"
            f" the run ends.  Leave the first out, or give {options.section}.num_epochs = null."
        )


def require_end_of_pairs(run: RunOptions, options: PairOptions) -> None:
    """Refuse a run on pairs that says in two ways when it ends, or never trains."""
    require_one_end(run, options)
    require_no_token_columns(run)
    for option in ("time_limit_minutes", "token_limit", "early_stop_evaluations"):
        value = getattr(run, option)
        if value is not None:
            raise UserError(
                f"run.{option} = {value} stops runs of `posttrain rl` only; this one ends with its pairs.  Leave it"
                " out."
            )
