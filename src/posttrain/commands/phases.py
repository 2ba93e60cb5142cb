"""`posttrain phases`: the phases of one recipe, one after another, each in its own process.

Finished phases are kept, and an unfinished one is resumed.  The report is phases.json, and phases.md with one row per
measure and phase.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.commands.arguments import TrustSwitch, split_arguments
from posttrain.commands.flags import CommandSpec, read_flags
from posttrain.config import as_recipe
from posttrain.errors import UserError
from posttrain.runs.files import write_atomically
from posttrain.runs.folder import sole_writer
from posttrain.runs.interruption import KeptWork, run_posttrain, stopped_with_a_word
from posttrain.runs.named_inputs import changed_options, changed_since, first_changes
from posttrain.runs.progress import Progress

if TYPE_CHECKING:
    from posttrain.commands.phase_list import Phase


@dataclass(frozen=True, kw_only=True)
class PhasesSwitches(TrustSwitch):
    """Where phases are saved."""

    folder: str = "runs/phases"
    """Folder of the runs and the report.  Run the same command again to continue, also within a phase."""
    dry_run: bool = False
    """Show the phases and what each takes over, without running them."""


PROGRAM = CommandSpec(
    name="posttrain phases RECIPE.yaml",
    description="Run the phases of a recipe one after another: sft, reward-model, rl, dpo.  A phase names what"
    " it takes over from an earlier one: phase:NAME is its model, run:NAME the folder of its run.",
    switches=PhasesSwitches(),
)


def main(arguments: Sequence[str]) -> int:
    """Run the unfinished phases, and print the report."""
    recipe, given = split_arguments(arguments, PROGRAM).only("RECIPE")
    _, switches = read_flags(given.flags, PROGRAM, {})
    from posttrain.commands.phase_list import read_phases, require_startable

    folder = Path(switches.folder)
    phases = read_phases(recipe, folder, trust_code=switches.trust_code)
    require_startable(phases)
    if switches.dry_run:
        for phase in phases:
            taken = ", ".join(sorted(phase.takes_over())) or "nothing from earlier phases"
            print(f"{phase.number}. {phase.name:16} posttrain {phase.command:12} takes over {taken}")
        return 0
    with stopped_with_a_word(lambda: kept_phases(phases)):
        report = run_phases(phases, folder)
    print(f"\n{report}\n{folder} has it as Markdown and as JSON.")
    return 0


HEADS = ["phase", "command", "measure", "before", "after", "steps", "minutes", "memory GB"]
REMEDY = "Delete it and the folders of later phases, or use another folder for these phases."


def run_phases(phases: "Sequence[Phase]", folder: Path) -> str:
    """Run the unfinished phases and write phases.json and phases.md after each; returns the report."""
    with sole_writer(folder), Progress(len(phases), unit="phase") as progress:
        results: list[dict[str, Any]] = []
        earlier: dict[str, Phase] = {}
        progress.start([])
        for phase in phases:
            config = phase.config(earlier)
            done = finished(phase, config)
            number = f"[{phase.number}/{len(phases)}]"
            progress.note(f"{number} {phase.name}: {'finished already' if done else phase.folder}")
            if not done:
                with progress.stage(f"{number} {phase.name}") as stage:
                    run_phase(phase, config, phases[phase.number :], partial(stage, 0))
            summary = json.loads((phase.folder / "summary.json").read_text(encoding="utf-8"))
            of_phase = {"name": phase.name, "command": phase.command, "folder": str(phase.folder)}
            results.append({**of_phase, "summary": summary})
            earlier[phase.name] = phase
            progress.step(len(results), {})
            rows = [HEADS, ["---"] * 3 + ["---:"] * 5, *(row for result in results for row in phase_rows(result))]
            report = "".join(f"| {' | '.join(row)} |\n" for row in rows)
            write_atomically(folder / "phases.json", (json.dumps(results, indent=1) + "\n").encode())
            write_atomically(folder / "phases.md", report.encode())
        return report


def kept_phases(phases: "Sequence[Phase]") -> KeptWork:
    """What is saved of some phases; the same command continues them."""
    done = [phase.name for phase in phases if (phase.folder / "summary.json").is_file()]
    begun = [phase.name for phase in phases if phase.name not in done and (phase.folder / "config.yaml").is_file()]
    kept = [f"phase {name}" for name in done] + [f"phase {name} up to its last checkpoint" for name in begun]
    return KeptWork(f"Kept: {', '.join(kept)}." if kept else "No phase is saved yet.")


def finished(phase: "Phase", config: Any) -> bool:
    """Whether a phase is finished.  Raises UserError if another recipe started its run."""
    kept = phase.recipe_file
    changed = changed_options(kept, config) if phase.folder.is_dir() and kept.is_file() else []
    if changed:
        rule = f"was started by a different recipe than phase {phase.name} has now: {first_changes(changed)}"
        raise UserError(f"{phase.folder}: {rule}.  {REMEDY}")
    done = (phase.folder / "summary.json").is_file()
    if done and (changed := changed_since(phase.folder, config)):
        raise UserError(f"{phase.folder}: phase {phase.name} is finished, and {first_changes(changed)}.  {REMEDY}")
    return done


def run_phase(phase: "Phase", config: Any, later: "Sequence[Phase]", show: Callable[[str], None]) -> None:
    """Run or resume a phase; `show` gets the last line of its output.

    Raises UserError if a later phase was made from an earlier result of it."""
    for each in later:
        if each.folder.is_dir() and phase.name in each.takes_over().values():
            rule = f"was made from an earlier result of phase {phase.name}, which will be run again"
            raise UserError(f"{each.folder}: {rule}.  {REMEDY}")
    recipe = phase.recipe_file
    recipe.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(recipe, as_recipe(config).encode())
    begun = (phase.folder / "config.yaml").is_file()
    command = ["--resume", str(phase.folder)] if begun else [str(recipe)]
    run_posttrain([phase.command, *command], name=f"phase {phase.name}", log=recipe.with_suffix(".log"), show=show)


def phase_rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """A row for each measure of a phase, before and after; a row without numbers if there are none."""
    summary = result["summary"]
    seconds = summary.get("seconds")  # by stage, or of the whole run
    total = seconds["total"] if isinstance(seconds, Mapping) else seconds
    names = [result["name"], result["command"]]
    cost = [
        str(summary.get("steps", "")),
        "" if total is None else f"{total / 60:.1f}",
        f"{summary['peak_memory_bytes'] / 1e9:.2f}" if "peak_memory_bytes" in summary else "",
    ]
    for row in list(measures_of(summary.get("before") or {}, summary.get("after") or {})) or [["", "", ""]]:
        yield [*names, *row, *cost]
        names, cost = ["", ""], ["", "", ""]


def measures_of(before: Mapping[str, Any], after: Mapping[str, Any], source: str = "") -> Iterator[list[str]]:
    """Name, value before and value after of each measure; then the same for each source of a mixture."""
    for name in after:
        values = [result_with_interval(results, name) for results in (before, after)]
        if "[" in values[1]:
            yield [name.replace("_", " ") + (f", {source}" if source else ""), *values]
    earlier = before.get("sources") or {}
    for name, results in (after.get("sources") or {}).items():
        yield from measures_of(earlier.get(name) or {}, results, name)


def result_with_interval(results: Mapping[str, Any], name: str) -> str:
    """A result with its interval, if it has one: a pair in summaries, two numbers in the metrics of pairs."""
    value, ends = results.get(name), (results.get(f"{name}_low"), results.get(f"{name}_high"))
    low, high = results.get(f"{name}_interval") or ends
    if not isinstance(value, float):
        return ""
    return f"{value:.3f}" if low is None or high is None else f"{value:.3f} [{low:.3f}, {high:.3f}]"
