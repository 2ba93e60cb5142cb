"""What the training loops can be told: one class per section of a recipe."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeVar

from posttrain.errors import UserError, require
from posttrain.options.tracker import TrackerName

RATE_OF_ADAPTERS = 10
"""The best rate of an adapter as a multiple of that of the whole model, whatever the rank (Schulman & Thinking Machines
2025, "LoRA without regret")."""


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """AdamW and its learning rate over time."""

    default_rate: ClassVar[float] = 1e-6
    """The learning rate where none is given and a whole model is trained."""

    learning_rate: float | None = None
    """Largest learning rate; null is 1e-6, which suits full training of models of a billion parameters, and with an
    adapter (`model.adapter`) ten times that.  1e-4 suits the bundled model."""
    warmup_steps: int = 0
    """Optimiser updates over which the learning rate rises linearly to its largest value; 0 starts there."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay, or fall to zero at the last step."""
    weight_decay: float = 0.0
    """Share of each weight taken off per update, times the learning rate; 0 is off."""
    decay_adapter: bool = False
    """Allows weight decay where an adapter is trained.  It pulls the adapter to zero, and so the policy to its base."""
    beta1: float = 0.9
    """Decay of AdamW's mean of gradients, per update."""
    beta2: float = 0.999
    """Decay of AdamW's mean of squared gradients, per update."""
    max_grad_norm: float = 1.0
    """Gradients with a larger Euclidean norm are scaled down to it; .inf never does."""

    def __post_init__(self) -> None:
        require(0 < self.largest_rate < math.inf, self, "learning_rate", "cannot teach; use a finite number > 0")
        require(self.warmup_steps >= 0, self, "warmup_steps", "is negative; use >= 0")
        require(self.weight_decay >= 0, self, "weight_decay", "is negative; use >= 0")
        require(0 <= self.beta1 < 1, self, "beta1", "is no decay; use 0 <= beta1 < 1")
        require(0 <= self.beta2 < 1, self, "beta2", "is no decay; use 0 <= beta2 < 1")
        require(self.max_grad_norm > 0, self, "max_grad_norm", "leaves no gradient; use > 0 (.inf: no clipping)")

    @property
    def largest_rate(self) -> float:
        """The learning rate that is used, or at first that of a schedule; of a whole model where none is `rated`."""
        return self.default_rate if self.learning_rate is None else self.learning_rate


Optimizer = TypeVar("Optimizer", bound=OptimizerOptions)


def require_adapter_decay(options: OptimizerOptions, where: str) -> None:
    """Refuse weight decay of an adapter unless it is allowed; `where` is the options' section."""
    if options.weight_decay and not options.decay_adapter:
        raise UserError(
            f"{where}.weight_decay = {options.weight_decay:g}, and an adapter (model.adapter) is not decayed: that"
            f" would pull the policy back to its base.  Leave it out, or allow it: {where}.decay_adapter = true."
        )


def rated(options: Optimizer, *, adapter: bool) -> Optimizer:
    """The options with a learning rate: what was given, or else what suits an adapter or a whole model."""
    if options.learning_rate is not None:
        return options
    rate = options.default_rate * RATE_OF_ADAPTERS if adapter else options.default_rate
    return replace(options, learning_rate=float(f"{rate:.6g}"))  # 1e-05, and not 9.999999999999999e-06


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """How often the rollouts of a step are gone through, and in how many optimiser updates each time."""

    epochs: int = 1
    minibatches: int = 1

    @property
    def updates(self) -> int:
        """Optimiser updates of a step."""
        return self.epochs * self.minibatches


ONE_PASS = Passes()
"""Every rollout once, in one update: what most algorithms leave it at."""


