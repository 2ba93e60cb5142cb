"""Options of the training loops: one class per section of a recipe."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal, TypeVar

from annotated_types import Ge, Gt, Lt

from posttrain.errors import UserError
from posttrain.options.bounds import (
    Bounded,
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rule,
    Unused,
)

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


@dataclass(frozen=True, kw_only=True)
class TrackerOptions(Bounded):
    """A run's name in the trackers of `run.report_to`, and how much they get."""

    project: NonEmptyStr = "posttrain"
    """Project of W&B and Trackio, experiment of MLflow."""
    name: str = ""
    """Name of the run there; empty is the last part of run.folder."""
    offline: bool = False
    """Keep everything on this machine, whatever the environment says: W&B in files to sync later, MLflow in mlflow.db
    next to the run folder.  TensorBoard and Trackio are always local."""
    completions: NonNegativeInt = 0
    """The first completions of each step to show, with reward and advantage; rollouts/ has all of them."""


RATE_OF_ADAPTERS = 10
"""The best rate of an adapter as a multiple of that of the whole model, whatever the rank (Schulman & Thinking Machines
2025, "LoRA without regret")."""


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(Bounded):
    """AdamW and its learning rate over time."""

    default_rate: ClassVar[float] = 1e-6
    """The learning rate where none is given and a whole model is trained."""

    learning_rate: PositiveFloat | None = None
    """Largest learning rate; null is 1e-6, for full training of a billion parameters, and ten times that with an
    adapter (`model.adapter`).  1e-4 suits the bundled model."""
    warmup_steps: NonNegativeInt = 0
    """Updates over which the learning rate rises linearly to its largest value; 0 starts there."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay, or fall to 0 at the last step."""
    weight_decay: NonNegativeFloat = 0.0
    """Share of each weight to remove per update, times the learning rate; 0 is off."""
    decay_adapter: bool = False
    """Allow weight decay of an adapter, which pulls the policy back to its base model."""
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Decay of AdamW's mean of gradients, per update."""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.999
    """Decay of AdamW's mean of squared gradients, per update."""
    max_grad_norm: Annotated[float, Gt(0)] = 1.0
    """Scale down gradients with a larger Euclidean norm; .inf never does."""

    @property
    def largest_rate(self) -> float:
        """The learning rate that is used, or at first that of a schedule; of a whole model where none is `rated`."""
        return self.default_rate if self.learning_rate is None else self.learning_rate


Optimizer = TypeVar("Optimizer", bound=OptimizerOptions)


def require_adapter_decay(options: OptimizerOptions, section: str) -> None:
    """Refuse weight decay of an adapter unless it is allowed."""
    if options.weight_decay and not options.decay_adapter:
        raise UserError(
            f"{section}.weight_decay = {options.weight_decay:g} of an adapter (model.adapter) pulls the policy back to"
            f" its base.  Leave it out, or allow it: {section}.decay_adapter = true."
        )


def rated(options: Optimizer, *, adapter: bool) -> Optimizer:
    """The options with a learning rate: what was given, or else what suits an adapter or a whole model."""
    if options.learning_rate is not None:
        return options
    rate = options.default_rate * RATE_OF_ADAPTERS if adapter else options.default_rate
    return replace(options, learning_rate=float(f"{rate:.6g}"))  # 1e-05, and not 9.999999999999999e-06


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Passes over the rollouts of a step, and updates in each."""

    epochs: int = 1
    minibatches: int = 1

    @property
    def updates(self) -> int:
        return self.epochs * self.minibatches


ONE_PASS = Passes()
"""The default of most algorithms: every rollout once, in one update."""


@dataclass(frozen=True, kw_only=True)
class UpdateOptions(OptimizerOptions):
    """How the rollouts of one step become optimiser updates."""

    tokens_per_microbatch: Annotated[int, Ge(2)] = 16384
    """Tokens, prompts included, in the model at a time: bounds memory, never changes the gradient."""
    epochs_per_step: PositiveInt | None = None
    """Passes over the rollouts of a step; null is the algorithm's default, 2 for ppo and else 1."""
    measure_entropy: bool = False
    """Report the policy's entropy at the sampled positions, at the cost of another pass over the output layer."""
    minibatches_per_epoch: PositiveInt | None = None
    """Updates in each pass, each on whole groups; with more than one the ratios to μ leave 1.  Null is the algorithm's
    default, 4 for ppo and else 1."""
    optimizer_from: str = ""
    """A run whose optimiser state, moments and counters of its last checkpoint, the first update uses; decay and rates
    are this recipe's.  Only a critic that both runs train keeps its state.  Empty starts with a new optimiser."""

    def passes(self, usual: Passes) -> Passes:
        return Passes(
            epochs=usual.epochs if self.epochs_per_step is None else self.epochs_per_step,
            minibatches=usual.minibatches if self.minibatches_per_epoch is None else self.minibatches_per_epoch,
        )


