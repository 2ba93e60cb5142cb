"""Supervised training of a loaded or new model on demonstrations or rows."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from posttrain.batch import packed
from posttrain.config import SftConfig
from posttrain.errors import UserError
from posttrain.models.conversation_masks import Masking
from posttrain.models.forward import Completions, ForwardNeeds, TokenParts
from posttrain.models.loading.new_model import policy_of_run
from posttrain.models.memory.memory_parts import MemorySetup
from posttrain.models.memory.model_shape import ModelShape
from posttrain.models.policy import Policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.models.sharding import sharded
from posttrain.models.shared_prompt.fused import gradients_in_place
from posttrain.models.transfers import on_cpu
from posttrain.options.dataset import DatasetOptions
from posttrain.options.model import ModelOptions, run_model
from posttrain.options.training import SftOptions
from posttrain.ranks.group import ONE_RANK, RankGroup
from posttrain.records import Example
from posttrain.runs.folder import shown
from posttrain.runs.intervals import RESAMPLES
from posttrain.runs.named_inputs import inputs_of_run, policy_input
from posttrain.runs.planned_memory import sft_setup
from posttrain.runs.reports import Run
from posttrain.runs.run_folder import RunFolder
from posttrain.runs.run_steps import StartOptions
from posttrain.runs.watchers import Watcher
from posttrain.tasks.dataset import Rows
from posttrain.tasks.row_files.rows import NO_ROWS_GIVEN, GivenRows
from posttrain.training.fit import run_fit, show_fit_plan, write_model
from posttrain.training.fit_session import FitObjective, FitSession
from posttrain.training.optimizer import OwnOptimizer
from posttrain.training.sft.learned_rows import DemonstrationSet, RowExamples, demonstrations_of, row_examples
from posttrain.training.trained import FitState

DEMONSTRATIONS = 32
"""Number of held-out examples whose token log-probs are saved at each measurement."""


def learned_tokens(policy: Policy, examples: Sequence[Example], *, statistics: bool = False) -> TokenParts:
    """Log-probs of the learned tokens, and with `statistics` their entropies and accuracy.

    For the forward pass, a prompt ends before the first learned token.
    """
    pairs = [(example, example.sampled.index(True)) for example in examples]
    batch = Completions(
        [example.tokens[:first] for example, first in pairs],
        [example.tokens[first:] for example, first in pairs],
        range(len(examples)),
        sampled=torch.tensor([learned for example, first in pairs for learned in example.sampled[first:]]),
    )
    return policy.forward.completion_logprobs(batch, ForwardNeeds(statistics=statistics))


def accumulate_examples(
    policy: Policy, examples: Sequence[Example], tokens_per_microbatch: int, *, measure_entropy: bool = False
) -> dict[str, float]:
    """Add the gradient of the batch's loss, a micro-batch at a time; returns the loss in nats per token.

    L = -(1/n) Σ_learned tokens log π(token)      n: learned tokens of the whole batch, never of a micro-batch

    With `measure_entropy`, also returns the mean entropy and the share of tokens that are the likeliest.
    """
    count = sum(example.num_sampled for example in examples)
    found = []
    for dealt in policy.ranks.deal(dealt_out(policy, examples, tokens_per_microbatch), inputs_of_examples):
        with gradients_in_place():
            parts = learned_tokens(policy, dealt.item, statistics=measure_entropy)
            assert parts.logprobs is not None
            loss = -parts.logprobs.sum() / count
        dealt.weighed(loss).backward()
        found.append((dealt, {"loss": loss.detach(), **statistics_of(parts)}))
    read = iter(on_cpu([number for _, numbers in found for number in numbers.values()]))
    there = [(dealt, {name: next(read).item() for name in numbers}) for dealt, numbers in found]
    sums: dict[str, float] = {}
    for numbers in policy.ranks.in_order(there):
        for name, value in numbers.items():
            sums[name] = sums.get(name, 0.0) + value
    total = sums.pop("loss", 0.0)
    return {"loss": total, **{name: value / count for name, value in sums.items()}}


def statistics_of(parts: TokenParts) -> dict[str, Tensor]:
    """Sums over tokens."""
    if parts.entropies is None or parts.likeliest is None:
        return {}
    return {"entropy": parts.entropies.sum(), "mean_token_accuracy": parts.likeliest.sum()}


def held_out_loss(policy: Policy, examples: Sequence[Example], tokens_per_microbatch: int) -> dict[str, float]:
    """The loss on one or more held-out examples, and the statistics of their learned tokens.

    The loss is in nats per token; `loss_low` and `loss_high` are its 95% bootstrap interval over examples.
    """
    return measure_examples(policy, examples, tokens_per_microbatch)[0]


@torch.no_grad()
def measure_examples(
    policy: Policy, examples: Sequence[Example], tokens_per_microbatch: int, *, num_kept: int = 0
) -> tuple[dict[str, float], list[list[float]]]:
    """The numbers of `held_out_loss`, and log π of the learned tokens of the first `num_kept` examples."""
    places = {id(example): place for place, example in enumerate(examples[:num_kept])}
    Found = tuple[float, list[float], dict[str, float], dict[int, list[float]]]

    def measured(micro: Sequence[Example]) -> Found:
        parts = learned_tokens(policy, micro, statistics=True)
        assert parts.logprobs is not None
        statistics = statistics_of(parts)
        found, *sums = on_cpu([-parts.logprobs.double(), *statistics.values()])
        split = found.split([example.num_sampled for example in micro])
        by_example = [part.sum().item() for part in split]
        both = zip(micro, split, strict=True)
        kept = {places[id(example)]: (-part).tolist() for example, part in both if id(example) in places}
        named = {name: number.item() for name, number in zip(statistics, sums, strict=True)}
        return found.sum().item(), by_example, named, kept

    micro_batches = dealt_out(policy, examples, tokens_per_microbatch)
    counts = [example.num_sampled for micro in micro_batches for example in micro]
    losses: list[float] = []
    logprobs: dict[int, list[float]] = {}
    total, right, entropy = 0.0, 0.0, 0.0
    for share, by_example, sums, kept in policy.ranks.each(micro_batches, inputs_of_examples, measured):
        total += share
        right, entropy = right + sums["mean_token_accuracy"], entropy + sums["entropy"]
        losses += by_example
        logprobs |= kept
    summed, tokens = np.asarray(losses), np.asarray(counts)
    draws = np.random.default_rng(0).integers(len(summed), size=(RESAMPLES, len(summed)))
    low, high = np.percentile(summed[draws].sum(axis=1) / tokens[draws].sum(axis=1), [2.5, 97.5])
    numbers = {
        "loss": total / sum(counts),
        "loss_low": float(low),
        "loss_high": float(high),
        "mean_token_accuracy": right / sum(counts),
        "entropy": entropy / sum(counts),
    }
    return numbers, [logprobs[place] for place in sorted(logprobs)]


def inputs_of_examples(examples: Sequence[Example]) -> int:
    return sum(example.num_inputs for example in examples)


def dealt_out(policy: Policy, examples: Sequence[Example], max_tokens: int) -> list[list[Example]]:
    """The micro-batches of a pass, small enough for each rank to get some."""
    budget = policy.ranks.budget(inputs_of_examples(examples), max_tokens)
    return [*microbatches(examples, budget, padded=policy.forward.padded)]


def microbatches(examples: Sequence[Example], max_tokens: int, *, padded: bool = False) -> Iterator[list[Example]]:
    """Micro-batches of examples of similar length, at most `max_tokens` inputs each; a longer example gets its own.

    With padded rows each example counts as many inputs as the longest of its micro-batch.
    """
    by_length = sorted(examples, key=lambda example: example.num_inputs)
    return packed(by_length, max_tokens, cost=lambda example, _: example.num_inputs, padded=padded)


@dataclass(slots=True, kw_only=True)
class SftState(FitState):
    """Counters of a supervised run."""

    cursor: ClassVar[str] = "next_example"
    next_example: int = 0
    eval_loss: float | None = None
    """Last held-out loss; in a finished run, of its final weights."""
    best_eval_loss: float | None = None

    def saw_evaluation(self, results: Mapping[str, object]) -> None:
        FitState.saw_evaluation(self, results)
        if self.step:
            loss = self.eval_loss = cast(float, results["loss"])
            self.best_eval_loss = loss if self.best_eval_loss is None else min(loss, self.best_eval_loss)


class SftObjective(FitObjective[Example]):
    """The mean of -log π over the learned tokens of a batch, in nats per token."""

    options: SftOptions
    run: SftState

    def __init__(self, config: SftConfig, policy: Policy, held_out: Sequence[Example]) -> None:
        self.config, self.policy, self.options, self.held_out = config, policy, config.sft, held_out
        self.run = SftState()
        self.kept_logprobs: list[list[float]] = []
        """Of the first held-out examples, as measured last."""

    def accumulate(self, batch: Sequence[Example]) -> dict[str, float]:
        budget, entropy = self.options.tokens_per_microbatch, self.options.measure_entropy
        return accumulate_examples(self.policy, batch, budget, measure_entropy=entropy)

    def num_tokens(self, batch: Sequence[Example]) -> int:
        return sum(len(example.tokens) for example in batch)

    def measured(self) -> tuple[dict[str, float], Mapping[str, object]]:
        budget = self.options.tokens_per_microbatch
        found, self.kept_logprobs = measure_examples(self.policy, self.held_out, budget, num_kept=DEMONSTRATIONS)
        results: dict[str, object] = {name: found[name] for name in ("loss", "mean_token_accuracy")}
        results["loss_interval"] = [found["loss_low"], found["loss_high"]]
        return {f"eval/{name}": value for name, value in found.items()}, results

    def keep_measured(self, folder: RunFolder) -> None:
        folder.write_demonstrations(self.run.step, self.held_out[: len(self.kept_logprobs)], self.kept_logprobs)

    def memory(self, shape: ModelShape, *, on_cuda: bool) -> MemorySetup:
        return sft_setup(self.config, shape, on_cuda=on_cuda)

    def batch_words(self) -> str:
        options = self.options
        longest = min(options.max_length or self.policy.max_positions, self.policy.max_positions)
        most = [f"{options.rows_per_batch} rows"] if options.rows_per_batch else []
        if not most or options.rows_per_batch * longest > options.tokens_per_batch:  # else the rows are never full
            most.append(f"{options.tokens_per_batch} tokens")
        return " or ".join(most)

    def save(self, folder: RunFolder) -> None:
        write_model(self.config.model, self.policy, folder, curves=self.config.run.curves, card="")

    def summary(self) -> dict[str, object]:
        run = self.run
        return {"eval_loss": run.eval_loss, "best_eval_loss": run.best_eval_loss, "examples": run.next_example}

    def result_lines(self, folder: Path) -> list[str]:
        run, folder, rows = self.run, shown(folder), isinstance(self.config.task, DatasetOptions)
        result = "no rows were held out, so there is no held-out loss,"
        if run.eval_loss is not None:
            lowest = "" if run.eval_loss == run.best_eval_loss else f" (at its lowest {run.best_eval_loss:.4f})"
            first = f"{run.before['loss']:.4f} → " if run.before else ""
            result = f"held-out loss {first}{run.eval_loss:.4f} nats/token{lowest}"
        return [
            f"{result} after {run.num_tokens / 1e6:.1f} M tokens",
            f"model        {run_model(folder)}",
            f"talk to it   posttrain chat {folder}" if rows else f"measure it   posttrain eval {folder}",
        ]


def train_sft(
    config: SftConfig,
    *,
    policy: Policy | None = None,
    rows: Rows | None = None,
    held_out_rows: Rows | None = None,
    optimizer: OwnOptimizer | None = None,
    watchers: Sequence[Watcher] = (),
    resume: bool = False,
    from_step: int | None = None,
    accept_changes: bool = False,
) -> Run:
    """Train a model on demonstrations or on rows, and save it to RUN/model.

    The loss is the mean of -log π over learned tokens.  For callers in Python: `policy` (made by
    `posttrain.as_policy`; its parameters with `requires_grad` are trained) replaces the config's model, `rows` the
    task's file, `optimizer` AdamW; `held_out_rows` are measured.  `watchers` see each step, measurement, checkpoint and
    the end.  `resume` continues the run in `config.run.folder` from its last checkpoint, `from_step` from that of an
    earlier step; `accept_changes` also if model or rows have changed.
    """
    start = StartOptions(watchers=watchers, resume=resume, from_step=from_step, accept_changes=accept_changes)
    given = GivenRows(rows=rows, held_out=held_out_rows)
    inputs = inputs_of_run(config, policy_input(policy), rows=given.rows, held_out_rows=given.held_out)
    return run_fit(config, inputs, start, partial(open_sft, policy=policy, given=given, optimizer=optimizer), policy)


def open_sft(
    config: SftConfig,
    policy: Policy | None = None,
    given: GivenRows = NO_ROWS_GIVEN,
    optimizer: OwnOptimizer | None = None,
    *,
    ranks: RankGroup = ONE_RANK,
) -> AbstractContextManager[FitSession[Example]]:
    """Load or make the model, and read all rows."""
    loaded, name = policy_of_run(config.model, policy, seed=config.run.seed, ranks=ranks)
    policy = sharded(loaded)
    source = example_source(config, policy, given)
    objective = SftObjective(config, policy, source.held_out(config.sft))
    return nullcontext(FitSession(config, name, source, objective, own_optimizer=optimizer))


show_sft_plan = partial(show_fit_plan, opened=open_sft)


def example_source(config: SftConfig, policy: Policy, given: GivenRows) -> RowExamples | DemonstrationSet:
    """The rows of the recipe, or of the caller, or the demonstrations of its task."""
    options = config.model.template_options if isinstance(config.model, ModelOptions) else {}
    most_tokens = None if config.sft.long_rows == "cut" else policy.max_positions
    renderer = TokenizerRenderer(policy.tokenizer, template_options=options, most_tokens=most_tokens)
    if isinstance(config.task, DatasetOptions):
        return row_examples(
            Masking.of(policy, renderer),
            config.task,
            config.sft,
            longest=min(config.sft.max_length or policy.max_positions, policy.max_positions),
            seed=config.run.seed,
            given=given,
        )
    if given != NO_ROWS_GIVEN:
        raise UserError(
            f"rows: the task is {config.task.name}, which makes its own demonstrations.  Use task ="
            ' {"name": "dataset"}.'
        )
    return DemonstrationSet(
        policy=policy,
        demonstrations=demonstrations_of(config.task, config.demonstrator, renderer, seed=config.run.seed),
        seed=config.run.seed,
        num_different=config.sft.num_demonstrations,
    )
