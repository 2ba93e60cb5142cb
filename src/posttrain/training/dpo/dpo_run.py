"""Direct preference optimisation on pairs from rows, or in rounds on pairs that the policy samples."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from statistics import fmean
from time import perf_counter
from typing import Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.config import DpoConfig
from posttrain.errors import UserError
from posttrain.models.loading.new_model import policy_of_run
from posttrain.models.policy import Policy
from posttrain.models.sharding import sharded
from posttrain.ranks.group import ONE_RANK, RankGroup
from posttrain.records import Grades, Group, Preference
from posttrain.runs.folder import WEIGHTS
from posttrain.runs.harness import Harness
from posttrain.runs.named_inputs import policy_input
from posttrain.runs.progress import Clock
from posttrain.runs.reports import Run, StepReport
from posttrain.runs.run_steps import StartOptions
from posttrain.runs.watchers import Watcher
from posttrain.tasks.base import Task
from posttrain.tasks.dataset import Rows, count_text
from posttrain.tasks.row_files.rows import GivenRows
from posttrain.training import held_out
from posttrain.training.collector import Journal, completion_tokens, discard_scores
from posttrain.training.dpo.dpo_objective import DpoObjective
from posttrain.training.dpo.learned_rounds import LearnedRounds
from posttrain.training.evaluation import held_out_metrics
from posttrain.training.fit import run_fit, show_fit_plan
from posttrain.training.fit_session import FitSession, pairs_of_rows
from posttrain.training.metrics import step_metrics
from posttrain.training.optimizer import OwnOptimizer, require_all_trained
from posttrain.training.reference import Reference, UncopiedPolicy
from posttrain.training.session import NO_CALLER, CallerObjects, Rewards, Session, inputs_of, open_session

IN_SUMMARY = ("pairs/num", "pairs/frac_tied", "pairs/reward_gap", "reward", "completions/mean_length")
"""Metrics of a round that summary.json keeps."""


def ranked_pairs(rewards: Sequence[float], most: int) -> list[tuple[int, int]]:
    """At most `most` pairs (better, worse) of a group: best and worst, second best and second worst, and so on.

    Samples without a reward (NaN) and ties are left out.  With equal rewards, the first sample counts as better.
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
    """1 for a chosen completion, -1 for a rejected one, NaN for one without a pair."""

    @property
    def num_tied(self) -> int:
        return int(self.sides.isnan().all(dim=1).sum())

    def metrics(self) -> dict[str, float]:
        gaps = [pair.margin for pair in self.pairs if pair.margin is not None]
        return {
            **step_metrics(self.groups, self.grades),
            "round": float(self.number),
            "pairs/num": float(len(self.pairs)),
            "pairs/frac_tied": self.num_tied / len(self.groups),
            **({"pairs/reward_gap": fmean(gaps)} if gaps else {}),
        }


def sampled_round(number: int, groups: Sequence[Group], grades: Grades, pairs_per_prompt: int) -> SampledRound:
    """The pairs of graded groups; completions with the same tokens are never a pair."""
    pairs: list[Preference] = []
    sides = torch.full_like(grades.rewards, torch.nan)
    for row, group in enumerate(groups):
        rewards = grades.rewards[row].tolist()
        for best, worst in ranked_pairs(rewards, pairs_per_prompt):
            chosen, rejected = group.rollouts[best], group.rollouts[worst]
            if chosen.tokens == rejected.tokens:
                continue
            pair = Preference(
                prompt=group.prompt,
                chosen=chosen.sequence,
                rejected=rejected.sequence,
                margin=rewards[best] - rewards[worst],
                where=f"round {number}, prompt {group.prompt.id}, samples {chosen.sample} and {rejected.sample}",
            )
            pairs.append(pair)
            sides[row, best], sides[row, worst] = 1, -1
    return SampledRound(number=number, groups=groups, grades=grades, pairs=pairs, sides=sides)


