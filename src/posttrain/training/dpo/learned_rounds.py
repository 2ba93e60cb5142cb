"""The part of DPO in rounds that every rank needs: the pairs of a round, learned and saved in checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from posttrain.config import DpoConfig
from posttrain.models.policy import Policy
from posttrain.options.pairs import DpoOptions
from posttrain.records import Preference, Prompt, TokenSequence
from posttrain.runs.checkpoint import Checkpoint
from posttrain.runs.harness import Harness
from posttrain.runs.tensor_state import Tensors
from posttrain.tasks.preference_set import PreferenceSet
from posttrain.training.dpo.dpo_objective import DpoObjective
from posttrain.training.reference import Reference

PARTS = ("prompt", "chosen", "rejected")


def pair_tensors(pairs: Sequence[Preference]) -> Tensors:
    """The tokens of sampled pairs as stored in a checkpoint, with masks if the policy did not sample some of them."""
    tensors: dict[str, Tensor] = {}
    prompts = [TokenSequence.one_turn(pair.prompt.tokens) for pair in pairs]
    parts = (prompts, [pair.chosen for pair in pairs], [pair.rejected for pair in pairs])
    for part, rows in zip(PARTS, parts, strict=True):
        tensors[f"{part}.tokens"] = torch.tensor([token for row in rows for token in row.tokens], dtype=torch.int32)
        tensors[f"{part}.lengths"] = torch.tensor([len(row.tokens) for row in rows], dtype=torch.int64)
        sampled = torch.tensor([mark for row in rows for mark in row.sampled], dtype=torch.bool)
        if not bool(sampled.all()):
            tensors[f"{part}.sampled"] = sampled
    return tensors


def pairs_from(tensors: Tensors, places: Sequence[str]) -> list[Preference]:
    """The pairs of `pair_tensors`."""

    def sequences(part: str) -> list[TokenSequence]:
        tokens, lengths = tensors[f"{part}.tokens"], tensors[f"{part}.lengths"].tolist()
        sampled = tensors.get(f"{part}.sampled", torch.ones_like(tokens, dtype=torch.bool))
        return [
            TokenSequence(tokens=tuple(row.tolist()), sampled=tuple(marks.tolist()))
            for row, marks in zip(tokens.split(lengths), sampled.split(lengths), strict=True)
        ]

    return [
        Preference(prompt=Prompt(id=where, text="", tokens=prompt.tokens), chosen=best, rejected=worst, where=where)
        for where, prompt, best, worst in zip(places, *map(sequences, PARTS), strict=True)
    ]


class LearnedRounds(DpoObjective):
    """Source and objective of rounds for every rank: the pairs of the current round."""

    def __init__(
        self, config: DpoConfig, policy: Policy, *, model_name: str = "", reference: Reference | None = None
    ) -> None:
        none = PreferenceSet(seed=config.run.seed, training=[], held_out=[])
        super().__init__(config, policy, none, model_name=model_name, reference=reference)

    def batch(self, first: int, options: DpoOptions) -> list[Preference]:
        return self.pairs.batch(first, options)

    def num_steps(self, options: DpoOptions) -> int:
        return options.rounds * options.steps_per_round

    def begin(self, harness: Harness) -> None:
        """Each round starts from the beginning."""

    def begin_round(self, number: int, pairs: Sequence[Preference]) -> None:
        """Learn these pairs next; on all ranks, which share the reference's forward passes."""
        with self.policy.ranks.leading("begin_round", number, pairs):
            self.pairs = replace(self.pairs, training=pairs, order=order_of(number))
            self.run.round, self.run.next_pair, self.run.places = number, 0, [pair.where for pair in pairs]
            if self.options.refresh_reference and number > 1:
                self.reference.refresh()
            self.reference.begin("training", pairs)

    def described(self) -> Sequence[str]:
        return []

    def tensors(self) -> Mapping[str, Tensors]:
        return {**super().tensors(), "pairs": pair_tensors(self.pairs.training)}

    def restore(self, saved: Checkpoint) -> None:
        super().restore(saved)
        pairs = pairs_from(saved.tensors["pairs"], self.run.places)
        self.pairs = replace(self.pairs, training=pairs, order=order_of(self.run.round))


def order_of(round_number: int) -> str:
    return f"pairs of round {round_number}"
