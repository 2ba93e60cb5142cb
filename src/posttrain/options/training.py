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
    """A run's name in the trackers of `run.report_to`, and how much is sent to them."""

    project: NonEmptyStr = "posttrain"
    """Project of W&B and Trackio, experiment of MLflow."""
    name: str = ""
    """Name of the run in the trackers; empty: the last part of run.folder."""
    offline: bool = False
    """Keep everything on this machine, whatever the environment says: W&B in files to sync later, MLflow in mlflow.db
    next to the run folder.  TensorBoard and Trackio are always local."""
    completions: NonNegativeInt = 0
    """Number of completions of each step to send, with reward and advantage; rollouts/ has all of them."""


RATE_OF_ADAPTERS = 10
"""The best learning rate of an adapter as a multiple of the full model's, for every rank (Schulman & Thinking Machines
2025, "LoRA without regret")."""


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(Bounded):
    """AdamW and its learning rate schedule."""

    default_rate: ClassVar[float] = 1e-6
    """The default learning rate for training a whole model."""

    learning_rate: PositiveFloat | None = None
    """Peak learning rate; null: 1e-6, which suits full training of a billion parameters, and ten times that with an
    adapter (`model.adapter`).  1e-4 suits the bundled model."""
    warmup_steps: NonNegativeInt = 0
    """Updates over which the learning rate rises linearly to its peak; 0: no warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay constant, or decay to 0 at the last step."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of AdamW: each update shrinks a weight by this fraction times the learning rate; 0 turns it off."""
    decay_adapter: bool = False
    """Allow weight decay of an adapter, which pulls the policy back to its base model."""
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Decay of AdamW's mean of gradients, per update."""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.999
    """Decay of AdamW's mean of squared gradients, per update."""
    max_grad_norm: Annotated[float, Gt(0)] = 1.0
    """Scale down gradients with a larger Euclidean norm; .inf: never."""

    @property
    def largest_rate(self) -> float:
        """The peak learning rate; the default of a whole model if no rate is set yet (see `rated`)."""
        return self.default_rate if self.learning_rate is None else self.learning_rate


Optimizer = TypeVar("Optimizer", bound=OptimizerOptions)


def require_adapter_decay(options: OptimizerOptions, section: str) -> None:
    """Reject weight decay of an adapter unless it is allowed."""
    if options.weight_decay and not options.decay_adapter:
        raise UserError(
            f"{section}.weight_decay = {options.weight_decay:g} of an adapter (model.adapter) pulls the policy back to"
            f" its base.  Leave it out, or allow it: {section}.decay_adapter = true."
        )


def rated(options: Optimizer, *, adapter: bool) -> Optimizer:
    """The options with a learning rate: the given one, or the default of an adapter or a whole model."""
    if options.learning_rate is not None:
        return options
    rate = options.default_rate * RATE_OF_ADAPTERS if adapter else options.default_rate
    return replace(options, learning_rate=float(f"{rate:.6g}"))  # 1e-05, and not 9.999999999999999e-06


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Passes over the rollouts of a step, and updates per pass."""

    epochs: int = 1
    minibatches: int = 1

    @property
    def updates(self) -> int:
        return self.epochs * self.minibatches


ONE_PASS = Passes()
"""The default of most algorithms: one update on all rollouts."""


@dataclass(frozen=True, kw_only=True)
class UpdateOptions(OptimizerOptions):
    """How the rollouts of one step turn into optimiser updates."""

    tokens_per_microbatch: Annotated[int, Ge(2)] = 16384
    """Tokens, prompts included, in the model at a time: limits memory, never changes the gradient."""
    epochs_per_step: PositiveInt | None = None
    """Passes over the rollouts of a step; null: the algorithm's default (ppo: 2, others: 1)."""
    measure_entropy: bool = False
    """Report the policy's entropy at the sampled positions, at the cost of another pass over the output layer."""
    minibatches_per_epoch: PositiveInt | None = None
    """Updates per pass, each on whole groups; with more than one, the ratios to μ differ from 1.  Null: the algorithm's
    default (ppo: 4, others: 1)."""
    optimizer_from: str = ""
    """A run to take the optimiser state from: moments and counters of its last checkpoint.  Weight decay and learning
    rates are this recipe's.  A critic's state is only kept if both runs train a critic.  Empty: a new optimiser."""

    def passes(self, usual: Passes) -> Passes:
        return Passes(
            epochs=usual.epochs if self.epochs_per_step is None else self.epochs_per_step,
            minibatches=usual.minibatches if self.minibatches_per_epoch is None else self.minibatches_per_epoch,
        )


