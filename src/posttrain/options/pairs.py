"""Training on pairs: the `reward_model` and `dpo` sections of a recipe."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Lt

from posttrain.options.bounds import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Rule
from posttrain.options.training import OptimizerOptions


@dataclass(frozen=True, kw_only=True)
class PairOptions(OptimizerOptions):
    """How pairs of answers turn into optimiser updates."""

    section: ClassVar[str] = "pairs"
    """Its section in a recipe, for messages."""
    counts_tokens: ClassVar[bool] = True
    """Whether the loss is computed from the answers' tokens, not from scores."""

    max_length: Annotated[int, Ge(3)] | None = None
    """Maximum tokens of a pair: the prompt and the longer answer.  Null: the model's context, which is the upper
    limit."""
    long_pairs: Literal["error", "skip", "cut"] = "error"
    """What to do with longer pairs: stop with an error, or skip them.  `cut` (only for DPO) cuts the ends of long
    answers, as TRL does, so only their beginnings are learned; it skips pairs whose prompt fills the length."""
    num_epochs: PositiveFloat | None = 1.0
    """Passes over all pairs, shuffled again in each; null: `run.num_steps` decides."""
    pairs_per_batch: PositiveInt = 64
    """Pairs of one optimiser update, all different."""
    tokens_per_microbatch: Annotated[int, Ge(3)] = 4096
    """Tokens in the model at a time: limits memory, never changes the gradient.  Small batches fit a CPU's cache."""
    eval_every: PositiveInt = 40
    """Updates between measurements on held-out pairs; a run also begins and ends with one.  Only a saved step can be
    kept as the best: use a multiple of `checkpoint.every_steps`."""

    @property
    def answers_with_closing(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class RewardTrainingOptions(PairOptions):
    """A reward model: a language model with a scalar head, trained on which of two answers was preferred."""

    section: ClassVar[str] = "reward_model"
    counts_tokens: ClassVar[bool] = False
    default_rate: ClassVar[float] = 1e-5

    learning_rate: PositiveFloat | None = None
    """Peak learning rate; null: 1e-5, which suits full training of a billion parameters, and ten times that with an
    adapter (`model.adapter`).  3e-4 suits the bundled model."""
    head_rate_scale: NonNegativeFloat = 1.0
    """Learning rate of the head as a multiple of the body's."""
    center_coefficient: NonNegativeFloat = 0.01
    """c of the term c·mean((r_chosen + r_rejected)²), which pulls the mean score to 0; pairs only fix differences.  0
    turns it off."""
    margin_scale: NonNegativeFloat = 1.0
    """Factor from a row's `margin` to the target difference of scores; 0 ignores margins."""
    calibration_bins: PositiveInt = 10
    """Number of equal bins from 1/2 to 1 that compare predicted probabilities with observed shares."""

    rules = (Rule("long_pairs", lambda o: o.long_pairs != "cut", "is only for DPO.  Use error or skip."),)


@dataclass(frozen=True, kw_only=True)
class DpoOptions(PairOptions):
    """Direct preference optimisation (DPO) on pairs of answers: from rows, or sampled and judged in rounds."""

    section: ClassVar[str] = "dpo"

    num_epochs: PositiveFloat | None = 1.0
    """For rows: passes over all pairs, shuffled again in each; null: `run.num_steps` decides."""
    pairs_per_batch: PositiveInt = 32
    """Pairs of one optimiser update, all different."""
    loss: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    """The loss as a function of h: the chosen answer's log-ratio to the reference minus the rejected one's, in nats.
    sigmoid, -log σ(β h); ipo, (h - 1/(2β))²; hinge, max(0, 1 - β h); robust, sigmoid corrected for wrong labels
    (`label_smoothing`)."""
    beta: PositiveFloat = 0.1
    """β keeps the policy near the reference: 0.01 lets it move far, 0.5 hardly."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """ε, the assumed share of pairs with swapped labels: conservative DPO; with `loss: robust`, robust DPO."""
    length_normalized: bool | None = None
    """Use the mean log-prob per token, not the sum over an answer; null: true for ipo, else false.  With means, a β of
    the same strength is larger by about an answer's length: 5 instead of 0.1."""
    learn_closing: bool = False
    """Include in the log-prob what a chat template writes after an answer's last stop token, such as a newline, as in
    TRL.  A policy never samples it."""
    nll_weight: NonNegativeFloat = 0.0
    """Weight of an added loss: the chosen answer's negative log-prob per token.  Above 0 it keeps the chosen answer
    from becoming less likely along with the rejected one."""
    reference: Literal["live", "precomputed"] = "live"
    """Log-probs of the reference: `live` computes them for each batch, with the adapter off or with a frozen copy;
    `precomputed` computes them once for all pairs, without a copy, and keeps them in checkpoints."""
    rounds: NonNegativeInt = 0
    """Rounds: each samples pairs from the policy, judges them by `rewards` and learns them; 0 learns pairs from
    rows."""
    steps_per_round: PositiveInt = 8
    """With rounds: updates per round; its pairs repeat if necessary."""
    prompts_per_round: PositiveInt = 256
    """With rounds: prompts per round, with `rollout.group_size` completions each."""
    pairs_per_prompt: PositiveInt = 1
    """With rounds: maximum pairs per prompt: the best completion with the worst, the second best with the second worst,
    and so on, while one is better than the other."""
    refresh_reference: bool = False
    """With rounds: the reference is the policy at the start of each round, not of the run."""

    def resolved(self) -> "DpoOptions":
        """The options with the defaults filled in that depend on the loss and on rounds."""
        normalized = self.loss == "ipo" if self.length_normalized is None else self.length_normalized
        epochs = None if self.rounds and self.num_epochs == 1 else self.num_epochs
        return replace(self, length_normalized=normalized, num_epochs=epochs)

    @property
    def answers_with_closing(self) -> bool:
        return self.learn_closing

    @property
    def keeps_reference(self) -> bool:
        return self.reference == "live" or (self.rounds > 0 and not self.refresh_reference)