class RoundPairs(LearnedRounds):
    """The same with the session that samples and judges."""

    measures_at_end = True
    title = "held-out"

    def __init__(self, config: DpoConfig, session: Session, reference: Reference | None = None) -> None:
        super().__init__(config, session.policy, model_name=session.model_name, reference=reference)
        self.session = session
        self.transcripts: list[list[str]] = []
        """[prompt, completion] of some problems in the last full evaluation."""

    def before_step(self, step: int, harness: Harness) -> StepReport:
        """Sample, judge and make pairs, if the step is the first of a round."""
        number, place = divmod(step - 1, self.options.steps_per_round)
        if place:
            return StepReport(step=step, metrics={})
        journal = harness.folder.journal_scores
        self.load_weights(harness)
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

    def load_weights(self, harness: Harness) -> None:
        self.session.load_weights(self.run.num_updates, transfer=harness.folder.path / WEIGHTS)

    def sampled(self, number: int, journal: Journal, clock: Clock) -> SampledRound:
        """Sample a round from the current policy, score it, and make pairs."""
        collected = self.session.collector.collect(number, journal, clock)
        return sampled_round(number, collected.groups, collected.grades, self.options.pairs_per_prompt)

    def is_due(self, step: int, num_steps: int) -> bool:
        every = self.config.evaluation.every_steps
        return bool(every) and step % every == 0

    def evaluate(self, harness: Harness, *, full: bool) -> dict[str, float]:
        """Evaluate held-out problems: fully before and after training, else briefly."""
        session, step = self.session, self.run.step
        self.load_weights(harness)
        questions = session.questions()
        if not full:
            return held_out.measure_in_brief(session, harness, questions, step=step)
        with harness.clock("evaluate"):
            when: Literal["before", "after"] = "after" if step else "before"
            results, self.transcripts = held_out.measure_in_full(session, harness, questions, step=step, when=when)
        if not step:
            self.run.transcripts = self.transcripts
        self.run.saw_evaluation(results)
        return held_out_metrics(results, questions.probes) if results["num_problems"] else {}

    @property
    def num_held_out(self) -> int:
        return len(self.session.questions().prompts)

    def rehearse(self) -> list[str]:
        began = perf_counter()
        self.session.load_weights(self.run.num_updates)
        sampled = self.sampled(1, discard_scores, Clock())
        self.pairs = replace(self.pairs, training=sampled.pairs)
        return [
            f"round      {perf_counter() - began:.1f} s to sample and judge a round: {len(sampled.pairs)} pairs",
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
                f" {options.pairs_per_prompt} pairs per prompt, {count_text(options.steps_per_round, 'step')} each"
            ),
            f"judged by {judges}",
        ]

    def summary(self) -> dict[str, object]:
        return {**super().summary(), "rewards": {each.name: each.settings.weight for each in self.session.rewards}}

    def rows(self) -> list[held_out.Row]:
        if not self.run.after.get("num_problems"):
            return []
        results = {"before": self.run.before, "after": self.run.after}
        return held_out.comparison(results, self.session.questions().probes.values())

    def transcript_lines(self) -> list[str]:
        return held_out.transcript_lines(self.run.transcripts, self.transcripts)


def train_dpo(
    config: DpoConfig,
    *,
    policy: Policy | None = None,
    task: Task | None = None,
    rewards: Rewards = (),
    rows: Rows | None = None,
    held_out_rows: Rows | None = None,
    reference: Policy | Reference | None = None,
    optimizer: OwnOptimizer | None = None,
    watchers: Sequence[Watcher] = (),
    resume: bool = False,
    from_step: int | None = None,
    accept_changes: bool = False,
) -> Run:
    """Train a policy to prefer the chosen answers of pairs over the rejected ones, and save it to RUN/model.

    The pairs are rows with `chosen` and `rejected`, or, with `dpo.rounds`, the best and worst of the policy's
    completions by rewards.  The objects are those of `posttrain.train`; `rows` have two answers each.  `reference`
    replaces the policy before training, `optimizer` AdamW.  `resume` continues the run in `config.run.folder` from its
    last checkpoint, within a round too, to the same bits as an uninterrupted run.
    """
    if reference is not None and config.dpo.refresh_reference:
        raise UserError("reference: is given, but dpo.refresh_reference replaces it in each round.  Leave one out.")
    start = StartOptions(watchers=watchers, resume=resume, from_step=from_step, accept_changes=accept_changes)
    caller = CallerObjects(
        policy=policy, task=task, rewards=rewards, rows=rows, held_out_rows=held_out_rows, optimizer=optimizer
    )
    inputs = inputs_of(config.sampling_half(), caller)
    given = {"policy": policy, "reference": reference if isinstance(reference, Policy) else None}
    weighed = [policy_input(each, name=name, weighed=True) for name, each in given.items()]
    inputs = replace(inputs, objects={**inputs.objects, **weighed[0], **weighed[1]})
    compared = UncopiedPolicy(reference) if isinstance(reference, Policy) else reference
    opened = partial(open_dpo, caller=caller, reference=compared)

    def follows(ranks: RankGroup) -> Run:
        from posttrain.training.dpo.round_follower import RoundFollower
        from posttrain.training.following import follow_rank_0

        return follow_rank_0(RoundFollower(config, caller, compared, ranks), ranks, config.run.folder)

    return run_fit(config, inputs, start, opened, policy, follows if config.dpo.rounds else None)


@contextmanager
def open_dpo(
    config: DpoConfig,
    caller: CallerObjects = NO_CALLER,
    reference: Reference | None = None,
    *,
    ranks: RankGroup = ONE_RANK,
) -> Iterator[FitSession[Preference]]:
    """Load the model, and read all pairs or open the session that samples and scores them."""
    if config.dpo.rounds:
        with open_session(config.sampling_half(), caller, ranks=ranks) as session:
            session.require_prompts_and_rows()
            rounds = RoundPairs(config, session, reference)
            yield FitSession(config, session.model_name, rounds, rounds, own_optimizer=caller.optimizer)
        return
    loaded, name = policy_of_run(config.model, caller.policy, seed=config.run.seed, ranks=ranks)
    policy = sharded(loaded)
    pairs = pairs_of_rows(config, config.dpo, policy, GivenRows(rows=caller.rows, held_out=caller.held_out_rows))
    objective = DpoObjective(config, policy, pairs, model_name=name, reference=reference)
    fitted = FitSession(config, name, pairs, objective, own_optimizer=caller.optimizer)
    require_all_trained(fitted.trained.optimizer, policy.model)
    yield fitted


show_dpo_plan = partial(show_fit_plan, opened=open_dpo)
