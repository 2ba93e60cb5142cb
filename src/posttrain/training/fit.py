"""The loop of `posttrain sft`, `reward-model` and `dpo`: a batch of rows or pairs, its gradient, an optimiser step."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from posttrain.config.reading import resolved_config
from posttrain.models.adapters.in_force import trains_adapter
from posttrain.models.loading.description import adapter_lines, model_lines
from posttrain.models.loading.saving import save_trained
from posttrain.models.memory.memory_plan import MemoryPlan
from posttrain.models.memory.model_shape import object_shape
from posttrain.models.policy import Policy
from posttrain.models.sharding import led_copy
from posttrain.options.model import ModelOptions, NewModelOptions
from posttrain.ranks.group import ONE_RANK, RankGroup
from posttrain.ranks.joining import joined
from posttrain.records import Example, Preference
from posttrain.runs.checkpoint import claim_threads
from posttrain.runs.curves import draw_curves
from posttrain.runs.files import writing
from posttrain.runs.folder import interrupted_lines, saved_recipe, shared_recipe
from posttrain.runs.harness import Harness, HarnessOptions
from posttrain.runs.planned_memory import held_by, machine_memory, memory_line, memory_warning
from posttrain.runs.progress import peak_memory_bytes
from posttrain.runs.reports import Run, StepReport, versions
from posttrain.runs.run_folder import RunFolder
from posttrain.runs.run_inputs import RunInputs, require_same_inputs
from posttrain.runs.run_steps import StartOptions
from posttrain.runs.tracker import require_trackers
from posttrain.training.fit_session import FitConfig, FitObjective, FitSession, Item

FIRST_STEPS = 3
"""Number of steps after which a run says how long it will take."""
PREVIEWED = 2
"""Number of rows or pairs that a dry run shows."""
SHOWN_CHARACTERS = 400
"""Characters to show of each part of a row or pair."""
LEARNED = "⟪", "⟫"
Kind = TypeVar("Kind", bound=FitConfig)
KindToRead = TypeVar("KindToRead", bound=FitConfig, contravariant=True)
Follows = Callable[[RankGroup], Run]
"""What the other ranks do instead of the run."""


class Opened(Protocol[KindToRead, Item]):
    """Loads the model and reads rows or pairs."""

    def __call__(
        self, config: KindToRead, *, ranks: RankGroup = ONE_RANK
    ) -> AbstractContextManager[FitSession[Item]]: ...


def run_fit(
    config: Kind,
    inputs: RunInputs,
    start: StartOptions,
    opened: Opened[Kind, Item],
    policy: Policy | None,
    follows: Follows | None = None,
) -> Run:
    """A run from its folder to its summary, of a caller's policy or of the recipe's model.

    Other ranks open the same, unless `follows` gives them something else to do.
    """
    require_trackers(config.run.report_to, config.tracker)
    resolved = resolved_config(config, adapter=None if policy is None else trains_adapter(policy.model))
    with joined(config.run.rank_timeout_seconds) as ranks:
        ranks.agree("the settings", lambda: shared_recipe(resolved))
        if not ranks.rank:
            return ranks.finish(lead_fit(resolved, inputs, start, opened, ranks))
        if follows is not None:
            return follows(ranks)
        from posttrain.training.following import FitFollower, follow_rank_0

        with claim_threads(resolved.run.threads) as threads, opened(resolved, ranks=ranks) as session:
            return follow_rank_0(FitFollower(session, threads), ranks, resolved.run.folder)


def lead_fit(config: Kind, inputs: RunInputs, start: StartOptions, opened: Opened[Kind, Item], ranks: RankGroup) -> Run:
    """The run of rank 0, or of the only process."""
    path, start = Path(config.run.folder), start.now(ranks)
    if start.resume:
        inputs = require_same_inputs(path, inputs, accept_changes=start.accept_changes)
    with claim_threads(config.run.threads) as threads, opened(config, ranks=ranks) as session:
        if start.resume:
            folder = RunFolder.resume(path)
        else:
            folder = RunFolder.create(path, saved_recipe(config), overwrite=config.run.overwrite)
            ranks.begins()  # from here on, restarted ranks resume: the folder is no longer new
        with Harness(folder, session.trained, harness_options(session, start)) as harness:
            notes = [*(harness.resume(threads) if start.resume else []), *inputs.notes]
            folder.write_inputs(inputs)
            folder.write_tokenizer(session.trained.policy.tokenizer)
            harness.start([*plan_lines(session), *notes])
            return fit(session, harness)


def harness_options(session: FitSession[Item], start: StartOptions) -> HarnessOptions:
    return HarnessOptions(
        run=replace(session.config.run, num_steps=session.num_steps),
        checkpoint=session.config.checkpoint,
        time_by_stage=session.objective.by_stage,
        watchers=start.watchers,
        score=session.objective.score,
        config=session.config,
        from_step=start.from_step,
        ranks=session.trained.policy.ranks,
        kept_from={"metrics.jsonl": 1},
    )


def fit(session: FitSession[Item], harness: Harness) -> Run:
    """Take the remaining steps, then measure, save and report the results."""
    objective, trained, folder = session.objective, session.trained, harness.folder
    seconds, measured_seconds, samples = list[float](), 0.0, False
    if not trained.step:
        objective.begin(harness)
        metrics = objective.evaluate(harness, full=True)
        measured_seconds = harness.clock.seconds["evaluate"]
        folder.append_metrics(0, metrics)
        harness.progress.compare_with(metrics)
    with harness.naming_the_step():
        for taken, step in enumerate(harness.steps()):
            report = harness.record(take_step(session, harness, step))
            seconds.append(report.seconds["update"])
            samples = samples or bool(report.groups)  # a round's first step also samples pairs
            if taken + 1 == FIRST_STEPS < session.num_steps and not samples:
                harness.progress.note(time_line(session, median(seconds), measured_seconds))
    if harness.interruption and trained.step < session.num_steps:
        harness.end({}, interrupted_lines(folder.path, trained.step, harness.interruption.reason, harness.command))
        return Run(folder=folder.path, summary={}, interrupted=True)
    return conclude(session, harness)


def take_step(session: FitSession[Item], harness: Harness, step: int) -> StepReport:
    """One step: a batch, its update, and a measurement if one is due."""
    objective, run = session.objective, session.trained.run
    report = objective.before_step(step, harness)
    tokens = run.num_tokens
    with harness.clock("update"):
        batch, metrics = session.learn(step)
    if objective.is_due(step, session.num_steps):
        metrics |= objective.evaluate(harness, full=False)
    return replace(
        report,
        metrics={**report.metrics, **metrics},
        num_tokens=report.num_tokens + run.num_tokens - tokens,
        pairs=[each for each in batch if isinstance(each, Preference)],
    )


def conclude(session: FitSession[Item], harness: Harness) -> Run:
    """Measure the trained policy, save it, and report the results."""
    objective, trained, folder = session.objective, session.trained, harness.folder
    if objective.measures_at_end or not objective.is_due(trained.step, session.num_steps):
        with harness.naming_the_step():
            metrics = objective.evaluate(harness, full=True)
        if metrics:
            folder.append_metrics(trained.step, metrics)
        trained.add_seconds(harness.clock.seconds)
    run = trained.run
    summary: dict[str, object] = {
        "before": run.before,
        "after": run.after,
        "steps": run.step,
        "seconds": trained.seconds,
        "tokens": run.num_tokens,
        "peak_memory_bytes": peak_memory_bytes(),
        "versions": versions(),
        **objective.summary(),
        **session.source.summary(),
    }
    objective.save(folder)
    harness.end(summary, objective.result_lines(folder.path))
    return Run(folder=folder.path, summary=summary)


def show_fit_plan(config: Kind, opened: Opened[Kind, Item]) -> None:
    config = resolved_config(config)
    with claim_threads(config.run.threads), opened(config) as session:
        objective = session.objective
        rehearsed = objective.rehearse()
        batch, began = session.source.batch(0, objective.options), perf_counter()
        lines = [*plan_lines(session), *rehearsed]
        if batch:
            objective.accumulate(batch)
            lines.append(time_line(session, perf_counter() - began))
            lines += preview_lines(objective, batch[:PREVIEWED])
        print("\n".join(lines))


def time_line(session: FitSession[Item], step_seconds: float, measured_seconds: float = 0.0) -> str:
    """Minutes of all steps, and of the held-out measurements if one was timed."""
    count, objective = session.num_steps, session.objective
    times = sum(objective.is_due(step, count) for step in range(1, count + 1))
    held_out = f", {measured_seconds:.1f} s for each of {times} held-out measurements" if measured_seconds else ""
    minutes = (count * step_seconds + times * measured_seconds) / 60
    limit = session.config.run.time_limit_minutes
    ends = "" if limit is None or minutes <= limit else f", ended after {limit:g} by run.time_limit_minutes"
    return f"time       about {minutes:.1f} min{ends}: {step_seconds:.2f} s per step{held_out}"


def plan_lines(session: FitSession[Item]) -> list[str]:
    """The plan of a run."""
    objective, policy, options = session.objective, session.objective.policy, session.objective.options
    on_cuda, shape = policy.device.type == "cuda", object_shape(policy.model)
    memory = MemoryPlan(shape, held_by(policy, objective.memory(shape, on_cuda=on_cuda)))
    machine = machine_memory(on_cuda=on_cuda, ranks=policy.ranks.size)
    first, *more = session.source.described()
    return [
        *model_lines(policy, session.model_name),
        *adapter_lines(policy, options),
        f"data       {first}; {objective.num_held_out} held out",
        *(f"           {line}" for line in more),
        *objective.loss_lines(),
        f"one step   {objective.batch_words()}, learning rate {options.largest_rate:g} ({options.schedule})",
        f"steps      {session.num_steps}" + ("" if options.num_epochs is None else f": {options.num_epochs:g} epochs"),
        memory_line(memory, machine),
        *memory_warning(memory, machine),
        f"folder     {session.config.run.folder}",
    ]


def preview_lines(objective: FitObjective[Item], items: Sequence[Item]) -> list[str]:
    """Rows or pairs as the model reads them, line by line."""
    tokenizer = objective.policy.tokenizer
    lines = [f"The first ones; tokens in {LEARNED[0]}brackets{LEARNED[1]} are learned, the rest are only read:"]
    for item in items:
        if isinstance(item, Example):
            lines.append(f"--- {len(item.tokens)} tokens, {item.num_sampled} learned")
            lines += marked(tokenizer, item).split("\n")
        else:
            prompt = item.prompt.tokens
            margin = "" if item.margin is None else f", margin {item.margin:g}"
            lines.append(f"--- {item.where}: {len(prompt)} tokens of prompt{margin}")
            lines += shortened(str(tokenizer.decode([*prompt]))).split("\n")
            for name, tokens in zip(("chosen", "rejected"), objective.answers(item), strict=True):
                lines.append(f"{name:8} {LEARNED[0]}{shortened(str(tokenizer.decode([*tokens])))}{LEARNED[1]}")
    return lines


def marked(tokenizer: PreTrainedTokenizerBase, example: Example) -> str:
    runs = groupby(zip(example.tokens, example.sampled, strict=True), key=itemgetter(1))
    written = [(learned, shortened(str(tokenizer.decode([token for token, _ in run])))) for learned, run in runs]
    return "".join(f"{LEARNED[0]}{text}{LEARNED[1]}" if learned else text for learned, text in written)


def shortened(text: str) -> str:
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} … {text[-half:]}"


def model_card(folder: Path, tag: str, about: str) -> str:
    return (
        f"---\nlibrary_name: transformers\ntags: [posttrain, {tag}]\n---\n\n# {folder.name}\n\n{about}\n\n"
        "The recipe is `config.yaml` in the run folder.\n"
    )


def write_model(
    model: ModelOptions | NewModelOptions, policy: Policy, run: RunFolder, *, curves: bool, card: str
) -> None:
    """Save the model or adapter of a finished run, and its curves."""
    adapter = model.adapter if isinstance(model, ModelOptions) else None
    folder = run.path
    with writing(folder / "model", folder):
        save_trained(led_copy(policy), folder, "adapter" if adapter is None else adapter.save, card)
    if curves:
        with writing(folder / "curves.png", folder):
            draw_curves(folder / "metrics.jsonl", folder / "curves.png", title=folder.name)
