"""The configs of rl, collect and irl: one frozen record of all that decides a run, with the rules between sections."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from posttrain.binding import OWN, call_arguments, constructed, is_name_in_file, is_own, own_schema
from posttrain.config.recipes import TASKS_OF_ROWS
from posttrain.errors import UserError
from posttrain.options import irl, training
from posttrain.options.bounds import GIVEN, Rule, Rules, Unused, by_name, require_rules
from posttrain.options.collect import CollectOptions, CollectRunOptions, JudgeOptions, RewardJudgeOptions
from posttrain.options.environment import EnvironmentOptions, tool_name
from posttrain.options.model import ModelOptions
from posttrain.options.placement import PlacementOptions
from posttrain.options.reward import GradingOptions, RewardOptions
from posttrain.options.rollout import ENGINE_OPTIONS, EngineOptions, InProcessOptions, RolloutOptions, SamplingOptions
from posttrain.options.sandbox import SandboxOptions
from posttrain.options.task import TASK_OPTIONS, CountdownOptions, TaskOptions
from posttrain.schemas import Option, Schema, did_you_mean, record_class, record_of

if TYPE_CHECKING:
    from posttrain.algorithms.algorithm import Algorithm

CLASSES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "task": ("countdown", TASK_OPTIONS),
    "engine": ("in_process", ENGINE_OPTIONS),
    "world": ("icy_grid", by_name(irl.WorldOptions)),
    "demonstrations": ("sampled", by_name(irl.DemonstrationOptions)),
    "features": ("states", by_name(irl.FeatureOptions)),
    "method": ("causal", by_name(irl.MethodOptions)),
    "judge": ("reward", by_name(JudgeOptions)),
}
"""Sections whose class is chosen by `name`: the default name, and every class by name."""


ORDER = (
    "world demonstrations features method model task rewards environment tools tools_at algorithm demonstrator grading"
    " sandbox engine rollout sampling collect judge update sft reward_model dpo reference evaluation behaviours"
    " checkpoint tracker placement run"
)
"""The order of sections in a written recipe and in `--help`."""
PLAIN: dict[str, Any] = {"tools": tuple[str, ...], "tools_at": Mapping[str, str]}
"""Sections without options, and their content."""


def section_names(kind: type) -> list[str]:
    return sorted((each.name for each in fields(kind)), key=ORDER.split().index)


def section_record(kind: type, section: str, content: object) -> Any:
    """The record class of a section, which may depend on the `name` in it; of `rewards`, a tuple of them.

    A plain section has only a type.
    """
    if section in PLAIN:
        return PLAIN[section]
    if section == "rewards":
        return tuple[record_class(Schema(RewardOptions)), ...]  # type: ignore[misc]
    return record_class(section_schema(kind, section, content))


def variants_of(section: str) -> tuple[str, Mapping[str, Any]]:
    if section == "algorithm":
        from posttrain.algorithms.table import ALGORITHMS

        return "grpo", ALGORITHMS
    return CLASSES.get(section, ("", {}))


def section_schema(kind: type, section: str, content: object) -> Schema:
    """The schema of a section, which may depend on the `name` in it."""
    default, variants = variants_of(section)
    given = content if isinstance(content, Mapping) else {}
    if not variants:
        new, *existing = get_args(get_type_hints(kind)[section]) or [get_type_hints(kind)[section]]
        # Only `model` of a supervised run has two: an existing model has a path.
        return Schema(existing[0] if existing and "path" in given else new)
    if is_own(section, content):
        hint = get_type_hints(kind)[section]
        if not any(get_origin(each) is Mapping for each in (hint, *get_args(hint))):
            says = f"{section}.path = {given['path']}: your own {OWN[section]} is not supported here"
            raise UserError(f"{says}.  Name a file of rows, such as rows.jsonl.")
        return own_schema(section, given["path"])
    name = given.get("name", default)
    if section in OWN and "name" in given and is_name_in_file(given.get("path")):
        raise UserError(f"{section}: name = {name} and path = {given['path']} are both given.  Leave one out.")
    if section == "task" and "path" in given and name in variants and name not in TASKS_OF_ROWS:
        raise UserError(
            f"task.path = {given['path']}: the task {name} reads no file.  For rows leave out task.name, or use"
            f" {' or '.join(TASKS_OF_ROWS)}; for your class use FILE.py:NAME."
        )
    if not isinstance(name, str) or name not in variants:
        raise UserError(f"{section}.name = {name}: no such {section}.  {did_you_mean(name, variants)}")
    return Schema(variants[name], (Option("name", Literal[tuple(variants)], name, f"Which {section} this is."),))


FOR_RL = "`posttrain rl`"


class Sections:
    """The sections of any run, whose class has the rules between them."""

    def __post_init__(self) -> None:
        require_rules(self)


@dataclass(frozen=True, kw_only=True)
class SampledSections(Sections):
    """The sections of runs that sample and score completions."""

    model: ModelOptions = field(default_factory=ModelOptions)
    task: TaskOptions | Mapping[str, object] = field(default_factory=CountdownOptions)
    """Where prompts come from; for your own class, a mapping with its path and options."""
    rewards: tuple[RewardOptions, ...] = ()
    """What scores completions; empty means the task's rewards."""
    environment: EnvironmentOptions = field(default_factory=EnvironmentOptions)
    """What replies to the policy's turns; without an environment or tools, a completion has one turn."""
    tools: tuple[str, ...] = ()
    """Functions that the policy may call: FILE.py:FUNCTION, package.module:FUNCTION, `calculator` or `python`."""
    tools_at: Mapping[str, str] = field(default_factory=dict)
    """For plain text, tool -> text that calls it: `{calculator: "="}` inserts the value of the expression before
    `=`."""
    grading: GradingOptions = field(default_factory=GradingOptions)
    sandbox: SandboxOptions = field(default_factory=SandboxOptions)
    engine: EngineOptions = field(default_factory=InProcessOptions)
    """What samples; for your own class, a mapping with its path and options."""

    rules: ClassVar[Rules] = (
        Unused("tools_at", {"tools": GIVEN}),
        Rule(
            "tools",
            lambda c: not (c.tools and c.environment.is_given),
            "makes an environment, but environment.path or environment.url names another.  Leave one out.",
        ),
        Rule(
            "tools",
            lambda c: len({*map(tool_name, c.tools)}) == len(c.tools),
            "has two tools with the same name.  Rename one.",
        ),
        Rule(
            "tools_at",
            lambda c: {*c.tools_at} <= {*map(tool_name, c.tools)},
            "names a tool that `tools` does not list.  Add it to `tools`, or leave it out.",
        ),
        Rule("tools_at", lambda c: all(c.tools_at.values()), "has an empty text.  Set the text that calls the tool."),
    )

    def __post_init__(self) -> None:
        for name in ("task", "engine"):  # in full, so that the file saved with a run has all that it depends on
            if isinstance(section := getattr(self, name), Mapping):
                object.__setattr__(self, name, full_section(name, section))
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class TrainingSections(Sections):
    """The sections of runs that train a model."""

    optimizer_section: ClassVar[str]
    """The name of the section with the learning rate."""

    checkpoint: training.CheckpointOptions = field(default_factory=training.CheckpointOptions)
    tracker: training.TrackerOptions = field(default_factory=training.TrackerOptions)
    run: training.RunOptions = field(default_factory=training.RunOptions)

    rules: ClassVar[Rules] = (
        Unused("tracker.project tracker.name tracker.offline tracker.completions", {"run.report_to": GIVEN}),
    )

    @property
    def trains_adapter(self) -> bool:
        model = getattr(self, "model", None)
        return isinstance(model, ModelOptions) and model.trains_adapter

    @property
    def optimizer(self) -> training.OptimizerOptions:
        options = getattr(self, self.optimizer_section)
        assert isinstance(options, training.OptimizerOptions)
        return options

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trains_adapter:
            training.require_adapter_decay(self.optimizer, self.optimizer_section)


