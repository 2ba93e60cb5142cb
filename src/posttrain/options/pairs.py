"""Training on pairs: the `reward_model` and `dpo` sections of a recipe."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Lt

from posttrain.options.bounds import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Rule
from posttrain.options.training import OptimizerOptions


@dataclass(frozen=True, kw_only=True)
class PairOptions(OptimizerOptions):
    """How pairs of answers become optimiser updates."""

    section: ClassVar[str] = "pairs"
    """Its section in a recipe, for messages."""
    counts_tokens: ClassVar[bool] = True
    """Whether the loss is of the answers' tokens, not of their scores."""

    max_length: Annotated[int, Ge(3)] | None = None
    """Longest pair in tokens, the prompt with the longer answer; null is the model's context, which is the limit."""
    long_pairs: Literal["error", "skip", "cut"] = "error"
    """What to do with longer pairs: stop with an error, or skip them.  `cut`, only for DPO, cuts the ends of longer
    answers, as TRL does, and skips pairs whose prompt fills the length: only the beginning of an answer is learned."""
    num_epochs: PositiveFloat | None = 1.0
    """Passes over all pairs, each in another order; null: `run.num_steps` decides."""
    pairs_per_batch: PositiveInt = 64
    """Pairs of one optimiser update, all different."""
    tokens_per_microbatch: Annotated[int, Ge(3)] = 4096
    """Tokens in the model at a time: bounds memory, never changes the gradient.  Small ones fit a CPU's cache."""
    eval_every: PositiveInt = 40
    """Updates between measurements on held-out pairs, which also begin and end a run.  Only a saved step can be kept as
    the best: use a multiple of `checkpoint.every_steps`."""

    @property
    def answers_with_closing(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class RewardTrainingOptions(PairOptions):
    """A reward model: a language model under a scalar head, trained on which of two answers was preferred."""

    section: ClassVar[str] = "reward_model"
    counts_tokens: ClassVar[bool] = False
    default_rate: ClassVar[float] = 1e-5

    learning_rate: PositiveFloat | None = None
    """Largest learning rate; null is 1e-5, for full training of a billion parameters, and ten times that with an
    adapter (`model.adapter`).  3e-4 suits the bundled model."""
    head_rate_scale: NonNegativeFloat = 1.0
    """Learning rate of the head as a multiple of the body's."""
    center_coefficient: NonNegativeFloat = 0.01
    """c of c·mean((r_chosen + r_rejected)²), which pulls the mean of scores to 0, as pairs do not; 0 is off."""
    margin_scale: NonNegativeFloat = 1.0
    """Factor from a row's `margin` to the wanted difference of scores; 0 leaves margins out."""
    calibration_bins: PositiveInt = 10
    """Bins of equal width, from 1/2 to 1, in which predicted probabilities are compared with observed shares."""

    rules = (Rule("long_pairs", lambda o: o.long_pairs != "cut", "is only for DPO.  Use error or skip."),)


@dataclass(frozen=True, kw_only=True)
class DpoOptions(PairOptions):
    """Direct preference optimisation on pairs of answers: from rows, or sampled and judged in rounds."""

    section: ClassVar[str] = "dpo"

    num_epochs: PositiveFloat | None = 1.0
    """Of rows: passes over all pairs, each in another order; null: `run.num_steps` decides."""
    pairs_per_batch: PositiveInt = 32
    """Pairs of one optimiser update, all different."""
    loss: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    """The loss of h, the log-ratio to the reference of the chosen answer minus that of the rejected one, in nats:
    sigmoid, -log σ(β h); ipo, (h - 1/(2β))²; hinge, max(0, 1 - β h); robust, sigmoid without the bias of wrong labels
    (`label_smoothing`)."""
    beta: PositiveFloat = 0.1
    """β keeps the policy near the reference: 0.01 lets it go far, 0.5 hardly."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """ε, the assumed share of pairs with swapped labels: conservative DPO, or robust DPO with `loss: robust`."""
    length_normalized: bool | None = None
    """Use means per token of log-probs, not sums over an answer; null is yes for ipo, else no.  A β of the same
    strength is then larger by about an answer's length: 5 instead of 0.1."""
    learn_closing: bool = False
    """Count what a chat template writes after an answer's last stop token, such as a newline, in its log-prob, as in
    TRL.  No policy samples it."""
    nll_weight: NonNegativeFloat = 0.0
    """Weight of the negative log-prob per token of the chosen answer, added to the loss; above 0 it keeps the chosen
    answer from becoming less likely together with the rejected one."""
    reference: Literal["live", "precomputed"] = "live"
    """Log-probs of the reference: `live` computes them for each batch, by the base with the adapter off or a frozen
    copy; `precomputed` once for all pairs, kept in checkpoints, without a copy."""
    rounds: NonNegativeInt = 0
    """Rounds of sampling pairs from the policy, judging them by `rewards` and learning them; 0 learns pairs of rows."""
    steps_per_round: PositiveInt = 8
    """Of rounds: updates on the pairs of each, which repeat if necessary."""
    prompts_per_round: PositiveInt = 256
    """Of rounds: prompts in each, with `rollout.group_size` completions per prompt."""
    pairs_per_prompt: PositiveInt = 1
    """Of rounds: most pairs of a prompt: the best completion with the worst, the next best with the next worst, while
    one is better than the other."""
    refresh_reference: bool = False
    """Of rounds: the reference is the policy at the start of each round, not of the run."""

    def resolved(self) -> "DpoOptions":
        """With the values that follow from the loss and from rounds filled in."""
        normalized = self.loss == "ipo" if self.length_normalized is None else self.length_normalized
        epochs = None if self.rounds and self.num_epochs == 1 else self.num_epochs
        return replace(self, length_normalized=normalized, num_epochs=epochs)

    @property
    def answers_with_closing(self) -> bool:
        return self.learn_closing

    @property
    def keeps_reference(self) -> bool:
        return self.reference == "live" or (self.rounds > 0 and not self.refresh_reference)
