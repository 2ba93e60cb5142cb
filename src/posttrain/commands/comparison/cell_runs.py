"""Each cell in its own process, with a result that is kept, so that a comparison continues where it stopped."""

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


def run_comparison(cells: Sequence[Cell], budget: Budget, folder: Path, tell: Callable[[str], None] = print) -> str:
    """Run the cells one after another and write comparison.json, .md and .png after each; returns the table.

    Finished cells are not run again, and one that was begun continues from its last checkpoint.
    """
    with sole_writer(folder):
        results = {cell.name: result for cell in cells if (result := kept_result(cell)) is not None}
        if results:
            tell(f"{len(results)} of {len(cells)} cells are finished already.")
        for number, cell in enumerate(cells, start=1):
            if cell.name in results:
                continue
            tell(f"[{number}/{len(cells)}] {cell.name}: {cell.folder}")
            result = results[cell.name] = run_cell(cell)
            change = f"{cell_accuracy(result, result.before):.3f} → {accuracy(result):.3f}"
            cost = f"{result.steps} steps, {result.sampled_tokens:,} tokens, {result.training_seconds:.0f} s"
            tell(f"    held-out {quantity([result])} {change} in {cost}")
            write_comparison(folder, [results[each.name] for each in cells if each.name in results], str(budget))
        return write_comparison(folder, [results[each.name] for each in cells], str(budget))


def recipe_digest(cell: Cell) -> str:
    """The digest of a cell's recipe, whatever folder its run is kept in."""
    return hashlib.sha256(cell.recipe.replace(str(cell.folder), "FOLDER").encode()).hexdigest()


def cell_recipe_file(cell: Cell) -> Path:
    """The recipe that a cell was begun with, next to its folder."""
    return cell.folder.parent / f"{cell.folder.name}.yaml"


def kept_result(cell: Cell) -> CellResult | None:
    """The result of a finished cell.  Raises UserError if it was begun, or made, by another recipe."""
    file = cell.folder / RESULT
    if not file.is_file():
        if (cell.folder / "config.yaml").is_file():
            require_recipe_of_now(cell, f"{cell.folder}: was begun")
        return None
    try:
        result = CellResult(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise RunError(f"{file}: is not the result of a cell ({error}).  Delete {cell.folder}.") from None
    if result.recipe_digest != recipe_digest(cell):  # it also differs if options were added since
        require_recipe_of_now(cell, f"{file}: was made")
    if changed := changed_since(cell.folder, cell.config):
        raise UserError(f"{file}: {cell.name} is finished, and {first_changes(changed)}.  {remedy(cell)}")
    return result


def require_recipe_of_now(cell: Cell, what: str) -> None:
    kept = next((each for each in (cell_recipe_file(cell), cell.folder / "config.yaml") if each.is_file()), None)
    changed = [f"{cell_recipe_file(cell)} is gone"] if kept is None else changed_options(kept, cell.config)
    if changed:
        rule = f"{what} by another recipe than {cell.name} has now: {first_changes(changed)}"
        raise UserError(f"{rule}.  {remedy(cell)}")


def remedy(cell: Cell) -> str:
    return f"Delete {cell.folder} to run it again, or keep this comparison in another folder."


def run_cell(cell: Cell) -> CellResult:
    """Run a cell to its end, or resume it, in its own process: its peak of memory is then its own.

    Raises RunError if the run fails.
    """
    if not (cell.folder / "summary.json").is_file():
        cell.folder.parent.mkdir(parents=True, exist_ok=True)
        recipe = cell_recipe_file(cell)
        write_atomically(recipe, cell.recipe.encode())
        begun = (cell.folder / "config.yaml").is_file()
        command = ["rl", "--resume", str(cell.folder)] if begun else ["rl", str(recipe)]
        run_posttrain(command, name=cell.name, log=cell.folder.parent / f"{cell.folder.name}.cell.log")
    result = cell_result(cell, asdict(kl_to_start(cell)))
    write_atomically(cell.folder / RESULT, json.dumps(asdict(result), indent=1).encode())
    return result


def cell_result(cell: Cell, kl: Mapping[str, float]) -> CellResult:
    """The result in the run folder of a cell."""
    summary = json.loads((cell.folder / "summary.json").read_text(encoding="utf-8"))
    seconds = summary["seconds"]
    return CellResult(
        variant=cell.variant,
        seed=cell.seed,
        recipe_digest=recipe_digest(cell),
        **{name: summary[name] for name in ("before", "after", "steps", "peak_memory_bytes", "device", "versions")},
        sampled_tokens=summary["tokens"]["sampled"],
        seconds=seconds["total"],
        training_seconds=seconds["total"] - seconds.get("evaluate", 0.0),
        kl=kl,
        curve=list(accuracy_curve(read_metrics(cell.folder / "metrics.jsonl"))),
    )


def accuracy_curve(records: Sequence[Mapping[str, object]]) -> Iterator[tuple[int, float, float]]:
    """(tokens sampled so far, seconds of training so far, held-out accuracy) wherever it was measured."""

    def number(record: Mapping[str, object], name: str, otherwise: float = 0.0) -> float:
        value = record.get(name)
        return float(value) if isinstance(value, int | float) else otherwise

    tokens, seconds = 0, 0.0
    for record in records:
        tokens = int(number(record, "num_sampled_tokens", tokens))
        seconds += number(record, "step_time") - number(record, "seconds/evaluate")
        if (found := headline(record, "eval/")) is not None:
            yield tokens, seconds, found[1]