@dataclass(frozen=True, kw_only=True)
class Config(TrainingSections, SampledSections):
    """Everything that decides a reinforcement-learning run; the same config gives the same run."""

    optimizer_section: ClassVar[str] = "update"

    algorithm: Mapping[str, object] = field(default_factory=lambda: {"name": "grpo"})
    """Name of a function in posttrain/algorithms/table.py, or the path of your own, with its options; all are filled
    in."""
    rollout: RolloutOptions = field(default_factory=RolloutOptions)
    update: training.UpdateOptions = field(default_factory=training.UpdateOptions)
    reference: training.ReferenceOptions = field(default_factory=training.ReferenceOptions)
    evaluation: training.EvaluationOptions = field(default_factory=training.EvaluationOptions)
    behaviours: training.BehaviourOptions = field(default_factory=training.BehaviourOptions)
    placement: PlacementOptions = field(default_factory=PlacementOptions)
    """Processes that `posttrain launch` starts; `posttrain rl` ignores it."""

    rules = (
        Unused("rollout.max_rows", {"engine.name": "in_process"}),
        Rule(
            "update.minibatches_per_epoch",
            lambda c: (c.update.minibatches_per_epoch or 1) <= c.rollout.prompts_per_step,
            "is more than the groups of a step, and groups are never split.  Use at most"
            " rollout.prompts_per_step = {o.rollout.prompts_per_step}.",
        ),
        Rule(
            "run.early_stop_evaluations",
            lambda c: c.run.early_stop_evaluations is None or c.evaluation.every_steps > 0,
            "needs evaluations, but evaluation.every_steps = 0.  Set evaluation.every_steps to at least 1.",
        ),
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "algorithm", full_section("algorithm", self.algorithm))
        super().__post_init__()
        self.require_room(1)

    def require_room(self, longest_prompt_tokens: int) -> None:
        """Reject a token budget that a single row can exceed; the loop checks again once the prompts are known."""
        limit, completion = self.update.tokens_per_microbatch, self.rollout.max_completion_tokens
        row = longest_prompt_tokens + completion
        if limit < row:
            raise UserError(
                f"update.tokens_per_microbatch = {limit} is less than the longest row of this recipe\n"
                f"    (prompt {longest_prompt_tokens} + completion {completion} = {row} tokens).  Use at least {row}."
            )

    def require_suits(self, algorithm: "Algorithm") -> None:
        """Reject options that the algorithm, which may come from Python, cannot use."""
        size, least, name = self.rollout.group_size, algorithm.least_group_size, algorithm.name
        if size < least:
            raise UserError(
                f"rollout.group_size = {size}: {name} compares the completions of a prompt.  Use at least {least}, or"
                " an algorithm that needs only 1: `reinforce` or `ppo`."
            )
        if not algorithm.uses_reference:
            remedy = "Leave it out, or use a KL term, such as algorithm.kl.coefficient = 0.001."
            used_by = f"a reference, and {name} has none"
            require_rules(self, (Unused("reference.path reference.refresh_every", used_by, remedy),))


