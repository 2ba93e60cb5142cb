"""The `dpo` section of a recipe: direct preference optimisation."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Lt

from posttrain.options.bounds import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from posttrain.options.pairs import PairOptions


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
