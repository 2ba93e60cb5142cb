"""Pairs in rounds: the policy's completions are sampled and judged as `posttrain rl` does it, then learned as pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Literal

from posttrain.config import DpoConfig
from posttrain.generation.engine import load_checked
from posttrain.generation.groups import require_room_for
from posttrain.models.loading.exported_weights import ExportedWeights
from posttrain.options.dpo import DpoOptions
from posttrain.records import Preference
from posttrain.runs.checkpoint import Checkpoint
from posttrain.runs.clock import Clock
from posttrain.runs.harness import Harness
from posttrain.runs.reports import EvaluationReport, ScoredCompletions, StepReport
from posttrain.runs.tensor_state import Tensors
from posttrain.tasks.base import longest_prompts
from posttrain.tasks.dataset import count_text
from posttrain.tasks.preference_set import PreferenceSet
from posttrain.training.collector import CollectedStep, no_journal
from posttrain.training.dpo.dpo_objective import DpoObjective
from posttrain.training.dpo.sampled_pairs import SampledRound, pair_tensors, pairs_from, sampled_round
from posttrain.training.evaluation import brief_evaluation, full_evaluation, num_completions
from posttrain.training.reference import Reference
from posttrain.training.report import SHOWN, comparison, held_out_metrics, side_by_side
from posttrain.training.session import Session, require_sound_rows

IN_SUMMARY = ("pairs/num", "pairs/frac_tied", "pairs/reward_gap", "reward", "completions/mean_length")
"""Metrics of a round that summary.json keeps."""


class RoundPairs(DpoObjective):
    """The pairs of a round as a source, and their objective."""

    measures_at_end = True

    def __init__(self, config: DpoConfig, session: Session, reference: Reference | None = None) -> None:
        none = PreferenceSet(seed=config.run.seed, training=[], held_out=[])
        super().__init__(config, session.policy, none, model_name=session.model_name, reference=reference)
        self.session = session
        self.transcripts: list[list[str]] = []
        """[prompt, completion] of some problems, of the last full evaluation."""

    def require_sound(self) -> None:
        for prompt in [*longest_prompts(self.session.task), *self.session.questions().prompts]:
            require_room_for(prompt, self.session.engine)
        require_sound_rows(self.session)

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
        self.load_weights()
        journal = harness.folder.journal_scores
        collected = self.session.collector.collect(
            number + 1, lambda _, groups, grades: journal(step, groups, grades), harness.clock
        )
        sampled = self.paired(number + 1, collected)
        with harness.clock("reference"):
            self.begin_round(number + 1, sampled.pairs)
        self.run.completion_tokens += collected.num_completion_tokens
        metrics = sampled.metrics()
        self.run.rounds.append(
            {"round": sampled.number, **{name: metrics[name] for name in IN_SUMMARY if name in metrics}}
        )
        harness.progress.note(
            f"round {number + 1}/{self.options.rounds}: {len(sampled.pairs)} pairs of {len(sampled.groups)} groups;"
            f" {sampled.num_tied} groups are ties"
        )
        return StepReport(
            step=step,
            metrics=metrics,
            num_tokens=collected.num_completion_tokens,
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

    def paired(self, number: int, collected: CollectedStep) -> SampledRound:
        return sampled_round(number, collected.groups, collected.grades, self.options.pairs_per_prompt)

    def load_weights(self) -> None:
        """Have the engine sample from the policy as it is now."""
        self.policy.require_as_made()
        load_checked(self.session.engine, ExportedWeights(self.policy), self.run.num_updates)

    def is_due(self, step: int, num_steps: int) -> bool:
        every = self.config.evaluation.every_steps
        return bool(every) and step % every == 0

    def evaluate(self, harness: Harness, *, full: bool) -> dict[str, float]:
        """Measure held-out problems: in full before and after, in brief in between."""
        self.load_weights()
        engine, questions = self.session.engine, self.session.questions()
        kept: list[ScoredCompletions] = []
        if not full:
            with harness.clock("evaluate"):
                problems = self.config.evaluation.brief_problems
                metrics = brief_evaluation(engine, questions, problems=problems, keep=kept.append)
                harness.evaluated(EvaluationReport(step=self.run.step, results=metrics, completions=kept))
            return metrics
        when: Literal["before", "after"] = "after" if self.run.step else "before"
        samples = self.config.evaluation.samples
        total = num_completions(questions, samples=samples)
        with harness.clock("evaluate"), harness.progress.stage(f"held-out problems {when} training", total) as advance:
            results, groups = full_evaluation(engine, questions, samples=samples, advance=advance, keep=kept.append)
        harness.evaluated(
            EvaluationReport(step=self.run.step, results=results, groups=groups, evaluation=when, completions=kept)
        )
        self.transcripts = [[group.prompt.text, group.graded_text(group.rollouts[0])] for group in groups[:SHOWN]]
        if not self.run.step:
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
        self.load_weights()
        began = perf_counter()
        sampled = self.paired(1, self.session.collector.collect(1, no_journal, Clock()))
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

    def table(self) -> list[tuple[str, str, str]]:
        if not self.run.after.get("num_problems"):
            return []
        results = {"before": self.run.before, "after": self.run.after}
        return [("held-out", "before", "after"), *comparison(results, self.session.questions().probes.values())]

    def transcript_lines(self) -> list[str]:
        both = zip(self.run.transcripts, self.transcripts, strict=True)
        return [line for before, after in both for line in side_by_side(before[0], before[1], after[1])]


def order_of(round_number: int) -> str:
    return f"pairs of round {round_number}"
