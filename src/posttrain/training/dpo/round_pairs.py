"""Pairs in rounds: the policy's completions, sampled and scored as `posttrain rl` does, are learned as pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean
from time import perf_counter
from typing import Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.config import DpoConfig
from posttrain.options.pairs import DpoOptions
from posttrain.records import Grades, Group, Preference, Prompt, TokenSequence
from posttrain.runs.checkpoint import Checkpoint
from posttrain.runs.harness import Harness
from posttrain.runs.progress import Clock
from posttrain.runs.reports import StepReport
from posttrain.runs.tensor_state import Tensors
from posttrain.tasks.dataset import count_text
from posttrain.tasks.preference_set import PreferenceSet
from posttrain.training.collector import Journal, completion_tokens, no_journal
from posttrain.training.dpo.dpo_objective import DpoObjective
from posttrain.training.held_out import (
    Row,
    comparison,
    held_out_metrics,
    measure_in_brief,
    measure_in_full,
    transcript_lines,
)
from posttrain.training.metrics import (
    completion_metrics,
    logged_metrics,
    outcome_metrics,
    reward_metrics,
    source_metrics,
)
from posttrain.training.reference import Reference
from posttrain.training.session import Session

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


IN_SUMMARY = ("pairs/num", "pairs/frac_tied", "pairs/reward_gap", "reward", "completions/mean_length")
"""Metrics of a round that summary.json keeps."""


class RoundPairs(DpoObjective):
    """Source and objective of rounds: the pairs of the current one."""

    measures_at_end = True
    title = "held-out"

    def __init__(self, config: DpoConfig, session: Session, reference: Reference | None = None) -> None:
        none = PreferenceSet(seed=config.run.seed, training=[], held_out=[])
        super().__init__(config, session.policy, none, model_name=session.model_name, reference=reference)
        self.session = session
        self.transcripts: list[list[str]] = []
        """[prompt, completion] of some problems, of the last full evaluation."""

    def batch(self, first: int, options: DpoOptions) -> list[Preference]:
        return self.pairs.batch(first, options)

    def num_steps(self, options: DpoOptions) -> int:
        return options.rounds * options.steps_per_round

    def begin(self, harness: Harness) -> None:
        """Each round begins by itself."""

    def before_step(self, step: int, harness: Harness) -> StepReport:
        """Sample, judge and pair, where the step is the first of a round."""
        number, place = divmod(step - 1, self.options.steps_per_round)
        if place:
            return StepReport(step=step, metrics={})
        journal = harness.folder.journal_scores
        sampled = self.sampled(number + 1, lambda _, groups, grades: journal(step, groups, grades), harness.clock)
        with harness.clock("reference"):
            self.begin_round(number + 1, sampled.pairs)
        metrics, num_tokens = sampled.metrics(), completion_tokens(sampled.groups)
        self.run.completion_tokens += num_tokens
        kept = {name: metrics[name] for name in IN_SUMMARY if name in metrics}
        self.run.rounds.append({"round": sampled.number, **kept})
        harness.progress.note(
            f"round {number + 1}/{self.options.rounds}: {len(sampled.pairs)} pairs of {len(sampled.groups)} groups;"
            f" {sampled.num_tied} groups are ties"
        )
        return StepReport(
            step=step,
            metrics=metrics,
            num_tokens=num_tokens,
            groups=sampled.groups,
            grades=sampled.grades,
            advantages=sampled.sides,
        )

    def begin_round(self, number: int, pairs: Sequence[Preference]) -> None:
        self.pairs = replace(self.pairs, training=pairs, order=order_of(number))
        self.run.round, self.run.next_pair, self.run.places = number, 0, [pair.where for pair in pairs]
        if self.options.refresh_reference and number > 1:
            self.reference.refresh()
        self.reference.begin("training", pairs)

    def sampled(self, number: int, journal: Journal, clock: Clock) -> SampledRound:
        """Sample a round from the current policy, score it, and make pairs."""
        self.session.load_weights(self.run.num_updates)
        collected = self.session.collector.collect(number, journal, clock)
        return sampled_round(number, collected.groups, collected.grades, self.options.pairs_per_prompt)

    def is_due(self, step: int, num_steps: int) -> bool:
        every = self.config.evaluation.every_steps
        return bool(every) and step % every == 0

    def evaluate(self, harness: Harness, *, full: bool) -> dict[str, float]:
        """Measure held-out problems: in full before and after training, else in brief."""
        session, step = self.session, self.run.step
        session.load_weights(self.run.num_updates)
        questions = session.questions()
        if not full:
            return measure_in_brief(session, harness, questions, step=step)
        with harness.clock("evaluate"):
            when: Literal["before", "after"] = "after" if step else "before"
            results, self.transcripts = measure_in_full(session, harness, questions, step=step, when=when)
        if not step:
            self.run.transcripts = self.transcripts
        self.run.saw_evaluation(results)
        return held_out_metrics(results, questions.probes) if results["num_problems"] else {}

    @property
    def num_held_out(self) -> int:
        return len(self.session.questions().prompts)

    def tensors(self) -> Mapping[str, Tensors]:
        return {**super().tensors(), "pairs": pair_tensors(self.pairs.training)}

    def restore(self, saved: Checkpoint) -> None:
        super().restore(saved)
        pairs = pairs_from(saved.tensors["pairs"], self.run.places)
        self.pairs = replace(self.pairs, training=pairs, order=order_of(self.run.round))

    def rehearse(self) -> list[str]:
        began = perf_counter()
        sampled = self.sampled(1, no_journal, Clock())
        self.pairs = replace(self.pairs, training=sampled.pairs)
        return [
            f"round      {perf_counter() - began:.1f} s to sample and judge one: {len(sampled.pairs)} pairs",
            f"           {sampled.num_tied} of {len(sampled.groups)} groups are ties",
        ]

    def described(self) -> list[str]:
        options, rollout = self.options, self.config.rollout
        judges = ", ".join(f"{each.name} × {each.settings.weight:g}" for each in self.session.rewards)
        return [
            f"task {self.session.task.name}",
            (
                f"{count_text(options.rounds, 'round')} of {count_text(options.prompts_per_round, 'prompt')} ×"
                f" {count_text(rollout.group_size, 'completion')} (limit {rollout.max_completion_tokens}), at most"
                f" {options.pairs_per_prompt} pairs of a prompt, {count_text(options.steps_per_round, 'step')} each"
            ),
            f"judged by {judges}",
        ]

    def summary(self) -> dict[str, object]:
        return {**super().summary(), "rewards": {each.name: each.settings.weight for each in self.session.rewards}}

    def rows(self) -> list[Row]:
        if not self.run.after.get("num_problems"):
            return []
        results = {"before": self.run.before, "after": self.run.after}
        return comparison(results, self.session.questions().probes.values())

    def transcript_lines(self) -> list[str]:
        return transcript_lines(self.run.transcripts, self.transcripts)


def order_of(round_number: int) -> str:
    return f"pairs of round {round_number}"
