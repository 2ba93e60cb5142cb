"""The whole configuration of a run as one frozen record, and the rules between its sections."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.binding import call_arguments, constructed
from posttrain.config.schema import section_record
from posttrain.errors import UserError
from posttrain.options.behaviours import BehaviourOptions
from posttrain.options.countdown import CountdownOptions
from posttrain.options.engine import EngineOptions, InProcessOptions
from posttrain.options.grading import GradingOptions
from posttrain.options.irl_method import (
    CausalOptions,
    CourseOptions,
    FeatureOptions,
    FileFeatures,
    MethodOptions,
    RecoveryOptions,
    StateFeatures,
    TileFeatures,
)
from posttrain.options.irl_world import DemonstrationOptions, IcyGridOptions, SampledOptions, WorldOptions
from posttrain.options.model import ModelOptions
from posttrain.options.reward import RewardOptions
from posttrain.options.rollout import RolloutOptions
from posttrain.options.sandbox import SandboxOptions
from posttrain.options.task import TaskOptions
from posttrain.options.tracker import TrackerOptions
from posttrain.options.training import (
    CheckpointOptions,
    EvaluationOptions,
    ReferenceOptions,
    RunOptions,
    UpdateOptions,
    require_adapter_decay,
)
from posttrain.schemas import record_of

if TYPE_CHECKING:
    from posttrain.algorithms.algorithm import Algorithm


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides a reinforcement-learning run; the same config gives the same run."""

    model: ModelOptions = field(default_factory=ModelOptions)
    task: TaskOptions | Mapping[str, object] = field(default_factory=CountdownOptions)
    """Where prompts come from; its class depends on the task.  Of a class of your own, its path and options."""
    rewards: tuple[RewardOptions, ...] = ()
    """What completions are scored by; none means the task's own."""
    algorithm: Mapping[str, object] = field(default_factory=lambda: {"name": "grpo"})
    """Name of a function in posttrain/algorithms/table.py, or path of your own, and its options; all are filled in."""
    grading: GradingOptions = field(default_factory=GradingOptions)
    sandbox: SandboxOptions = field(default_factory=SandboxOptions)
    engine: EngineOptions = field(default_factory=InProcessOptions)
    """What samples; of a class of your own, its path and options."""
    rollout: RolloutOptions = field(default_factory=RolloutOptions)
    update: UpdateOptions = field(default_factory=UpdateOptions)
    reference: ReferenceOptions = field(default_factory=ReferenceOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    behaviours: BehaviourOptions = field(default_factory=BehaviourOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    tracker: TrackerOptions = field(default_factory=TrackerOptions)
    run: RunOptions = field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        require_use_for_tracker(self.tracker, self.run)
        # In full, so that the file saved with a run says all that it depends on.
        object.__setattr__(self, "algorithm", full_section("algorithm", self.algorithm))
        for name, section in own_sections(self).items():
            object.__setattr__(self, name, section)
        if self.model.trains_adapter:
            require_adapter_decay(self.update, "update")
        self.require_room(1)
        if (self.update.minibatches_per_epoch or 1) > self.rollout.prompts_per_step:
            raise UserError(
                f"update.minibatches_per_epoch = {self.update.minibatches_per_epoch} is more than the groups of a step:"
                f" a group is never split.  Use at most rollout.prompts_per_step = {self.rollout.prompts_per_step}."
            )
        if self.run.early_stop_evaluations is not None and self.evaluation.every_steps == 0:
            raise UserError(
                f"run.early_stop_evaluations = {self.run.early_stop_evaluations} waits for evaluations that"
                " evaluation.every_steps = 0 leaves out.  Use evaluation.every_steps >= 1."
            )

    def require_room(self, longest_prompt_tokens: int) -> None:
        """Refuse a token budget that a single row can exceed; the loop asks again once the prompts are known."""
        limit, completion = self.update.tokens_per_microbatch, self.rollout.max_completion_tokens
        row = longest_prompt_tokens + completion
        if limit < row:
            raise UserError(
                f"update.tokens_per_microbatch = {limit} is less than the longest row of this recipe\n"
                f"    (prompt {longest_prompt_tokens} + completion {completion} = {row} tokens).  Use at least {row}."
            )

    def require_suits(self, algorithm: "Algorithm") -> None:
        """Refuse options that the algorithm in force, which Python may bring, cannot use."""
        self._require_siblings(algorithm)
        self._require_use_for_reference(algorithm)

    def _require_siblings(self, algorithm: "Algorithm") -> None:
        """Refuse groups too small for completions to be compared as the algorithm compares them."""
        size, least = self.rollout.group_size, algorithm.least_group_size
        if size < least:
            raise UserError(
                f"rollout.group_size = {size} leaves a completion no siblings to compare with, as {algorithm.name}"
                f" does; use >= {least}.  `reinforce` and `ppo` are content with 1."
            )

    def _require_use_for_reference(self, algorithm: "Algorithm") -> None:
        """Refuse options of a reference where there is none."""
        if not algorithm.uses_reference and self.reference != ReferenceOptions():
            given = f"path = {self.reference.path}" if self.reference.path else None
            raise UserError(
                f"reference.{given or f'refresh_every = {self.reference.refresh_every}'} is about a reference that"
                f" {algorithm.name} does without.  Leave it out, or give the algorithm a KL term, such as"
                " algorithm.kl.coefficient = 0.001."
            )


@dataclass(frozen=True, kw_only=True)
class IrlConfig:
    """Everything that decides a run of inverse RL, which finds the reward behind demonstrations."""

    world: WorldOptions = field(default_factory=IcyGridOptions)
    """Where the demonstrator acts; its class depends on the kind of world."""
    demonstrations: DemonstrationOptions = field(default_factory=SampledOptions)
    features: FeatureOptions = field(default_factory=StateFeatures)
    method: MethodOptions = field(default_factory=CausalOptions)
    run: RecoveryOptions = field(default_factory=RecoveryOptions)

    def __post_init__(self) -> None:
        world, method, features = self.world, self.method, self.features
        if not isinstance(method, CausalOptions) and isinstance(features, FileFeatures) and features.on != "state":
            raise UserError(f"features.on = {features.on}: method.name = {method.name} knows features of states only.")
        if not isinstance(world, IcyGridOptions):
            self._require_no_grid(world.name)
        elif isinstance(features, TileFeatures) and features.width > world.size:
            raise UserError(
                f"features.width = {features.width} is wider than the grid; use 1 to world.size = {world.size}"
            )

    def _require_no_grid(self, world: str) -> None:
        if isinstance(self.method, CourseOptions):
            raise UserError(
                "method.name = course is written for world.name = icy_grid, whose ends can be left; this is"
                f" {world}.  Use method.name = maxent or causal."
            )
        if isinstance(self.features, TileFeatures):
            raise UserError(
                f"features.name = tiles are tiles of world.name = icy_grid; this is {world}."
                "  Use states, or a file of your own."
            )
        if isinstance(self.demonstrations, SampledOptions) and self.demonstrations.expert == "course":
            raise UserError(
                "demonstrations.expert = course looks at where a step should lead, which world.name ="
                f" {world} does not tell.  Use soft or greedy."
            )


def require_use_for_tracker(tracker: TrackerOptions, run: RunOptions) -> None:
    """Refuse options of trackers where there is none."""
    default, given = plain(asdict(TrackerOptions())), plain(asdict(tracker))
    changed = [name for name, value in given.items() if value != default[name]]
    if changed and not run.report_to:
        raise UserError(
            f"tracker.{changed[0]} = {given[changed[0]]}: no tracker is told of the run.  Name one by"
            " run.report_to, such as [tensorboard], or leave it out."
        )


def require_complete(config: object) -> None:
    """The rules of a config to which nothing is added any more: no caller in Python brings an algorithm of its own."""
    if isinstance(config, Config):
        from posttrain.algorithms.table import build_algorithm  # with torch, which other runs go without

        config.require_suits(build_algorithm(config.algorithm))


def own_sections(config: Any) -> dict[str, Any]:
    """The sections of a config that name classes of the user's own, with every option that they leave out."""
    given = {name: getattr(config, name) for name in ("task", "engine")}
    return {name: full_section(name, section) for name, section in given.items() if isinstance(section, Mapping)}


def full_section(section: str, given: Mapping[str, object]) -> Any:
    """A section that Python code gives as a mapping, with every option that it leaves out."""
    return section_of(section, record_of(section_record(Config, section, given), given, where=section))


def section_of(name: str, record: Any) -> Any:
    """What a config holds of a section: an object of its own class, which has rules, or a mapping."""
    if name == "rewards":
        return tuple(constructed(each, "rewards: ") for each in record)
    if name == "algorithm" or type(record).schema.is_own:
        call_arguments(record, where=name)
        return plain(asdict(record))
    return constructed(record, f"{name}.")


def plain(value: Any) -> Any:
    """A value as YAML can say it."""
    match value:
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case Enum():
            return value.value
        case Path():
            return str(value)
    return value