@dataclass(frozen=True, kw_only=True)
class ReferenceOptions(Bounded):
    """The frozen policy of a KL term; without a KL term, no reference is kept."""

    path: str = ""
    """Folder, run or hub name of another model, such as the first model of an earlier phase; empty: the model that
    training starts from."""
    refresh_every: NonNegativeInt = 0
    """Copy the policy into the reference every this many steps; 0: never."""

    rules = (Unused("refresh_every", {"path": ""}, "Leave one of them out."),)


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(Bounded):
    """Held-out evaluation: full before and after training, brief in between."""

    every_steps: NonNegativeInt = 10
    """Steps between brief evaluations; 0: only the two full ones."""
    samples: PositiveInt = 4
    """Completions per held-out problem in a full evaluation, at temperature 1."""
    pass_at_8_problems: NonNegativeInt = 128
    """Number of held-out problems (the first ones) with 8 completions, for pass@8.  The rest of the 8 are sampled in
    addition if `samples` is less; 0: none are, and there is no pass@8 then."""
    brief_problems: PositiveInt = 128
    """Number of held-out problems in a brief evaluation (the first ones), each sampled once."""
    sampling_probes: bool = True
    """In full evaluations, also run the task's probes that sample completions of their own (Countdown's samples to the
    token limit).  Other probes always run."""
    probe_problems: PositiveInt = 128
    """Number of held-out problems (the first ones) that such a probe samples, once each."""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Bounded):
    """Which checkpoints are saved and kept."""

    every_steps: NonNegativeInt = 20
    """Steps between checkpoints; 0 saves only at the end and when the run is interrupted."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep; older ones are deleted."""
    keep_best: bool = True
    """Also keep the checkpoint with the best held-out accuracy, or, in a supervised run, the lowest loss."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(Bounded):
    """Where a run is saved, how long it is, and the seed of all its random numbers."""

    folder: NonEmptyStr = "runs/untitled"
    """Everything the run writes goes here; an existing run is never overwritten unless `overwrite` is set."""
    overwrite: bool = False
    """Delete the run in `folder` and start again."""
    seed: NonNegativeInt = 0
    """Seed of prompts, sampling and initial weights."""
    num_steps: NonNegativeInt = 100
    """Number of steps of the run."""
    time_limit_minutes: PositiveFloat | None = None
    """End the run, as after its last step, once it has taken this long, including time before a resume; null: no
    limit."""
    token_limit: PositiveInt | None = None
    """End the run, as after its last step, after sampling this many completion tokens, including groups that dynamic
    sampling drops; null: no limit."""
    early_stop_evaluations: PositiveInt | None = None
    """Stop after this many evaluations in a row without a new best; null: never."""
    threads: NonNegativeInt = 0
    """CPU threads; 0: torch decides.  A resumed run needs the same number to give the same bits."""
    rank_timeout_seconds: PositiveFloat = 600.0
    """With several ranks: how long one waits for another before the run ends with an error.  If a rank dies, the others
    notice immediately."""
    report_to: tuple[TrackerName, ...] = ()
    """Trackers that also receive the metrics: tensorboard, wandb, mlflow, trackio (extra `track`, or one package).  The
    section `tracker` has their options."""
    curves: bool = True
    """Draw curves.png at the end; it takes one to two seconds."""
    keep_token_columns: bool = False
    """For `posttrain rl`: write what each update computes for each token (log π, ratio, clipped, values, …) to
    `token_columns/`, and log π after the last update, which takes one more scoring pass a step.  It does not change the
    run; docs/run_folder.md gives sizes."""

    rules = (Rule("report_to", lambda o: len({*o.report_to}) == len(o.report_to), "names one twice.  Name each once."),)


@dataclass(frozen=True, kw_only=True)
class SftOptions(OptimizerOptions):
    """Supervised training on your rows, or on demonstrations of a task."""

    section: ClassVar[str] = "sft"
    default_rate: ClassVar[float] = 1e-5

    learning_rate: PositiveFloat | None = None
    """Peak learning rate; null: 1e-5, which suits full training of a billion parameters, and ten times that with an
    adapter (`model.adapter`).  2e-3 suits a new model."""
    loss_on: Literal["assistant", "completion", "all"] = "assistant"
    """For rows: which tokens are learned, stop tokens included.  `assistant`: the completion of a prompt, or all
    assistant turns in `messages`; `completion`: only the last turn; `all`: all tokens, as always for plain text."""
    split_turns: bool = False
    """For rows: make a separate row of each assistant turn, with everything before it.  For chat templates that rewrite
    earlier turns, for example by removing their thoughts."""
    max_length: Annotated[int, Ge(2)] | None = None
    """Maximum tokens of a row, prompt included; null: the model's context, which is the upper limit."""
    long_rows: Literal["error", "skip", "cut"] = "error"
    """What to do with longer rows: stop with an error, skip them, or cut their ends, stop token included."""
    num_epochs: PositiveFloat | None = None
    """Passes over all rows, shuffled again in each; null: `run.num_steps` decides."""
    rows_per_batch: NonNegativeInt = 0
    """Maximum rows of one update, all different; 0: `tokens_per_batch` decides."""
    num_demonstrations: NonNegativeInt = 0
    """Number of demonstrations, repeated in turn; 0: new ones for every batch."""
    tokens_per_batch: Annotated[int, Ge(2)] = 16384
    """Tokens, prompts included, in the batch of one update."""
    tokens_per_microbatch: Annotated[int, Ge(2)] = 4096
    """Tokens in the model at a time: limits memory, never changes the gradient.  Small batches fit a CPU's cache."""
    eval_every: PositiveInt = 100
    """Updates between measurements of the held-out loss."""
    measure_entropy: bool = False
    """Report `entropy` and `mean_token_accuracy` of the learned tokens, at the cost of another output-layer pass."""
    eval_size: PositiveInt = 512
    """Number of held-out demonstrations; for rows use task.held_out_size."""

    rules = (Unused("split_turns", {"loss_on": "assistant"}, "Use one of them."),)


