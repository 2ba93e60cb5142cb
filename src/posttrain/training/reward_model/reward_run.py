"""Training of a reward model: a language model with a scalar head learns which answers are preferred."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import nn

from posttrain.config import RewardModelConfig
from posttrain.models.classifiers.heads import ScoreHead, TextScorer, new_scorer
from posttrain.models.classifiers.saved_classifier import TextReading, require_classifier, save_classifier
from posttrain.models.loading.new_model import policy_of_run
from posttrain.models.loading.saving import require_loadable, whole_folder
from posttrain.models.memory.memory_parts import MemorySetup
from posttrain.models.memory.model_shape import ModelShape
from posttrain.models.policy import Policy
from posttrain.models.sharding import led_copy, shard_head, sharded, whole_head
from posttrain.options.pairs import RewardTrainingOptions
from posttrain.ranks.group import ONE_RANK, RankGroup
from posttrain.records import Preference
from posttrain.runs.files import writing
from posttrain.runs.folder import shown
from posttrain.runs.named_inputs import inputs_of_run, policy_input
from posttrain.runs.planned_memory import pairs_setup
from posttrain.runs.reports import Run
from posttrain.runs.run_folder import HELD_OUT, RunFolder
from posttrain.runs.run_steps import StartOptions
from posttrain.runs.watchers import Watcher
from posttrain.tasks.dataset import Rows
from posttrain.tasks.preference_set import PreferenceSet
from posttrain.tasks.row_files.rows import NO_ROWS_GIVEN, GivenRows
from posttrain.training.fit import run_fit, show_fit_plan
from posttrain.training.fit_session import FitObjective, FitSession, pairs_of_rows, scored_pairs
from posttrain.training.optimizer import POLICY, OwnOptimizer, ParameterGroup, new_optimizer
from posttrain.training.pair_updates import PairScores, accumulate_scores, pair_scores, read_answers
from posttrain.training.reward_model import calibration
from posttrain.training.trained import FitState

HEAD = "head"
"""The head's name in checkpoints and metrics."""
CARD = """# Reward model

Trained by `posttrain reward-model` from `{base}`: one number for a prompt and an answer, higher for preferred answers.
{measured}
It loads in `AutoModelForSequenceClassification` as a classifier with one label, which finds the end of a row by the
folder's pad token.  In posttrain it is a reward (`model` of an item of `rewards`).  It reads the same format as in
training: a conversation through its chat template; plain text as prompt, answer and stop token.  Scores do not have a
unit: their difference is the log-odds of a preference.

Do not generate text with it.  If the embedding is also the output layer, `AutoModelForCausalLM` loads the folder
without an error, but the body has learned to judge, so its text is useless.
"""


@dataclass(slots=True, kw_only=True)
class RewardModelState(FitState):
    """Counters of a reward model's run; a prompt's tokens count with each answer."""

    cursor: ClassVar[str] = "next_pair"
    next_pair: int = 0
    best_accuracy: float | None = None

    def saw_evaluation(self, results: Mapping[str, object]) -> None:
        FitState.saw_evaluation(self, results)
        if self.step:
            self.best_accuracy = max(cast(float, results["accuracy"]), self.best_accuracy or 0.0)


