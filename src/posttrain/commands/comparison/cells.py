"""What `posttrain compare` runs: variants of one task, each by several seeds, at an equal budget.

Each cell is a process.  The result of a finished one is kept, so that a comparison continues where it stopped.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

from jaxtyping import Float64
from torch import Tensor

from posttrain.commands.comparison.comparison_report import CellResult, quantity, write_comparison
from posttrain.config import Config, as_recipe
from posttrain.errors import RunError, UserError
from posttrain.generation.conversations import sample_conversations
from posttrain.generation.request import GroupRequest, StreamKey
from posttrain.models.loading.model_folder import load_policy
from posttrain.options.bounds import value_at
from posttrain.options.dataset import DatasetOptions
from posttrain.options.model import ModelOptions, is_adapter_folder, run_model
from posttrain.options.rollout import SamplingParams
from posttrain.records import Rollout
from posttrain.runs.files import read_metrics, write_atomically
from posttrain.runs.folder import sole_writer
from posttrain.runs.interruption import KeptWork, run_posttrain
from posttrain.runs.named_inputs import changed_options, changed_since, first_changes
from posttrain.runs.progress import Progress
from posttrain.runs.reports import headline
from posttrain.tasks.base import held_out_prompts, training_prompts
from posttrain.training.session import open_session
from posttrain.training.update import group_logprobs

MEASURED_ALIKE = (
    *("model", "task", "evaluation", "sandbox"),
    *("run.seed", "run.threads", "rollout.max_completion_tokens"),
)
"""Sections and options that decide what is measured and where training starts; they must be equal in all variants."""
NO_STEP_LIMIT = 1_000_000
"""Maximum steps of a cell that is ended by its budget."""
PROMPTS = 64
"""Prompts for the KL between the trained policy and its start."""
SAMPLES = 4
"""Completions per prompt for that KL."""
BUDGET_FORMS = "tokens=200000, minutes=3, or both: tokens=200000,minutes=3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of every cell; the first limit that it reaches ends it, after the current step."""

    tokens: int | None = None
    """Completion tokens sampled to train on, including those of groups that dynamic sampling dropped."""
    minutes: float | None = None
    """Wall time of the run, evaluations included."""

    def __bool__(self) -> bool:
        return self.tokens is not None or self.minutes is not None

    def __str__(self) -> str:
        given = [f"{value:,} {unit}" for unit, value in asdict(self).items() if value is not None]
        return " or ".join(given) or "the recipes' own steps"


