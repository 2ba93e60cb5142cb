"""What pairs are compared with: their log-probs under the reference, asked anew for every batch or once and kept."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Literal

import torch

from posttrain.algorithms.preference_losses import OfPairs
from posttrain.models.policy import Policy
from posttrain.options.dpo import DpoOptions
from posttrain.records import Preference
from posttrain.runs.tensor_state import Tensors
from posttrain.training.dpo.pair_update import logprobs_without_gradient
from posttrain.training.reference import Reference, reference_of

Which = Literal["training", "held_out"]


class PairReference:
    """The reference of a run on pairs.

    *Live*: the policy that training started from, as an adapter that is off or a frozen copy, or another model that is
    given, asked for each batch.
    *Precomputed*: asked once for all pairs, whose log-probs are kept; where that is before the first update of any, the
    policy itself is the reference, and there is no copy of it.
    """

    def __init__(self, policy: Policy, options: DpoOptions, given: Reference | None = None) -> None:
        """To be made before the first update of a run, resumed or not."""
        self.policy, self.options = policy, options
        self.reference = given or (reference_of(policy) if options.keeps_reference else None)
        self.kept: dict[Which, OfPairs] = {}

    def begin(self, which: Which, pairs: Sequence[Preference]) -> None:
        """Be ready for these pairs, which takes a pass over all of them where their log-probs are to be kept."""
        if self.options.reference == "precomputed":
            self.kept[which] = self.now(pairs)

    def refresh(self) -> None:
        """Be the policy as it is now."""
        if self.reference is not None:
            self.reference = reference_of(self.policy)

    def logprobs(self, which: Which, numbers: Sequence[int], pairs: Sequence[Preference]) -> OfPairs:
        """log π_ref of both answers of some of the pairs, in nats; `numbers` say which of all they are."""
        if self.options.reference == "precomputed":
            kept, rows = self.kept[which], list(numbers)
            return OfPairs(kept.chosen[rows], kept.rejected[rows])
        return self.now(pairs)

    def now(self, pairs: Sequence[Preference]) -> OfPairs:
        """log π_ref of pairs, asked now."""
        with nullcontext(self.policy) if self.reference is None else self.reference.entered() as policy:
            return logprobs_without_gradient(policy, pairs, self.options.tokens_per_microbatch)

    def tensors(self) -> dict[str, Tensors]:
        """What of it a checkpoint has to hold: log-probs that are kept, and a reference that is not the first one."""
        saved: dict[str, Tensors] = {}
        if self.kept:
            saved["reference_logprobs"] = {
                f"{which}.{answer}": column
                for which, logprobs in self.kept.items()
                for answer, column in zip(OfPairs._fields, logprobs, strict=True)
            }
        if self.reference is not None and self.options.refresh_reference:
            saved["reference"] = self.reference.tensors()
        return saved

    def restore(self, saved: Mapping[str, Tensors]) -> None:
        """Be as the checkpoint was."""
        logprobs = saved.get("reference_logprobs", {})
        whiches: tuple[Which, ...] = ("training", "held_out")
        self.kept = {
            which: OfPairs(*(logprobs[f"{which}.{answer}"].to(torch.float64) for answer in OfPairs._fields))
            for which in whiches
            if f"{which}.chosen" in logprobs
        }
        if self.reference is not None and "reference" in saved:
            self.reference.restore(saved["reference"])
