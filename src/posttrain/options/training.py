"""What the training loops can be told: one class per section of a recipe."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, TypeVar

from annotated_types import Ge, Gt, Lt

from posttrain.errors import UserError, require
from posttrain.options.bounds import Bounded, NonEmptyStr, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from posttrain.options.tracker import TrackerName

RATE_OF_ADAPTERS = 10
"""The best rate of an adapter as a multiple of that of the whole model, whatever the rank (Schulman & Thinking Machines
2025, "LoRA without regret")."""


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(Bounded):
    """AdamW and its learning rate over time."""

    default_rate: ClassVar[float] = 1e-6
    """The learning rate where none is given and a whole model is trained."""

    learning_rate: PositiveFloat | None = None
    """Largest learning rate; null is 1e-6, which suits full training of models of a billion parameters, and with an
    adapter (`model.adapter`) ten times that.  1e-4 suits the bundled model."""
    warmup_steps: NonNegativeInt = 0
    """Optimiser updates over which the learning rate rises linearly to its largest value; 0 starts there."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay, or fall to zero at the last step."""
    weight_decay: NonNegativeFloat = 0.0
    """Share of each weight taken off per update, times the learning rate; 0 is off."""
    decay_adapter: bool = False
    """Allows weight decay where an adapter is trained.  It pulls the adapter to zero, and so the policy to its base."""
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Decay of AdamW's mean of gradients, per update."""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.999
    """Decay of AdamW's mean of squared gradients, per update."""
    max_grad_norm: Annotated[float, Gt(0)] = 1.0
    """Gradients with a larger Euclidean norm are scaled down to it; .inf never does."""

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

    tokens_per_microbatch: Annotated[int, Ge(2)] = 16384
    """Tokens, prompts included, that go through the model at once: bounds memory, never changes the gradient."""
    epochs_per_step: PositiveInt | None = None
    """Times that the rollouts of a step are gone through; null is what the algorithm has, 2 for ppo and else 1."""
    measure_entropy: bool = False
    """Report the policy's entropy at the sampled positions; costs another pass over the output layer."""
    minibatches_per_epoch: PositiveInt | None = None
    """Optimiser updates in each pass, each on whole groups; more than one makes the ratios to μ leave 1.  Null is what
    the algorithm has, 4 for ppo and else 1."""
    optimizer_from: str = ""
    """A run whose optimiser the first update goes on with, moments and counters as its last checkpoint has them;
    decay and rates are this recipe's.  A critic that this run alone trains begins anew, one of the other run's stays
    behind.  Empty begins with a new one."""

    def __post_init__(self) -> None:
        super().__post_init__()

    def passes(self, usual: Passes) -> Passes:
        """What is asked for, and else what is usual for the algorithm."""
        return Passes(
            epochs=usual.epochs if self.epochs_per_step is None else self.epochs_per_step,
            minibatches=usual.minibatches if self.minibatches_per_epoch is None else self.minibatches_per_epoch,
        )


