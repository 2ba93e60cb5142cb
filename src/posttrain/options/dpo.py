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

    num_epochs: float | None = 1.0
    """Of rows: times that all pairs are gone through, each time in another order; null goes by `run.num_steps`."""
    pairs_per_batch: int = 32
    """Pairs of one optimiser update; no update has a pair twice."""
    loss: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    """What is minimised of h, by how many nats the log-ratio to the reference of the chosen answer is above that of the
    rejected one: sigmoid, -log σ(β h); ipo, (h - 1/(2β))²; hinge, max(0, 1 - β h); robust, sigmoid with the bias of
    wrong labels taken out (`label_smoothing`)."""
    beta: PositiveFloat = 0.1
    """β: how near the policy is kept to the reference; 0.01 lets it go far, 0.5 hardly."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """ε: the share of pairs that are taken to be labelled the wrong way round: conservative DPO, or robust DPO where
    `loss` is robust."""
    length_normalized: bool | None = None
    """Whether log-probs are means per token and not sums over an answer; null is yes for ipo and else no.  A β that is
    as strong is then larger by an answer's length or so: 5 where it was 0.1."""
    learn_closing: bool = False
    """Whether what a chat template writes after an answer's last stop token, such as a line's end, counts in its
    log-prob, as in TRL.  No policy samples it."""
    nll_weight: NonNegativeFloat = 0.0
    """What the negative log-prob per token of the chosen answer counts beside the loss; above 0 it keeps the chosen
    answer from becoming unlikelier together with the rejected one."""
    reference: Literal["live", "precomputed"] = "live"
    """Log-probs of the reference: `live` asks for each batch, of the base with the adapter off or of a frozen copy;
    `precomputed` asks once for all pairs and keeps them in checkpoints, which takes no copy, and no pass after the
    first epoch."""
    rounds: NonNegativeInt = 0
    """Times that pairs are sampled from the policy, judged by `rewards` and learned; 0 learns the pairs of rows."""
    steps_per_round: PositiveInt = 8
    """Of rounds: updates on the pairs of each, which are gone through again and again if need be."""
    prompts_per_round: PositiveInt = 256
    """Of rounds: prompts whose completions are sampled and judged in each, `rollout.group_size` for each prompt."""
    pairs_per_prompt: PositiveInt = 1
    """Of rounds: most pairs of one prompt: the best completion with the worst, the next best with the next worst, as
    long as one is better than the other."""
    refresh_reference: bool = False
    """Of rounds: compare with the policy that each round begins with; else always with the first one."""

    def resolved(self) -> "DpoOptions":
        """In full, as a saved recipe says what is done: what follows from the loss, and from rounds, is filled in."""
        normalized = self.loss == "ipo" if self.length_normalized is None else self.length_normalized
        epochs = None if self.rounds and self.num_epochs == 1 else self.num_epochs
        return replace(self, length_normalized=normalized, num_epochs=epochs)

    @property
    def answers_with_closing(self) -> bool:
        """As `learn_closing` says."""
        return self.learn_closing

    @property
    def keeps_reference(self) -> bool:
        """Whether the policy that is compared with has to be there after the first update."""
        return self.reference == "live" or (self.rounds > 0 and not self.refresh_reference)