class RewardModelObjective(FitObjective[Preference]):
    """-log σ(r_chosen - r_rejected - margin) + c (r_chosen + r_rejected)², the mean over pairs by their weights."""

    options: RewardTrainingOptions
    run: RewardModelState

    def __init__(self, config: RewardModelConfig, scorer: TextScorer, pairs: PreferenceSet) -> None:
        self.config, self.scorer, self.pairs = config, scorer, pairs
        self.policy, self.options, self.held_out = scorer.policy, config.reward_model, pairs.held_out
        self.run = RewardModelState()

    def optimizer(self) -> torch.optim.Optimizer:
        head, scale = self.scorer.head.parameters(), self.options.head_rate_scale
        groups = [
            ParameterGroup(module=POLICY, parameters=self.scorer.body_parameters),
            ParameterGroup(module=HEAD, parameters=head, rate_scale=scale),
        ]
        return new_optimizer(groups, self.options)

    def head(self) -> Mapping[str, nn.Module]:
        return {HEAD: self.scorer.head}

    def whole_head(self) -> ScoreHead:
        return whole_head(self.scorer.head)

    def accumulate(self, batch: Sequence[Preference]) -> dict[str, float]:
        loss, scores = accumulate_scores(self.scorer, batch, self.options)
        return {"loss": loss, **scores.metrics()}

    def num_tokens(self, batch: Sequence[Preference]) -> int:
        return sum(len(pair.prompt.tokens) + len(answer) for pair in batch for answer in read_answers(pair))

    def scored(self) -> tuple[calibration.HeldOutPairs, PairScores]:
        with self.policy.ranks.leading("scored"):
            scores = pair_scores(self.scorer, self.held_out, self.options.tokens_per_microbatch)
        return calibration.held_out_pairs(scores, self.held_out, self.options.calibration_bins), scores

    def measured(self) -> tuple[dict[str, float], Mapping[str, object]]:
        found, _ = self.scored()
        return found.metrics(), found.summary()

    def memory(self, shape: ModelShape, *, on_cuda: bool) -> MemorySetup:
        longest = max(pair.num_tokens for pair in self.pairs.training)
        return pairs_setup(self.config.model, self.options, shape, longest=longest, on_cuda=on_cuda)

    def loss_lines(self) -> list[str]:
        options = self.options
        with_margin = sum(pair.margin is not None for pair in self.pairs.training)
        margins = f", margins of {with_margin} pairs times {options.margin_scale:g}" if with_margin else ""
        saved = (
            ["           the adapter is merged into the base when the model is saved"]
            if self.config.model.adapter
            else []
        )
        return [
            f"head       {self.scorer.head.weight.shape[1]} weights, read at the last token of prompt and answer",
            *saved,
            f"loss       -log σ(r_chosen - r_rejected), centring {options.center_coefficient:g}{margins}",
        ]

    def batch_words(self) -> str:
        return f"{self.options.pairs_per_batch} pairs"

    def answers(self, pair: Preference) -> tuple[Sequence[int], Sequence[int]]:
        return read_answers(pair)

    def save(self, folder: RunFolder) -> None:
        """Save the model with its card, curves and, where pairs are held out, their scores and calibration."""
        reading = TextReading(
            stop_token_ids=self.policy.stop_ids,
            template_options=self.config.model.template_options,
            plain=all(pair.prompt.messages is None for pair in self.pairs.training),
        )
        found, scores = self.scored() if self.held_out else (None, None)
        path, measured = folder.path, ""
        if found is not None:
            low, high = found.accuracy_interval
            measured = (
                f"\nIt orders {found.accuracy:.1%} of {found.num_pairs} held-out pairs as people or programs did"
                f" (95%: {low:.1%} to {high:.1%}).\n"
            )
        card = CARD.format(base=self.config.model.path, measured=measured)
        policy = led_copy(self.policy)
        with self.policy.ranks.leading("whole_head"):
            scorer = replace(self.scorer, policy=policy, head=self.whole_head())
        with writing(path / "model", path), whole_folder(path / "model") as made:
            classifier = save_classifier(scorer, made, reading, card)
        require_loadable(classifier, path / "model")
        if self.config.run.curves:
            with writing(path / "curves.png", path):
                calibration.draw_pair_curves(path / "metrics.jsonl", path / "curves.png", title=path.name)
        if found is not None and scores is not None:
            with writing(path / "calibration.png", path):
                calibration.draw_calibration(found.summary(), path / "calibration.png", title=path.name)
            numbers = scores.chosen.tolist(), scores.rejected.tolist()
            folder.write_rows(HELD_OUT, scored_pairs(self, *numbers))

    def summary(self) -> dict[str, object]:
        return {"best_accuracy": self.run.best_accuracy, "pairs_learned": self.run.next_pair}

    def result_lines(self, folder: Path) -> list[str]:
        before, after, folder = self.run.before, cast(dict[str, Any], self.run.after), shown(folder)
        results = ["no pairs were held out, so there is no result"]
        if after:
            low, high = after["accuracy_interval"]
            first = f"{before['accuracy']:.3f} → " if before else ""
            results = [
                f"held-out accuracy {first}{after['accuracy']:.3f} [{low:.3f}, {high:.3f}]",
                f"of {after['num_pairs']} pairs",
                f"{calibration.calibration_words(after)}, mean margin {after['margin']:.2f}",
            ]
        return [
            *results,
            f"model        {folder / 'model'}",
            f"use it       posttrain rl RECIPE.yaml --rewards {folder / 'model'}",
        ]


def train_reward_model(
    config: RewardModelConfig,
    *,
    policy: Policy | None = None,
    head: ScoreHead | None = None,
    rows: Rows | None = None,
    held_out_rows: Rows | None = None,
    optimizer: OwnOptimizer | None = None,
    watchers: Sequence[Watcher] = (),
    resume: bool = False,
    from_step: int | None = None,
    accept_changes: bool = False,
) -> Run:
    """Train a reward model on pairs of answers, and save it to RUN/model.

        L = -log σ(r_chosen - r_rejected - margin) + c (r_chosen + r_rejected)²      mean over pairs, by their weights

    The saved folder loads in `AutoModelForSequenceClassification`, and as `rewards: [{model: FOLDER}]`.  For callers in
    Python: `policy` (made by `posttrain.as_policy`; its parameters with `requires_grad` are trained) replaces the
    config's model, and `head` a new head.  The other arguments are those of `posttrain.train_sft`.
    """
    start = StartOptions(watchers=watchers, resume=resume, from_step=from_step, accept_changes=accept_changes)
    given = GivenRows(rows=rows, held_out=held_out_rows)
    inputs = inputs_of_run(config, policy_input(policy), rows=given.rows, held_out_rows=given.held_out)
    opened = partial(open_reward_model, policy=policy, given=given, head=head, optimizer=optimizer)
    return run_fit(config, inputs, start, opened, policy)


def open_reward_model(
    config: RewardModelConfig,
    policy: Policy | None = None,
    given: GivenRows = NO_ROWS_GIVEN,
    head: ScoreHead | None = None,
    optimizer: OwnOptimizer | None = None,
    *,
    ranks: RankGroup = ONE_RANK,
) -> AbstractContextManager[FitSession[Preference]]:
    """Load the body, add a head, and read all pairs."""
    seed = config.run.seed
    loaded, name = policy_of_run(config.model, policy, seed=seed, saves_whole=True, ranks=ranks)
    require_classifier(loaded)
    policy = sharded(loaded)
    pairs = pairs_of_rows(config, config.reward_model, policy, given)
    scorer = new_scorer(policy, seed=seed) if head is None else TextScorer(policy, head)
    shard_head(scorer.head, policy)
    objective = RewardModelObjective(config, scorer, pairs)
    return nullcontext(FitSession(config, name, pairs, objective, own_optimizer=optimizer))


show_reward_plan = partial(show_fit_plan, opened=open_reward_model)
