"""The configs of runs on rows and on pairs: sft, reward-model and dpo, and the rules that they share."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from posttrain.config.sections import FOR_RL, Config, SampledSections, TrainingSections
from posttrain.options.bounds import GIVEN, Rule, Rules, Unused
from posttrain.options.dataset import DatasetOptions
from posttrain.options.model import ModelOptions, NewModelOptions
from posttrain.options.pairs import DpoOptions, RewardTrainingOptions
from posttrain.options.rollout import RolloutOptions
from posttrain.options.task import CountdownOptions, Demonstrator, TaskOptions
from posttrain.options.training import EvaluationOptions, RunOptions, SftOptions, UpdateOptions

DEMONSTRATED = ("countdown", "arithmetic", "sentences")
ROWS_NEEDED = (
    "needs rows with the columns chosen and rejected.  Name their file as task.path, or sample pairs from the policy:"
    " dpo.rounds = 4."
)
FOR_PROMPTS = "task.shuffle task.last_assistant_message task.prefill task.over_long task.max_prompt_tokens"


def fit_rules(section: str, prompts: Mapping[str, object] | str = "prompts that are sampled from") -> Rules:
    """The rules of all three.  `section` holds the options of rows or pairs; `prompts` says when prompts are read."""
    return (
        Unused("run.token_limit run.early_stop_evaluations run.keep_token_columns", FOR_RL),
        Rule("run.num_steps", lambda c: c.run.num_steps >= 1, "must be at least 1."),
        Rule(
            "run.num_steps",
            lambda c: getattr(c, section).num_epochs is None or c.run.num_steps == RunOptions.num_steps,
            f"and {section}.num_epochs = {{o.{section}.num_epochs:g}} both set the length of the run.  Leave the first"
            f" out, or use {section}.num_epochs = null.",
        ),
        Unused(FOR_PROMPTS, prompts, f"Leave it out; {section}.max_length limits whole rows."),
        Rule(
            "task.sources",
            lambda c: c.samples_prompts or all(each.weight is None for each in getattr(c.task, "sources", ())),
            "have weights, but an epoch uses each row once.  Leave the weights out.",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class SftConfig(TrainingSections):
    """Everything that decides a supervised run."""

    optimizer_section: ClassVar[str] = "sft"

    model: NewModelOptions | ModelOptions = field(default_factory=NewModelOptions)
    """An existing model, if `path` is set, or else a small new one."""
    task: TaskOptions = field(default_factory=CountdownOptions)
    """The rows to learn, or the problems to demonstrate."""
    demonstrator: Demonstrator = field(default_factory=Demonstrator)
    sft: SftOptions = field(default_factory=SftOptions)

    rules = (
        *fit_rules("sft"),
        Unused("run.time_limit_minutes", FOR_RL),
        Rule(
            "task.name",
            lambda c: c.task.name in (DatasetOptions.name, *DEMONSTRATED),
            f"does not provide rows.  Use dataset, or for demonstrations {', '.join(DEMONSTRATED)}.",
        ),
        Unused("sft.loss_on sft.split_turns sft.max_length", {"task.name": "dataset"}),
        Unused("sft.long_rows sft.num_epochs sft.rows_per_batch", {"task.name": "dataset"}),
        Unused("sft.num_demonstrations", {"task.name": DEMONSTRATED}),
        Unused("sft.eval_size", {"task.name": DEMONSTRATED}, "For rows use task.held_out_size."),
        Unused("demonstrator", {"task.name": "countdown"}, "Leave the section out."),
    )

    samples_prompts: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(TrainingSections):
    """Everything that decides how a reward model is trained."""

    optimizer_section: ClassVar[str] = "reward_model"

    model: ModelOptions = field(default_factory=ModelOptions)
    """The language model whose body is trained with a new head."""
    task: TaskOptions = field(default_factory=DatasetOptions)
    """The pairs: rows with `chosen` and `rejected`, and `prompt` unless both already begin with it."""
    reward_model: RewardTrainingOptions = field(default_factory=RewardTrainingOptions)

    rules = (
        *fit_rules("reward_model"),
        Unused("run.time_limit_minutes", FOR_RL),
        Rule(
            "task.name",
            lambda c: c.task.name == DatasetOptions.name,
            "does not provide pairs.  Set task.path to a file of rows.",
        ),
    )

    samples_prompts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        adapter = self.model.adapter
        if adapter is not None and adapter.save != "merged":  # a reward model is read as a whole
            object.__setattr__(self, "model", replace(self.model, adapter=replace(adapter, save="merged")))


@dataclass(frozen=True, kw_only=True)
class DpoConfig(TrainingSections, SampledSections):
    """Everything that decides a run on pairs of answers: from rows, or sampled in rounds."""

    optimizer_section: ClassVar[str] = "dpo"

    task: TaskOptions | Mapping[str, object] = field(default_factory=DatasetOptions)
    """The rows with two answers each; with rounds, where prompts come from."""
    rollout: RolloutOptions = field(default_factory=RolloutOptions)
    """With rounds: how completions are sampled."""
    dpo: DpoOptions = field(default_factory=DpoOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    """With rounds: how held-out problems are measured."""

    rules = (
        Rule(
            "task",
            lambda c: c.dpo.rounds or getattr(c.task, "name", "") == DatasetOptions.name,
            f"with dpo.rounds = 0 {ROWS_NEEDED}",
        ),
        Unused("dpo.steps_per_round dpo.prompts_per_round dpo.pairs_per_prompt", {"dpo.rounds": GIVEN}),
        Unused("dpo.refresh_reference rewards engine rollout evaluation grading sandbox", {"dpo.rounds": GIVEN}),
        Unused("environment tools", {"dpo.rounds": GIVEN}),
        Unused("dpo.max_length dpo.long_pairs dpo.learn_closing dpo.eval_every", {"dpo.rounds": 0}),
        Unused("run.num_steps", {"dpo.rounds": 0}, "Leave it out: rounds · dpo.steps_per_round = {o.num_steps}."),
        Rule(
            "dpo.num_epochs",
            lambda c: not c.dpo.rounds or c.dpo.num_epochs in (None, DpoOptions.num_epochs),
            "is only for dpo.rounds = 0, and dpo.rounds = {o.dpo.rounds}.  Leave it out.",
        ),
        *fit_rules("dpo", {"dpo.rounds": GIVEN}),
        Unused("grading.max_unscored_steps grading.max_same_reward_steps", FOR_RL),
        Unused("rollout.prompts_per_step", FOR_RL, "Use dpo.prompts_per_round."),
        Unused("rollout.max_staleness", FOR_RL),
        Rule("rollout.group_size", lambda c: c.rollout.group_size > 1, "cannot make pairs.  Use at least 2."),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dpo.rounds:
            self.sampling_half()  # checks the rules between its sections

    @property
    def samples_prompts(self) -> bool:
        return self.dpo.rounds > 0

    @property
    def num_steps(self) -> int:
        """Updates of all rounds; for rows, `run.num_steps`, unless the number of epochs decides."""
        return self.dpo.rounds * self.dpo.steps_per_round or self.run.num_steps

    def sampling_half(self) -> Config:
        """The recipe by which `posttrain rl` would sample and judge as a round does."""
        return Config(
            model=self.model,
            task=self.task,
            rewards=self.rewards,
            environment=self.environment,
            tools=self.tools,
            tools_at=self.tools_at,
            grading=self.grading,
            sandbox=self.sandbox,
            engine=self.engine,
            rollout=replace(self.rollout, prompts_per_step=self.dpo.prompts_per_round),
            update=UpdateOptions(tokens_per_microbatch=2**62, learning_rate=self.dpo.learning_rate),
            evaluation=self.evaluation,
            run=replace(self.run, num_steps=max(1, self.dpo.rounds)),
        )
