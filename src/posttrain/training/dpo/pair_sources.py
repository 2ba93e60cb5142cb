"""Where the pairs of a run come from, and what is measured beside them: rows, or rounds of the policy's own tries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from posttrain.config import DpoConfig
from posttrain.generation.groups import require_room_for
from posttrain.models.loading.exported_weights import ExportedWeights
from posttrain.options.dpo import DpoOptions
from posttrain.records import Preference
from posttrain.runs.harness import Harness
from posttrain.runs.intervals import mean_intervals, share_of_pairs_interval
from posttrain.runs.reports import EvaluationReport, StepReport
from posttrain.tasks.base import longest_prompts
from posttrain.tasks.dataset import count_text
from posttrain.tasks.preference_set import PreferenceSet
from posttrain.training.collector import CollectedStep
from posttrain.training.dpo.dpo_state import TrainedOnPairs
from posttrain.training.dpo.pair_update import MeasuredPairs
from posttrain.training.dpo.sampled_pairs import SampledRound, sampled_round
from posttrain.training.evaluation import brief_evaluation, full_evaluation, num_completions
from posttrain.training.report import SHOWN, held_out_metrics
from posttrain.training.session import Session, require_sound_rows

WITH_INTERVAL = ("pairs/accuracy", "pairs/margin")
"""Of held-out pairs, the means that come with an interval, beside the loss."""


class PairSource(Protocol):
    """Where pairs come from."""

    @property
    def pairs(self) -> PreferenceSet:
        """Those that there are at the beginning."""
        ...

    @property
    def num_steps(self) -> int:
        """Updates in all."""
        ...

    def begin(self, trained: TrainedOnPairs, harness: Harness) -> dict[str, float]:
        """Before the first update: what takes a pass over the pairs, and the first measurement; its metrics."""
        ...

    def before_step(self, step: int, trained: TrainedOnPairs, harness: Harness) -> SampledRound | None:
        """Put new pairs in place of the old ones where a round begins with the step, and return it."""
        ...

    def measured(self, trained: TrainedOnPairs, harness: Harness) -> dict[str, float]:
        """The metrics of a measurement on held-out pairs or problems, where one is due after a step."""
        ...

    def described(self) -> Sequence[str]:
        """What the plan says of them, in lines of which the first goes on from a heading."""
        ...

    def summary(self) -> Mapping[str, object]:
        """What summary.json says of them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPairs:
    """The pairs of rows, and held-out pairs that are measured on."""

    pairs: PreferenceSet
    options: DpoOptions
    num_steps: int

    def begin(self, trained: TrainedOnPairs, harness: Harness) -> dict[str, float]:
        """The log-probs of the reference, where they are kept, and the held-out pairs before training."""
        with harness.clock("reference"):
            trained.begin_rows()
        return self._measured(trained, harness)

    def before_step(self, step: int, trained: TrainedOnPairs, harness: Harness) -> SampledRound | None:
        """There are no others."""
        return None

    def measured(self, trained: TrainedOnPairs, harness: Harness) -> dict[str, float]:
        """Every so many steps, and after the last."""
        return self._measured(trained, harness) if self._is_due(trained.step) else {}

    def measured_at_end(self, trained: TrainedOnPairs, harness: Harness) -> dict[str, float]:
        """Of a run that was stopped at a step that is not measured otherwise."""
        return {} if self._is_due(trained.step) else self._measured(trained, harness)

    def _is_due(self, step: int) -> bool:
        return step % self.options.eval_every == 0 or step == self.num_steps

    def _measured(self, trained: TrainedOnPairs, harness: Harness) -> dict[str, float]:
        if not self.pairs.held_out:
            return {}
        with harness.clock("evaluate"):
            found = trained.measured()
            metrics = held_out_pair_metrics(found, self.pairs.held_out)
            harness.evaluated(EvaluationReport(step=trained.step, results=metrics))
        results: dict[str, object] = {name.removeprefix("eval/"): value for name, value in metrics.items()}
        if trained.step:
            trained.run.after = results
        else:
            trained.run.before = results
        return metrics

    def described(self) -> Sequence[str]:
        """How many there are, and which were left out."""
        first, *more = self.pairs.described()
        return [f"{first}; {len(self.pairs.held_out)} held out", *more]

    def summary(self) -> Mapping[str, object]:
        """The same as data."""
        return self.pairs.summary()