@dataclass(frozen=True, kw_only=True)
class ReferenceOptions(Bounded):
    """The frozen policy of a KL term; without a KL term there is none."""

    path: str = ""
    """Folder, run or hub name of another model, such as the first model of an earlier phase; empty is the model that
    training starts from."""
    refresh_every: NonNegativeInt = 0
    """Copy the policy into the reference after each of this many steps; 0 never does."""

    rules = (Unused("refresh_every", {"path": ""}, "Leave one of them out."),)


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(Bounded):
    """Held-out evaluation: full before and after training, brief in between."""

    every_steps: NonNegativeInt = 10
    """Steps between brief evaluations; 0 leaves only the two full ones."""
    samples: PositiveInt = 8
    """Completions per held-out problem, at temperature 1, of a full evaluation; pass@k needs at least k."""
    brief_problems: PositiveInt = 128
    """The first held-out problems, each sampled once, of a brief evaluation."""
    sampling_probes: bool = True
    """In full evaluations run the task's probes that sample another completion for each held-out problem; Countdown's
    samples to the token limit.  Other probes always run."""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Bounded):
    """Which checkpoints are saved and kept."""

    every_steps: NonNegativeInt = 20
    """Steps between checkpoints; 0 saves only at the end and when the run is interrupted."""
    keep_last: PositiveInt = 2
    """Newest checkpoints kept; older ones are deleted."""
    keep_best: bool = True
    """Also keep the checkpoint with the best held-out accuracy, or of a supervised run the lowest loss."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(Bounded):
    """Where a run is kept, how long it is, and the seed of all its random numbers."""

    folder: NonEmptyStr = "runs/untitled"
    """Everything the run writes goes here; an existing run is never overwritten unless `overwrite` is set."""
    overwrite: bool = False
    """Delete the run in `folder` and start again."""
    seed: NonNegativeInt = 0
    """Decides prompts, sampling and initial weights."""
    num_steps: NonNegativeInt = 100
    """All steps of the run."""
    time_limit_minutes: PositiveFloat | None = None
    """End the run, as after its last step, once it has taken this long, including the time before a resume; null
    means no limit."""
    token_limit: PositiveInt | None = None
    """End the run, as after its last step, after sampling this many completion tokens, including groups that dynamic
    sampling drops; null means no limit."""
    early_stop_evaluations: PositiveInt | None = None
    """Stop after this many evaluations in a row without a new best; null never stops."""
    threads: NonNegativeInt = 0
    """CPU threads; 0: torch decides.  A resumed run needs the same number to give the same bits."""
    rank_timeout_seconds: PositiveFloat = 600.0
    """With several ranks: how long one waits for another before the run ends with an error.  A rank that has died is
    noticed at once."""
    report_to: tuple[TrackerName, ...] = ()
    """Trackers that also get what metrics.jsonl has: tensorboard, wandb, mlflow, trackio (extra `track`, or one
    package).  The section `tracker` has their options."""
    curves: bool = True
    """Draw curves.png at the end, in one to two seconds."""
    keep_token_columns: bool = False
    """For `posttrain rl`: write what each update computes for each token (log π, ratio, clipped, values, …) to
    `token_columns/`.  It changes no number; docs/run_folder.md gives sizes."""

    rules = (Rule("report_to", lambda o: len({*o.report_to}) == len(o.report_to), "names one twice.  Name each once."),)


@dataclass(frozen=True, kw_only=True)
class SftOptions(OptimizerOptions):
    """Supervised training on your rows, or on demonstrations of a task."""

    section: ClassVar[str] = "sft"
    default_rate: ClassVar[float] = 1e-5

    learning_rate: PositiveFloat | None = None
    """Largest learning rate; null is 1e-5, for full training of a billion parameters, and ten times that with an
    adapter (`model.adapter`).  2e-3 suits a new model."""
    loss_on: Literal["assistant", "completion", "all"] = "assistant"
    """Of rows: the learned tokens, stop tokens included.  `assistant`: the completion of a prompt, or all turns of the
    assistant in `messages`; `completion`: only the last turn; `all`: all tokens, as always for plain text."""
    split_turns: bool = False
    """Of rows: make a row of each turn of the assistant, with all that comes before; for chat templates that rewrite
    earlier turns, for example without their thoughts."""
    max_length: Annotated[int, Ge(2)] | None = None
    """Longest row in tokens, prompt included; null is the model's context, which is the limit."""
    long_rows: Literal["error", "skip", "cut"] = "error"
    """What to do with longer rows: stop with an error, skip them, or cut their ends, stop token included."""
    num_epochs: PositiveFloat | None = None
    """Passes over all rows, each in another order; null: `run.num_steps` decides."""
    rows_per_batch: NonNegativeInt = 0
    """Most rows of one update, all different; 0: `tokens_per_batch` decides."""
    num_demonstrations: NonNegativeInt = 0
    """Demonstrations to repeat; 0 writes new ones for every batch."""
    tokens_per_batch: Annotated[int, Ge(2)] = 16384
    """Tokens, prompts included, in the batch of one update."""
    tokens_per_microbatch: Annotated[int, Ge(2)] = 4096
    """Tokens in the model at a time: bounds memory, never changes the gradient.  Small ones fit a CPU's cache."""
    eval_every: PositiveInt = 100
    """Updates between measurements of the held-out loss."""
    measure_entropy: bool = False
    """Report `entropy` and `mean_token_accuracy` of the learned tokens, at the cost of another output-layer pass."""
    eval_size: PositiveInt = 512
    """Held-out demonstrations; for rows use task.held_out_size."""

    rules = (Unused("split_turns", {"loss_on": "assistant"}, "Use one of them."),)