@dataclass(frozen=True, kw_only=True)
class ReferenceOptions(Bounded):
    """The frozen policy that a KL term compares with; without a KL term there is none."""

    path: str = ""
    """Folder, run or hub name of another model to compare with, such as the one that an earlier phase began with; empty
    is the model that training starts from."""
    refresh_every: NonNegativeInt = 0
    """Steps after which the reference is taken from the policy again; 0 keeps the model that training started from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path and self.refresh_every:
            raise UserError(
                f"refresh_every = {self.refresh_every} takes the reference from the policy, and path = {self.path} from"
                " another model.  Leave one out."
            )


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(Bounded):
    """Held-out evaluation: in full before and after, in brief in between."""

    every_steps: NonNegativeInt = 10
    """Steps between evaluations in brief; 0 leaves only the two full ones."""
    samples: PositiveInt = 8
    """Completions per held-out problem at temperature 1 in the full evaluations; pass@k needs at least k."""
    brief_problems: PositiveInt = 128
    """Held-out problems, the first ones, of an evaluation in brief, each sampled once."""
    sampling_probes: bool = True
    """Run the task's probes that sample completions of their own, one more for each held-out problem, in the full
    evaluations; Countdown's goes to the token limit.  Probes that read what is there always run."""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Bounded):
    """What is kept to continue from, or to go back to."""

    every_steps: NonNegativeInt = 20
    """Steps between checkpoints; 0 saves only at the end and when the run is interrupted."""
    keep_last: PositiveInt = 2
    """Newest checkpoints kept; older ones are deleted."""
    keep_best: bool = True
    """Keep the checkpoint with the best held-out accuracy (of a supervised run: the lowest loss) as well."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(Bounded):
    """Where a run is kept, how long it goes on, and the seed that all its randomness is a function of."""

    folder: NonEmptyStr = "runs/untitled"
    """Everything the run writes goes here; a folder that holds a run already is never written into untold."""
    overwrite: bool = False
    """Delete the run that `folder` holds, and start anew."""
    seed: NonNegativeInt = 0
    """Prompts, sampling and initial weights are functions of it."""
    num_steps: NonNegativeInt = 100
    """Steps in all."""
    time_limit_minutes: PositiveFloat | None = None
    """Stop, as at the last step, once the run has taken this long, what it took before it was resumed included; null is
    no limit."""
    token_limit: PositiveInt | None = None
    """Stop, as at the last step, once so many completion tokens have been sampled to train on, those of groups that
    dynamic sampling set aside included; null is no limit."""
    early_stop_evaluations: PositiveInt | None = None
    """Stop after this many evaluations in a row without a new best; null goes on."""
    threads: NonNegativeInt = 0
    """CPU threads; 0 leaves the number to torch.  A resumed run needs the same number to give the same bits."""
    report_to: tuple[TrackerName, ...] = ()
    """Trackers that are told what metrics.jsonl says, beside it: tensorboard, wandb, mlflow, trackio (extra `track`, or
    the one package); the section `tracker` says how."""
    curves: bool = True
    """Draws curves.png at the end, which takes one to two seconds."""
    keep_token_columns: bool = False
    """Write what each update computed for each token (log π, ratio, clipped, values, …) to `token_columns/`, for
    `posttrain rl`.  It changes no number; docs/run_folder.md gives sizes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(set(self.report_to)) == len(self.report_to), self, "report_to", "names one twice; name each once")


def require_no_token_columns(run: RunOptions) -> None:
    """Refuse columns per token of a run whose updates keep none."""
    if run.keep_token_columns:
        raise UserError("run.keep_token_columns = true: only `posttrain rl` has such columns.  Leave it out.")


@dataclass(frozen=True, kw_only=True)
class SftOptions(OptimizerOptions):
    """Supervised training on rows of your own, or on demonstrations of a task."""

    section: ClassVar[str] = "sft"
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
    max_length: Annotated[int, Ge(2)] | None = None
    """Longest row in tokens, prompt included, and never more than the model's context, which null stands for."""
    long_rows: Literal["error", "skip", "cut"] = "error"
    """What becomes of longer rows: tell and stop, leave them out, or cut their ends off, stop token included."""
    num_epochs: PositiveFloat | None = None
    """Times that all rows are gone through, each time in another order, in place of `run.num_steps`; null goes by
    that."""
    rows_per_batch: NonNegativeInt = 0
    """Most rows of one optimiser update; 0 leaves it to `tokens_per_batch`.  No update has a row twice."""
    num_demonstrations: NonNegativeInt = 0
    """Demonstrations that are gone through again and again; 0 writes fresh ones for every batch, without end."""
    tokens_per_batch: Annotated[int, Ge(2)] = 16384
    """Tokens, prompts included, with which the batch of one optimiser update is full."""
    tokens_per_microbatch: Annotated[int, Ge(2)] = 4096
    """Tokens that go through the model at once: bounds memory, never changes the gradient.  Small ones stay in a CPU's
    cache."""
    eval_every: PositiveInt = 100
    """Updates between measurements of the held-out loss."""
    measure_entropy: bool = False
    """Report `entropy` and `mean_token_accuracy` of the learned tokens; costs another pass over the output layer."""
    eval_size: PositiveInt = 512
    """Held-out demonstrations that the loss is measured on; of rows task.held_out_size says how many."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split_turns and self.loss_on != "assistant":
            raise UserError(
                f"split_turns = true makes rows of all turns of the assistant, and loss_on = {self.loss_on} learns"
                " something else.  Use one of them."
            )