def held_out_pair_metrics(found: MeasuredPairs, pairs: Sequence[Preference]) -> dict[str, float]:
    """What held-out pairs say under the names of docs/metrics.md; intervals by bootstrap over prompts."""
    told = {"loss": found.losses, **{each: found.columns[each] for each in WITH_INTERVAL}}
    metrics = {f"eval/{name}": value for name, value in found.means().items()}
    metrics["eval/loss"] = found.losses.mean().item()
    prompts = [pair.prompt.tokens for pair in pairs]
    intervals = mean_intervals(prompts, torch.stack([*told.values()], dim=1).detach().numpy())
    for name, (low, high) in zip(told, intervals, strict=True):
        if name == "pairs/accuracy":
            low, high = share_of_pairs_interval(prompts, metrics["eval/pairs/accuracy"], (low, high))
        metrics[f"eval/{name}_low"], metrics[f"eval/{name}_high"] = low, high
    return metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPairs:
    """Pairs of the policy's own completions, sampled and judged as `posttrain rl` does it."""

    config: DpoConfig
    session: Session
    """Of the recipe's sampling half; its learner has nothing to do."""

    @property
    def pairs(self) -> PreferenceSet:
        """None yet."""
        return PreferenceSet(seed=self.config.run.seed, training=[], held_out=[])

    @property
    def num_steps(self) -> int:
        """Those of all rounds."""
        return self.config.num_steps

    def require_sound(self) -> None:
        """Refuse prompts that leave no room for a completion, and rows that no reward can judge."""
        for prompt in [*longest_prompts(self.session.task), *self.session.questions().prompts]:
            require_room_for(prompt, self.session.engine)
        require_sound_rows(self.session)

    def begin(self, trained: TrainedOnPairs, harness: Harness) -> dict[str, float]:
        """The held-out problems before training."""
        trained.run.before, trained.run.transcripts = self.measured_in_full(trained, harness, "before training")
        return held_out_metrics(trained.run.before, self.session.questions().probes)

    def before_step(self, step: int, trained: TrainedOnPairs, harness: Harness) -> SampledRound | None:
        """Sample, judge and pair, where the step is the first of a round."""
        number, place = divmod(step - 1, self.config.dpo.steps_per_round)
        if place:
            return None
        self.load_weights(trained)
        journal = harness.folder.journal_scores
        collected = self.session.collector.collect(
            number + 1, lambda _, groups, grades: journal(step, groups, grades), harness.clock
        )
        sampled = self.paired(number + 1, collected)
        with harness.clock("reference"):
            trained.begin_round(number + 1, sampled.pairs)
        trained.run.completion_tokens += collected.num_completion_tokens
        trained.run.rounds.append(told_of(sampled))
        harness.progress.note(
            f"round {number + 1}/{self.config.dpo.rounds}: {len(sampled.pairs)} pairs of {len(sampled.groups)} groups;"
            f" {sampled.num_tied} groups are ties"
        )
        return sampled

    def paired(self, number: int, collected: CollectedStep) -> SampledRound:
        """The pairs of what was collected."""
        return sampled_round(number, collected.groups, collected.grades, self.config.dpo.pairs_per_prompt)

    def load_weights(self, trained: TrainedOnPairs) -> None:
        """Have the engine sample from the policy as it is now."""
        self.session.policy.require_as_made()
        self.session.engine.load(ExportedWeights(trained.policy), trained.run.num_updates)

    def measured(self, trained: TrainedOnPairs, harness: Harness) -> dict[str, float]:
        """An evaluation in brief, every so many steps; in full after the last."""
        every = self.config.evaluation.every_steps
        if not every or trained.step % every:
            return {}
        self.load_weights(trained)
        with harness.clock("evaluate"):
            problems = self.config.evaluation.brief_problems
            metrics = brief_evaluation(self.session.engine, self.session.questions(), problems=problems)
            harness.evaluated(EvaluationReport(step=trained.step, results=metrics))
        return metrics

    def measured_in_full(
        self, trained: TrainedOnPairs, harness: Harness, when: str
    ) -> tuple[dict[str, object], list[list[str]]]:
        """What summary.json says of the held-out problems, and the completions that the end shows."""
        self.load_weights(trained)
        questions, samples = self.session.questions(), self.config.evaluation.samples
        total = num_completions(questions, samples=samples)
        with (
            harness.clock("evaluate"),
            harness.progress.stage(f"held-out problems {when}", total) as advance,
        ):
            results, groups = full_evaluation(self.session.engine, questions, samples=samples, advance=advance)
        harness.evaluated(EvaluationReport(step=trained.step, results=results, groups=groups))
        return results, [[group.prompt.text, group.graded_text(group.rollouts[0])] for group in groups[:SHOWN]]

    def described(self) -> Sequence[str]:
        """What a round is."""
        options, rollout = self.config.dpo, self.config.rollout
        judges = ", ".join(f"{each.name} × {each.settings.weight:g}" for each in self.session.rewards)
        return [
            (
                f"{count_text(options.rounds, 'round')} of {count_text(options.prompts_per_round, 'prompt')} ×"
                f" {count_text(rollout.group_size, 'completion')}"
                f" (limit {rollout.max_completion_tokens}), at most {options.pairs_per_prompt} pairs of a prompt"
            ),
            f"task {self.session.task.name}, {len(self.session.questions().prompts)} held-out problems",
            f"judged by {judges}",
        ]

    def summary(self) -> Mapping[str, object]:
        """Which rewards judged."""
        return {"rewards": {each.name: each.settings.weight for each in self.session.rewards}}


def told_of(sampled: SampledRound) -> dict[str, object]:
    """What summary.json says of a round."""
    metrics = sampled.metrics()
    told = ("pairs/num", "pairs/frac_tied", "pairs/reward_gap", "reward", "completions/mean_length")
    return {"round": sampled.number, **{name: metrics[name] for name in told if name in metrics}}


def step_report(
    trained: TrainedOnPairs, metrics: Mapping[str, float], sampled: SampledRound | None, *, num_tokens: int
) -> StepReport:
    """What the watchers are told of a step; of the first of a round also what was sampled."""
    if sampled is None:
        return StepReport(step=trained.step, metrics=metrics, num_tokens=num_tokens, pairs=trained.learned)
    return StepReport(
        step=trained.step,
        pairs=trained.learned,
        metrics={**sampled.metrics(), **metrics},
        num_tokens=num_tokens + sum(len(each.tokens) for group in sampled.groups for each in group.rollouts),
        groups=sampled.groups,
        grades=sampled.grades,
        advantages=sampled.sides,
    )