Within = Literal["completion", "thinking"]
"""Which part of a completion is read."""


@dataclass(frozen=True, kw_only=True)
class PatternOptions(Bounded):
    """A behaviour that the recipe defines by patterns."""

    any: tuple[str, ...]
    """Regular expressions; each match is a sign.  Case is ignored."""
    at_least: PositiveInt = 1
    """Signs that a completion needs to show the behaviour."""
    within: Within = "completion"
    """`completion`: all of it.  `thinking`: the part before `</think>`."""
    says: str = ""
    """Description where numbers are shown; empty uses the name."""

    rules = (Rule("any", lambda o: o.any, "must have at least one pattern.  Give one."),)


@dataclass(frozen=True, kw_only=True)
class BehaviourOptions(Bounded):
    """Which signs of verification, backtracking, several attempts and the like are counted in completions."""

    measure: tuple[str, ...] = ()
    """Rows of the table of behaviours, by name or by kind: `prose` for words, `search` for the bundled model's
    notation.  Empty measures only `patterns` and `file`."""
    patterns: Mapping[str, object] = field(default_factory=dict)
    """More behaviours: a name to `{any: [regular expressions], at_least: 1, within: completion, says: ""}`."""
    file: str = ""
    """A YAML file with more entries, written like `patterns`."""

    rules = (
        Rule("measure", lambda o: len({*o.measure}) == len(o.measure), "must not have duplicates.  Name each once."),
    )
