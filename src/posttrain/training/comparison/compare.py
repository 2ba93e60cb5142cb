"""A comparison as a whole: every cell that is not finished is run, and after each the finished ones are told."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from posttrain.runs.folder import sole_writer
from posttrain.training.comparison.cell_runs import CellResult, kept_result, run_cell
from posttrain.training.comparison.cells import Budget, Cell
from posttrain.training.comparison.comparison_report import write_comparison
from posttrain.training.comparison.drift import kl_to_start
from posttrain.training.comparison.statistics import accuracy, cell_accuracy, quantity


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