@dataclass(frozen=True, kw_only=True)
class UpdateOptions(OptimizerOptions):
    """How the rollouts of one step become optimiser updates."""

    tokens_per_microbatch: int = 16384
    """Tokens, prompts included, that go through the model at once: bounds memory, never changes the gradient."""
    epochs_per_step: int | None = None
    """Times that the rollouts of a step are gone through; null is what the algorithm has, 2 for ppo and else 1."""
    measure_entropy: bool = False
    """Report the policy's entropy at the sampled positions; costs another pass over the output layer."""
    minibatches_per_epoch: int | None = None
    """Optimiser updates in each pass, each on whole groups; more than one makes the ratios to μ leave 1.  Null is what
    the algorithm has, 4 for ppo and else 1."""
    optimizer_from: str = ""
    """A run whose optimiser the first update goes on with, moments and counters as its last checkpoint has them;
    decay and rates are this recipe's.  A critic that this run alone trains begins anew, one of the other run's stays
    behind.  Empty begins with a new one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.tokens_per_microbatch >= 2, self, "tokens_per_microbatch", "holds no row; use >= 2")
        epochs, parts = self.epochs_per_step, self.minibatches_per_epoch
        require(epochs is None or epochs >= 1, self, "epochs_per_step", "never updates; use >= 1, or null")
        require(parts is None or parts >= 1, self, "minibatches_per_epoch", "never updates; use >= 1, or null")

    def passes(self, usual: Passes) -> Passes:
        """What is asked for, and else what is usual for the algorithm."""
        return Passes(
            epochs=usual.epochs if self.epochs_per_step is None else self.epochs_per_step,
            minibatches=usual.minibatches if self.minibatches_per_epoch is None else self.minibatches_per_epoch,
        )


@dataclass(frozen=True, kw_only=True)
class ReferenceOptions:
    """The frozen policy that a KL term compares with; without a KL term there is none."""

    path: str = ""
    """Folder, run or hub name of another model to compare with, such as the one that an earlier phase began with; empty
    is the model that training starts from."""
    refresh_every: int = 0
    """Steps after which the reference is taken from the policy again; 0 keeps the model that training started from."""

    def __post_init__(self) -> None:
        require(self.refresh_every >= 0, self, "refresh_every", "is negative; use >= 1, or 0 for never")
        if self.path and self.refresh_every:
            raise UserError(
                f"refresh_every = {self.refresh_every} takes the reference from the policy, and path = {self.path} from"
                " another model.  Leave one out."
            )


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Held-out evaluation: in full before and after, in brief in between."""

    every_steps: int = 10
    """Steps between evaluations in brief; 0 leaves only the two full ones."""
    samples: int = 8
    """Completions per held-out problem at temperature 1 in the full evaluations; pass@k needs at least k."""
    brief_problems: int = 128
    """Held-out problems, the first ones, of an evaluation in brief, each sampled once."""
    sampling_probes: bool = True
    """Run the task's probes that sample completions of their own, one more for each held-out problem, in the full
    evaluations; Countdown's goes to the token limit.  Probes that read what is there always run."""

    def __post_init__(self) -> None:
        require(self.every_steps >= 0, self, "every_steps", "is negative; use >= 1, or 0 for never")
        require(self.samples >= 1, self, "samples", "measures nothing; use >= 1")
        require(self.brief_problems >= 1, self, "brief_problems", "measures nothing; use >= 1")


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """What is kept to continue from, or to go back to."""

    every_steps: int = 20
    """Steps between checkpoints; 0 saves only at the end and when the run is interrupted."""
    keep_last: int = 2
    """Newest checkpoints kept; older ones are deleted."""
    keep_best: bool = True
    """Keep the checkpoint with the best held-out accuracy (of a supervised run: the lowest loss) as well."""

    def __post_init__(self) -> None:
        require(self.every_steps >= 0, self, "every_steps", "is negative; use >= 1, or 0 for the end only")
        require(self.keep_last >= 1, self, "keep_last", "leaves nothing to resume from; use >= 1")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where a run is kept, how long it goes on, and the seed that all its randomness is a function of."""

    folder: str = "runs/untitled"
    """Everything the run writes goes here; a folder that holds a run already is never written into untold."""
    overwrite: bool = False
    """Delete the run that `folder` holds, and start anew."""
    seed: int = 0
    """Prompts, sampling and initial weights are functions of it."""
    num_steps: int = 100
    """Steps in all."""
    time_limit_minutes: float | None = None
    """Stop, as at the last step, once the run has taken this long, what it took before it was resumed included; null is
    no limit."""
    token_limit: int | None = None
    """Stop, as at the last step, once so many completion tokens have been sampled to train on, those of groups that
    dynamic sampling set aside included; null is no limit."""
    early_stop_evaluations: int | None = None
    """Stop after this many evaluations in a row without a new best; null goes on."""
    threads: int = 0
    """CPU threads; 0 leaves the number to torch.  A resumed run needs the same number to give the same bits."""
    report_to: tuple[TrackerName, ...] = ()
    """Trackers that are told what metrics.jsonl says, beside it: tensorboard, wandb, mlflow, trackio (extra `track`, or
    the one package); the section `tracker` says how."""
    curves: bool = True
    """Draws curves.png at the end, which takes one to two seconds."""

    def __post_init__(self) -> None:
        require(self.folder != "", self, "folder", "names no folder; give one, such as runs/first")
        require(self.seed >= 0, self, "seed", "is negative; use >= 0")
        require(self.num_steps >= 0, self, "num_steps", "is negative; use >= 0")
        limit, patience = self.time_limit_minutes, self.early_stop_evaluations
        require(limit is None or limit > 0, self, "time_limit_minutes", "leaves no time; use > 0, or null for no limit")
        tokens = self.token_limit
        require(tokens is None or tokens >= 1, self, "token_limit", "never trains; use >= 1, or null for no limit")
        require(patience is None or patience >= 1, self, "early_stop_evaluations", "never trains; use >= 1, or null")
        require(len(set(self.report_to)) == len(self.report_to), self, "report_to", "names one twice; name each once")
        require(self.threads >= 0, self, "threads", "is negative; use >= 1, or 0 for torch's choice")


@dataclass(frozen=True, kw_only=True)
class SftOptions(OptimizerOptions):
    """Supervised training on rows of your own, or on demonstrations of a task."""

    default_rate: ClassVar[float] = 1e-5

    learning_rate: float | None = None
    """Largest learning rate; null is 1e-5, which suits full training of models of a billion parameters, and with an
    adapter (`model.adapter`) ten times that.  2e-3 suits a model that is new."""
    loss_on: Literal["assistant", "completion", "all"] = "assistant"
    """Of rows: what is learned, each turn with its stop token.  `assistant`: the completion of a prompt, or every turn
    of the assistant in `messages`; `completion`: its last turn alone; `all`: every token, prompts too.  Of plain text
    it is always every token."""
    split_turns: bool = False
    """Of rows: make a row of each turn of the assistant, with what leads to it; for chat templates that rewrite earlier
    turns, such as those that drop their thoughts."""
    max_length: int | None = None
    """Longest row in tokens, prompt included, and never more than the model's context, which null stands for."""
    long_rows: Literal["error", "skip", "cut"] = "error"
    """What becomes of longer rows: tell and stop, leave them out, or cut their ends off, stop token included."""
    num_epochs: float | None = None
    """Times that all rows are gone through, each time in another order, in place of `run.num_steps`; null goes by
    that."""
    rows_per_batch: int = 0
    """Most rows of one optimiser update; 0 leaves it to `tokens_per_batch`.  No update has a row twice."""
    num_demonstrations: int = 0
    """Demonstrations that are gone through again and again; 0 writes fresh ones for every batch, without end."""
    tokens_per_batch: int = 16384
    """Tokens, prompts included, with which the batch of one optimiser update is full."""
    tokens_per_microbatch: int = 4096
    """Tokens that go through the model at once: bounds memory, never changes the gradient.  Small ones stay in a CPU's
    cache."""
    eval_every: int = 100
    """Updates between measurements of the held-out loss."""
    measure_entropy: bool = False
    """Report `entropy` and `mean_token_accuracy` of the learned tokens; costs another pass over the output layer."""
    eval_size: int = 512
    """Held-out demonstrations that the loss is measured on; of rows task.held_out_size says how many."""

    def __post_init__(self) -> None:
        super().__post_init__()
        longest, epochs = self.max_length, self.num_epochs
        require(longest is None or longest >= 2, self, "max_length", "leaves nothing to learn; use >= 2, or null")
        require(epochs is None or 0 < epochs < math.inf, self, "num_epochs", "never trains; use > 0, or null")
        require(self.rows_per_batch >= 0, self, "rows_per_batch", "is negative; use >= 1, or 0 for no limit")
        require(self.num_demonstrations >= 0, self, "num_demonstrations", "is negative; use >= 1, or 0 for no end")
        require(self.tokens_per_batch >= 2, self, "tokens_per_batch", "holds no demonstration; use >= 2")
        require(self.tokens_per_microbatch >= 2, self, "tokens_per_microbatch", "holds no row; use >= 2")
        require(self.eval_every >= 1, self, "eval_every", "never measures; use >= 1")
        require(self.eval_size >= 1, self, "eval_size", "measures nothing; use >= 1")
        if self.split_turns and self.loss_on != "assistant":
            raise UserError(
                f"split_turns = true makes rows of all turns of the assistant, and loss_on = {self.loss_on} learns"
                " something else.  Use one of them."
            )

    def given(self, *names: str) -> list[str]:
        """Those of some options that have another value than by default."""
        return [name for name in names if getattr(self, name) != getattr(SftOptions(), name)]
