"""Pairs of a policy's own completions: the best of a group with the worst, ties dropped and counted."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.records import Grades, Group, Preference, Prompt, TokenSequence
from posttrain.runs.tensor_state import Tensors
from posttrain.training.metrics import (
    completion_metrics,
    logged_metrics,
    outcome_metrics,
    reward_metrics,
    source_metrics,
)

PARTS = ("prompt", "chosen", "rejected")


def ranked_pairs(rewards: Sequence[float], most: int) -> list[tuple[int, int]]:
    """At most `most` pairs (better, worse) of a group: the best with the worst, the next best with the next worst, ...

    Samples without a reward (NaN) and ties are left out.  Among equal rewards the first sample counts as better.
    """
    order = sorted((i for i, reward in enumerate(rewards) if reward == reward), key=lambda i: (-rewards[i], i))
    found = zip(order, reversed(order), strict=True)
    return [(best, worst) for best, worst in islice(found, most) if rewards[best] > rewards[worst]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRound:
    """The groups of a round, their grades and their pairs."""

    number: int
    groups: Sequence[Group]
    grades: Grades
    pairs: Sequence[Preference]
    sides: Float64[Tensor, "prompt group"]
    """1 for a chosen completion, -1 for a rejected one, NaN for one in no pair."""

    @property
    def num_tied(self) -> int:
        return int(self.sides.isnan().all(dim=1).sum())

    def metrics(self) -> dict[str, float]:
        gaps = [pair.margin for pair in self.pairs if pair.margin is not None]
        return {
            **reward_metrics(self.grades),
            **source_metrics(self.groups, self.grades),
            **outcome_metrics(self.grades.outcomes),
            **logged_metrics(self.grades.logged),
            **completion_metrics(self.groups),
            "round": float(self.number),
            "pairs/num": float(len(self.pairs)),
            "pairs/frac_tied": self.num_tied / len(self.groups),
            **({"pairs/reward_gap": fmean(gaps)} if gaps else {}),
        }


def sampled_round(number: int, groups: Sequence[Group], grades: Grades, pairs_per_prompt: int) -> SampledRound:
    """The pairs of graded groups; two completions of the same tokens are not a pair."""
    pairs: list[Preference] = []
    sides = torch.full_like(grades.rewards, torch.nan)
    for row, group in enumerate(groups):
        rewards = grades.rewards[row].tolist()
        for best, worst in ranked_pairs(rewards, pairs_per_prompt):
            chosen, rejected = group.rollouts[best], group.rollouts[worst]
            if chosen.tokens == rejected.tokens:
                continue
            where = f"round {number}, prompt {group.prompt.id}, samples {chosen.sample} and {rejected.sample}"
            pairs.append(
                Preference(
                    prompt=group.prompt,
                    chosen=chosen.sequence,
                    rejected=rejected.sequence,
                    margin=rewards[best] - rewards[worst],
                    where=where,
                )
            )
            sides[row, best], sides[row, worst] = 1, -1
    return SampledRound(number=number, groups=groups, grades=grades, pairs=pairs, sides=sides)


def pair_tensors(pairs: Sequence[Preference]) -> Tensors:
    """The tokens of sampled pairs as a checkpoint holds them, with masks if some tokens were given."""
    tensors: dict[str, Tensor] = {}
    for part, rows in zip(PARTS, parts_of(pairs), strict=True):
        tensors[f"{part}.tokens"] = torch.tensor([token for row in rows for token in row.tokens], dtype=torch.int32)
        tensors[f"{part}.lengths"] = torch.tensor([len(row.tokens) for row in rows], dtype=torch.int64)
        sampled = torch.tensor([mark for row in rows for mark in row.sampled], dtype=torch.bool)
        if not bool(sampled.all()):
            tensors[f"{part}.sampled"] = sampled
    return tensors


def parts_of(pairs: Sequence[Preference]) -> tuple[list[TokenSequence], ...]:
    prompts = [TokenSequence.one_turn(pair.prompt.tokens) for pair in pairs]
    return prompts, [pair.chosen for pair in pairs], [pair.rejected for pair in pairs]


def pairs_from(tensors: Tensors, places: Sequence[str]) -> list[Preference]:
    prompts, chosen, rejected = (sequences_from(tensors, part) for part in PARTS)
    return [
        Preference(prompt=Prompt(id=where, text="", tokens=prompt.tokens), chosen=best, rejected=worst, where=where)
        for where, prompt, best, worst in zip(places, prompts, chosen, rejected, strict=True)
    ]


def sequences_from(tensors: Tensors, part: str) -> list[TokenSequence]:
    tokens, lengths = tensors[f"{part}.tokens"], tensors[f"{part}.lengths"].tolist()
    sampled = tensors.get(f"{part}.sampled", torch.ones_like(tokens, dtype=torch.bool))
    return [
        TokenSequence(tokens=tuple(row.tolist()), sampled=tuple(marks.tolist()))
        for row, marks in zip(tokens.split(lengths), sampled.split(lengths), strict=True)
    ]