Within = Literal["completion", "thinking"]
"""Which part of a completion is searched."""


@dataclass(frozen=True, kw_only=True)
class PatternOptions(Bounded):
    """A behaviour that the recipe defines with patterns."""

    any: tuple[str, ...]
    """Regular expressions; each match is a sign.  Case is ignored."""
    at_least: PositiveInt = 1
    """Signs that a completion needs to count as showing the behaviour."""
    within: Within = "completion"
    """`completion`: all of it.  `thinking`: the part before `</think>`."""
    says: str = ""
    """Description where numbers are shown; empty uses the name."""

    rules = (Rule("any", lambda o: o.any, "is empty.  Add at least one pattern."),)


@dataclass(frozen=True, kw_only=True)
class BehaviourOptions(Bounded):
    """Which signs of verification, backtracking, repeated attempts and so on are counted in completions."""

    measure: tuple[str, ...] = ()
    """Rows of the table of behaviours, by name or by kind: `prose` for words, `search` for the bundled model's
    notation.  Empty measures only `patterns` and `file`."""
    patterns: Mapping[str, object] = field(default_factory=dict)
    """More behaviours: a name to `{any: [regular expressions], at_least: 1, within: completion, says: ""}`."""
    file: str = ""
    """A YAML file with more entries, written like `patterns`."""

    rules = (Rule("measure", lambda o: len({*o.measure}) == len(o.measure), "contains duplicates.  Name each once."),)
