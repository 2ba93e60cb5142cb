"""Cells as processes of their own, each with a result that is kept, so that a comparison goes on where it stopped."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from posttrain.commands.comparison.cells import Budget, Cell
from posttrain.commands.comparison.comparison_report import write_comparison
from posttrain.commands.comparison.drift import kl_to_start
from posttrain.commands.comparison.statistics import CellResult, accuracy, cell_accuracy, quantity
from posttrain.errors import RunError, UserError
from posttrain.runs.files import read_metrics, write_atomically
from posttrain.runs.folder import sole_writer
from posttrain.runs.interruption import run_posttrain
from posttrain.runs.named_inputs import changed_since
from posttrain.runs.same_recipe import changed_options, first_changes
from posttrain.runs.summary import headline

RESULT = "cell.json"
LOG = "cell.log"


def recipe_digest(cell: Cell) -> str:
    """Tells the recipe of a cell from any other; where the run is kept plays no part."""
    config = cell.recipe.replace(str(cell.folder), "FOLDER")
    return hashlib.sha256(config.encode()).hexdigest()


def cell_recipe_file(cell: Cell) -> Path:
    """The recipe that a cell was begun with, beside its folder."""
    return cell.folder.parent / f"{cell.folder.name}.yaml"


def kept_result(cell: Cell) -> CellResult | None:
    """The result of a cell that has been run.  Raises UserError where it was begun, or made, by another recipe."""
    file = cell.folder / RESULT
    if not file.is_file():
        if (cell.folder / "config.yaml").is_file():
            require_recipe_of_now(cell, f"{cell.folder}: was begun")
        return None
    try:
        result = CellResult(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise RunError(f"{file}: is no result of a cell ({error}).  Delete {cell.folder} to run it again.") from None
    if result.recipe_digest != recipe_digest(cell):  # as it also is where options have come since
        require_recipe_of_now(cell, f"{file}: was made")
    if changed := changed_since(cell.folder, cell.config):
        raise UserError(
            f"{file}: {cell.name} is finished, and {first_changes(changed)}.  Delete {cell.folder} to run it"
            " again, or keep this comparison in another folder."
        )
    return result


def require_recipe_of_now(cell: Cell, what: str) -> None:
    """Refuse a cell that another recipe has begun, or made: its result would stand for this one's."""
    kept = next((each for each in (cell_recipe_file(cell), cell.folder / "config.yaml") if each.is_file()), None)
    changed = [f"{cell_recipe_file(cell)} is gone"] if kept is None else changed_options(kept, cell.config)
    if changed:
        raise UserError(
            f"{what} by another recipe than {cell.name} has now: {first_changes(changed)}.  Delete {cell.folder}"
            " to run it again, or keep this comparison in another folder."
        )


def run_cell(cell: Cell, drift: Callable[[Cell], Mapping[str, float]]) -> CellResult:
    """Run a cell to its end, or on to its end where it was begun, in a process of its own; its result is kept.

    A process of its own has a peak of memory of its own.  Raises RunError where the run fails.
    """
    log = cell.folder.parent / f"{cell.folder.name}.{LOG}"
    if not (cell.folder / "summary.json").is_file():
        cell.folder.parent.mkdir(parents=True, exist_ok=True)
        recipe = cell_recipe_file(cell)
        write_atomically(recipe, cell.recipe.encode())
        begun = (cell.folder / "config.yaml").is_file()
        command = ["rl", "--resume", str(cell.folder)] if begun else ["rl", str(recipe)]
        run_posttrain(command, name=cell.name, log=log)
    result = cell_result(cell, drift(cell))
    content = json.dumps(asdict(result), indent=1)
    write_atomically(cell.folder / RESULT, content.encode())
    return result


def cell_result(cell: Cell, kl: Mapping[str, float]) -> CellResult:
    """What the run folder of a cell says of it."""
    summary = json.loads((cell.folder / "summary.json").read_text(encoding="utf-8"))
    curve = list(accuracy_curve(read_metrics(cell.folder / "metrics.jsonl")))
    seconds = summary["seconds"]
    return CellResult(
        variant=cell.variant,
        seed=cell.seed,
        recipe_digest=recipe_digest(cell),
        before=summary["before"],
        after=summary["after"],
        steps=summary["steps"],
        sampled_tokens=summary["tokens"]["sampled"],
        seconds=seconds["total"],
        training_seconds=seconds["total"] - seconds.get("evaluate", 0.0),
        peak_memory_bytes=summary["peak_memory_bytes"],
        kl=kl,
        curve=curve,
        device=summary["device"],
        versions=summary["versions"],
    )


def accuracy_curve(records: Sequence[Mapping[str, object]]) -> Iterator[tuple[int, float, float]]:
    """(tokens sampled so far, seconds of training so far, held-out accuracy) wherever it was measured."""
    tokens, seconds = 0, 0.0
    for record in records:
        tokens = int(number_or(record.get("num_sampled_tokens"), tokens))
        seconds += number_or(record.get("step_time"), 0.0) - number_or(record.get("seconds/evaluate"), 0.0)
        if (found := headline(record, "eval/")) is not None:
            yield tokens, seconds, found[1]


def number_or(value: object, otherwise: float) -> float:
    """A number of the journal, or what stands for one that is not there."""
    return float(value) if isinstance(value, int | float) else otherwise


def run_comparison(cells: Sequence[Cell], budget: Budget, folder: Path, tell: Callable[[str], None] = print) -> str:
    """Run the cells one after another and write comparison.json, .md and .png after each; returns the table.

    Cells that are finished are not run again, and one that was begun goes on from its last checkpoint.
    """
    with sole_writer(folder):
        results = [result for cell in cells if (result := kept_result(cell)) is not None]
        kept = {(result.variant, result.seed) for result in results}
        if kept:
            tell(f"{len(kept)} of {len(cells)} cells are finished already.")
        for number, cell in enumerate(cells, start=1):
            if (cell.variant, cell.seed) in kept:
                continue
            tell(f"[{number}/{len(cells)}] {cell.name}: {cell.folder}")
            result = run_cell(cell, lambda cell: asdict(kl_to_start(cell)))
            results.append(result)
            tell(f"    {outcome(result)}")
            write_comparison(folder, in_order(results, cells), str(budget))
        return write_comparison(folder, in_order(results, cells), str(budget))


def in_order(results: Sequence[CellResult], cells: Sequence[Cell]) -> list[CellResult]:
    """The results in the order of the cells that they are of."""
    order = {(cell.variant, cell.seed): number for number, cell in enumerate(cells)}
    return sorted(results, key=lambda result: order[result.variant, result.seed])


def outcome(result: CellResult) -> str:
    """A finished cell in one line."""
    return (
        f"held-out {quantity([result])} {cell_accuracy(result, result.before):.3f} → {accuracy(result):.3f}"
        f" in {result.steps} steps, {result.sampled_tokens:,} tokens, {result.training_seconds:.0f} s of training"
    )