@dataclass(frozen=True, kw_only=True)
class CollectConfig(SampledSections):
    """Everything that decides which preferences `posttrain collect` gathers."""

    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    collect: CollectOptions = field(default_factory=CollectOptions)
    judge: JudgeOptions = field(default_factory=RewardJudgeOptions)
    """Who decides which of two completions is better."""
    run: CollectRunOptions = field(default_factory=CollectRunOptions)

    rules = (
        Rule(
            "sampling.temperature",
            lambda c: c.sampling.temperature,
            "makes all completions the same.  Use a value above 0.",
        ),
        Unused("grading.max_unscored_steps grading.max_same_reward_steps grading.on_unscored_row", FOR_RL),
        Unused("collect.max_rows", {"engine.name": "in_process"}),
        Rule(
            "judge.name",
            lambda c: c.judge.name != "llm" or (c.judge.endpoint and c.judge.model),
            "needs judge.endpoint, such as http://127.0.0.1:8000/v1, and judge.model.  Give both.",
        ),
        Unused(
            "rewards",
            {"scored": True},
            "judge.name = {o.judge.name} does not ask any judge.  Use collect.pairs = best_worst.",
        ),
    )

    @property
    def scored(self) -> bool:
        """Whether rewards score completions: to judge them, or to choose pairs."""
        return isinstance(self.judge, RewardJudgeOptions) or self.collect.pairs == "best_worst"


@dataclass(frozen=True, kw_only=True)
class IrlConfig(Sections):
    """Everything that decides a run of inverse RL, which finds the reward behind demonstrations."""

    world: irl.WorldOptions = field(default_factory=irl.IcyGridOptions)
    """Where the demonstrator acts; its class depends on the kind of world."""
    demonstrations: irl.DemonstrationOptions = field(default_factory=irl.SampledOptions)
    features: irl.FeatureOptions = field(default_factory=irl.StateFeatures)
    method: irl.MethodOptions = field(default_factory=irl.CausalOptions)
    run: irl.RecoveryOptions = field(default_factory=irl.RecoveryOptions)

    rules = (
        Unused("features.on", {"method.name": "causal"}, "Use features of states."),
        Rule(
            "method.name",
            lambda c: c.method.name != "course" or c.world.name == "icy_grid",
            "needs world.name = icy_grid, whose ends can be left; here it is {o.world.name}.  Use maxent or causal.",
        ),
        Rule(
            "features.name",
            lambda c: c.features.name != "tiles" or c.world.name == "icy_grid",
            "needs world.name = icy_grid; here it is {o.world.name}.  Use states, or a file of yours.",
        ),
        Rule(
            "features.width",
            lambda c: c.features.name != "tiles" or c.features.width <= c.world.size,
            "is wider than the grid.  Use at most world.size = {o.world.size}.",
        ),
        Rule(
            "demonstrations.expert",
            lambda c: getattr(c.demonstrations, "expert", "") != "course" or c.world.name == "icy_grid",
            "needs to know where a step should lead, but world.name = {o.world.name} does not say.  Use soft.",
        ),
    )


def require_one_turn(config: Any, sampling: str) -> None:
    """Reject environment options if nothing replies; a caller in Python may provide what does.

    `sampling` is the section that says how completions are sampled.
    """
    of_environment = " ".join(f"environment.{name}" for name in ("options", "seconds", "workers", "max_failures"))
    of_turns = " ".join(f"{sampling}.{name}" for name in ("max_turns", "multi_turn"))
    require_rules(config, (Unused(f"{of_environment} {of_turns}", "an environment or tools"),))


def full_section(section: str, given: Mapping[str, object]) -> Any:
    """A section that names Python code, with its missing options filled in."""
    return section_of(section, record_of(section_record(Config, section, given), given, where=section))


def section_of(name: str, record: Any) -> Any:
    """A section of a config: an object of its class, which checks its rules, or a mapping."""
    if name in PLAIN:
        return record
    if name == "rewards":
        return tuple(constructed(each, "rewards: ") for each in record)
    if name == "algorithm" or type(record).schema.is_own:
        call_arguments(record, where=name)
        return plain(asdict(record))
    return constructed(record, f"{name}.")


def plain(value: Any) -> Any:
    """A value as YAML can hold it."""
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