def read_budget(text: str) -> Budget:
    """The budget from a flag, such as `tokens=200000` or `minutes=3`; an empty text: no budget."""
    kinds: Mapping[str, type[int] | type[float]] = {"tokens": int, "minutes": float}
    given: dict[str, int | float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        if name in given:
            raise UserError(f"budget {text}: {name} is given twice.  Use {BUDGET_FORMS}.")
        try:
            given[name] = kinds[name](value.replace("_", ""))
        except (KeyError, ValueError):
            raise UserError(f"budget {text}: {part.strip()!r} is not a budget.  Use {BUDGET_FORMS}.") from None
        if not given[name] > 0:
            raise UserError(f"budget {text}: {name} must be greater than 0.")
    return Budget(**given)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of the comparison: a variant with a seed."""

    variant: str
    seed: int
    config: Config
    """With the seed, the budget and the folder of this cell."""

    @property
    def folder(self) -> Path:
        return Path(self.config.run.folder)

    @property
    def recipe_file(self) -> Path:
        """The recipe that it started with, next to its folder."""
        return self.folder.with_name(f"{self.folder.name}.yaml")

    @property
    def result_file(self) -> Path:
        return self.folder / "cell.json"

    @property
    def name(self) -> str:
        return f"{self.variant} seed {self.seed}"

    @property
    def recipe(self) -> str:
        return as_recipe(self.config)


def variant_names(recipes: Sequence[str]) -> list[str]:
    """The names of the variants: those of their files, without folder and ending."""
    names = [re.sub(r"[^\w.+-]", "_", Path(each).name.removesuffix(".yaml").removesuffix(".yml")) for each in recipes]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two recipes are called {name}.  Rename one: names must be unique.")
    return names


def make_cells(variants: Mapping[str, Config], *, seeds: int, budget: Budget, folder: Path) -> list[Cell]:
    """All cells, ordered by seed, so that an unfinished comparison is fair too.

    Raises UserError if the variants cannot be compared, or do not fit a budget.
    """
    (first, wanted), *_ = variants.items()
    by_reward = isinstance(wanted.task, Mapping) or wanted.task.name == DatasetOptions.name
    alike = (*MEASURED_ALIKE, *(("rewards",) if by_reward else ()))
    for name, config in variants.items():
        for option in alike:  # what decides how results are measured
            values = value_at(wanted, option), value_at(config, option)
            if values[0] != values[1]:
                shown = "\n".join(f"    {each}: {value}" for each, value in zip((first, name), values, strict=True))
                rule = f"{option} differs between {first} and {name}, so their results could not be compared"
                raise UserError(f"{rule}.\n{shown}\n  Give all variants the same value, for example with --base.")
        require_suits(name, config, budget)

    def config_of(config: Config, name: str, seed: int) -> Config:
        place = folder / "cells" / f"{name}-seed-{seed}"
        run = replace(config.run, seed=seed, folder=str(place), overwrite=False)
        if budget:
            run = replace(run, num_steps=NO_STEP_LIMIT, token_limit=budget.tokens, time_limit_minutes=budget.minutes)
        return replace(config, run=run)

    return [
        Cell(variant=name, seed=seed, config=config_of(config, name, seed))
        for seed in range(wanted.run.seed, wanted.run.seed + seeds)
        for name, config in variants.items()
    ]


def require_suits(name: str, config: Config, budget: Budget) -> None:
    """Reject a dataset without held-out rows, and other options that end a run or its learning rate schedule."""
    task, run, update = config.task, config.run, config.update
    if isinstance(task, DatasetOptions) and not (task.held_out_path or task.held_out_split or task.held_out_share):
        rule = "nothing is held out, but held-out accuracy is compared"
        raise UserError(f"{name}: task.held_out_share = 0: {rule}.  Use a share above 0, or set task.held_out_path.")
    if budget and run.early_stop_evaluations is not None:
        given = f"run.early_stop_evaluations = {run.early_stop_evaluations}"
        raise UserError(f"{name}: {given} may end a run before its budget of {budget}.  Leave it out, or the budget.")
    if budget and update.schedule != "constant":
        rule = f"decays to 0 at run.num_steps, but a budget of {budget} ends runs earlier or later"
        raise UserError(f"{name}: update.schedule = {update.schedule} {rule}.  Use constant, or leave the budget out.")


def run_comparison(cells: Sequence[Cell], budget: Budget, folder: Path) -> str:
    """Run the cells one after another; write comparison.json, .md and .png after each.  Returns the table.

    Finished cells are not run again; an unfinished one continues from its last checkpoint.
    """
    with sole_writer(folder):
        results = {cell.name: result for cell in cells if (result := kept_result(cell)) is not None}
        most = 60 * budget.minutes * (len(cells) - len(results)) if budget.minutes else None
        first = len(results) + 1
        with Progress(len(cells), first_step=first, unit="run", time_limit_seconds=most) as progress:
            progress.start([f"{len(results)} of {len(cells)} runs are already finished."] if results else [])
            for cell in (each for each in cells if each.name not in results):
                progress.note(f"[{len(results) + 1}/{len(cells)}] {cell.name}: {cell.folder}")
                with progress.stage(cell.name) as stage:
                    result = results[cell.name] = run_cell(cell, partial(stage, 0))
                change = f"{result.accuracy(result.before):.3f} → {result.accuracy_after:.3f}"
                cost = f"{result.steps} steps, {result.sampled_tokens:,} tokens, {result.training_seconds:.0f} s"
                progress.note(f"    held-out {quantity([result])} {change} in {cost}")
                progress.step(len(results), {})
                write_comparison(folder, [results[each.name] for each in cells if each.name in results], str(budget))
        return write_comparison(folder, [results[each.name] for each in cells], str(budget))


def kept_cells(cells: Sequence[Cell]) -> KeptWork:
    """What a comparison has saved; the same command continues it."""
    begun = [cell for cell in cells if not cell.result_file.is_file() and (cell.folder / "config.yaml").is_file()]
    saved = [f"{each.name} up to its last checkpoint" for each in begun]
    finished = sum(cell.result_file.is_file() for cell in cells)
    return KeptWork(f"Kept: {', '.join([f'{finished} of {len(cells)} runs', *saved])}.")


def recipe_digest(cell: Cell) -> str:
    """The digest of a cell's recipe, independent of its run folder."""
    return hashlib.sha256(cell.recipe.replace(str(cell.folder), "FOLDER").encode()).hexdigest()


def kept_result(cell: Cell) -> CellResult | None:
    """The result of a finished cell.  Raises UserError if another recipe started or made it."""
    file, kept = cell.result_file, [each for each in (cell.recipe_file, cell.folder / "config.yaml") if each.is_file()]
    remedy = f"Delete {cell.folder} to run it again, or use another folder for this comparison."
    result = None
    if file.is_file():
        try:
            result = CellResult(**json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise RunError(f"{file}: is not the result of a cell ({error}).  Delete {cell.folder}.") from None
    known = result is not None and result.recipe_digest == recipe_digest(cell)  # else options were added since, maybe
    if not known and (result is not None or (cell.folder / "config.yaml").is_file()):
        changed = changed_options(kept[0], cell.config) if kept else [f"{cell.recipe_file} is missing"]
        if changed:
            what = f"{cell.folder}: was begun" if result is None else f"{file}: was made"
            rule = f"{what} by another recipe than {cell.name} has now: {first_changes(changed)}"
            raise UserError(f"{rule}.  {remedy}")
    if result is not None and (changed := changed_since(cell.folder, cell.config)):
        raise UserError(f"{file}: {cell.name} is finished, and {first_changes(changed)}.  {remedy}")
    return result


def run_cell(cell: Cell, show: Callable[[str], None]) -> CellResult:
    """Run or resume a cell in its own process, so that its peak memory is its own.

    `show` gets the last line of its output.  Raises RunError if the run fails.
    """
    if not (cell.folder / "summary.json").is_file():
        cell.folder.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(cell.recipe_file, cell.recipe.encode())
        begun = (cell.folder / "config.yaml").is_file()
        command = ["rl", "--resume", str(cell.folder)] if begun else ["rl", str(cell.recipe_file)]
        run_posttrain(command, name=cell.name, log=cell.folder.with_name(f"{cell.folder.name}.cell.log"), show=show)
    show("finished; measuring its KL to the start")
    summary = json.loads((cell.folder / "summary.json").read_text(encoding="utf-8"))
    seconds = summary["seconds"]
    result = CellResult(
        variant=cell.variant,
        seed=cell.seed,
        recipe_digest=recipe_digest(cell),
        **{name: summary[name] for name in ("before", "after", "steps", "peak_memory_bytes", "device", "versions")},
        sampled_tokens=summary["tokens"]["sampled"],
        seconds=seconds["total"],
        training_seconds=seconds["total"] - seconds.get("evaluate", 0.0),
        kl=kl_to_start(cell),
        curve=list(accuracy_curve(read_metrics(cell.folder / "metrics.jsonl"))),
    )
    write_atomically(cell.result_file, json.dumps(asdict(result), indent=1).encode())
    return result


def accuracy_curve(records: Sequence[Mapping[str, object]]) -> Iterator[tuple[int, float, float]]:
    """(tokens sampled so far, seconds of training so far, held-out accuracy) at each measurement."""

    def number(record: Mapping[str, object], name: str, otherwise: float = 0.0) -> float:
        value = record.get(name)
        return float(value) if isinstance(value, int | float) else otherwise

    tokens = seconds = 0.0
    for record in records:
        tokens = number(record, "num_sampled_tokens", tokens)
        seconds += number(record, "step_time") - number(record, "seconds/evaluate")
        if (found := headline(record, "eval/")) is not None:
            yield int(tokens), seconds, found[1]


def kl_to_start(cell: Cell) -> dict[str, float]:
    """The KL of a finished cell's policy to its start.

    KL(π‖π₀) = E_{y ~ π} Σ_t log π(y_t) - log π₀(y_t)      k1: unbiased, of a completion as a whole
    """
    config = cell.config
    with open_session(replace(config, model=model_of_run(config.model, cell.folder)), inference=True) as session:
        session.load_weights()
        prompts = held_out_prompts(session.task)[:PROMPTS] or training_prompts(session.task, 1, range(PROMPTS))
        request = GroupRequest(
            group_size=SAMPLES,
            max_completion_tokens=config.rollout.max_completion_tokens,
            sampling=SamplingParams(),
            key=StreamKey(cell.seed, "kl to start", 0),
        )
        groups = sample_conversations(session.engine, prompts, request, session.environment.workers)
    start = load_policy(config.model, seed=cell.seed, inference=True)
    logprobs = group_logprobs(start, groups, temperature=1.0, max_tokens=config.update.tokens_per_microbatch)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return drift_of(rollouts, logprobs)


def drift_of(rollouts: Sequence[Rollout], start_logprobs: Float64[Tensor, " token"]) -> dict[str, float]:
    """The KL from completions of π and the log-probs under π₀ of all their sampled tokens, in order, in nats.

    Per completion with the standard error of that mean; per token it is the same sum over the number of tokens.
    """
    lengths = [rollout.num_sampled for rollout in rollouts]
    of_start = [part.sum().item() for part in start_logprobs.split(lengths)]
    ratios = [sum(rollout.logprobs) - other for rollout, other in zip(rollouts, of_start, strict=True)]
    return {
        "per_completion": fmean(ratios),
        "per_completion_error": stdev(ratios) / math.sqrt(len(ratios)),
        "per_token": sum(ratios) / sum(lengths),
    }


def model_of_run(began: ModelOptions, run: Path) -> ModelOptions:
    """The saved model of a run, loaded as it was trained: in 4 bits only with an adapter over such a base.

    The revision is of the hub model that the run began with, and the template is saved with the run's model.
    """
    folder = run_model(run)
    bits = began.quantization if is_adapter_folder(folder) else None
    return replace(began, path=str(folder), revision="", chat_template="", adapter=None, quantization=bits)
