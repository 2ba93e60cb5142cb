"""Phases run one after another, each in a process of its own; what is finished is kept, what was begun goes on."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posttrain.config import as_recipe
from posttrain.errors import UserError
from posttrain.runs.files import write_atomically
from posttrain.runs.folder import sole_writer
from posttrain.runs.interruption import run_posttrain
from posttrain.runs.named_inputs import changed_since
from posttrain.runs.same_recipe import changed_options, first_changes
from posttrain.training.phases.phase_list import Phase
from posttrain.training.phases.phase_report import write_report


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """What came out of a phase."""

    name: str
    command: str
    folder: str
    summary: Mapping[str, Any]
    """Its summary.json."""


def run_phases(phases: Sequence[Phase], folder: Path, tell: Callable[[str], None] = print) -> str:
    """Run every phase that is not finished and write the report after each; returns it as text."""
    with sole_writer(folder):
        results: list[PhaseResult] = []
        earlier: dict[str, Phase] = {}
        for phase in phases:
            config = phase.config(earlier)
            done = finished(phase, config)
            tell(f"[{phase.number}/{len(phases)}] {phase.name}: {'finished already' if done else phase.folder}")
            if not done:
                refuse_made_before(phase, phases[phase.number :])
                run_phase(phase, config)
            results.append(phase_result(phase))
            earlier[phase.name] = phase
            write_report(folder, [asdict(result) for result in results])
        return (folder / "phases.md").read_text(encoding="utf-8")


def finished(phase: Phase, config: Any) -> bool:
    """Whether a phase has been run to its end.  Raises UserError where its run was begun by another recipe."""
    kept = phase_recipe_file(phase)
    remedy = "Delete it, and those of the phases that come after it, or keep these phases in another folder."
    changed = changed_options(kept, config) if phase.folder.is_dir() and kept.is_file() else []
    if changed:
        raise UserError(
            f"{phase.folder}: was begun by another recipe than phase {phase.name} has now: {first_changes(changed)}."
            f"  {remedy}"
        )
    done = (phase.folder / "summary.json").is_file()
    if done and (changed := changed_since(phase.folder, config)):
        raise UserError(f"{phase.folder}: phase {phase.name} is finished, and {first_changes(changed)}.  {remedy}")
    return done


def refuse_made_before(phase: Phase, later: Sequence[Phase]) -> None:
    """Raise UserError where a phase that is to be run now has one behind it that was made of what it made before."""
    for each in later:
        if each.folder.is_dir() and phase.name in each.names_taken_over():
            raise UserError(
                f"{each.folder}: was made of what phase {phase.name} made before, and that is to be run now.  Delete"
                " it, and those of the phases that come after it, or keep these phases in another folder."
            )


def run_phase(phase: Phase, config: Any) -> None:
    """Run a phase to its end, or on to its end where it was begun."""
    recipe = phase_recipe_file(phase)
    recipe.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(recipe, as_recipe(config).encode())
    begun = (phase.folder / "config.yaml").is_file()
    command = ["--resume", str(phase.folder)] if begun else [str(recipe)]
    run_posttrain([phase.command, *command], name=f"phase {phase.name}", log=recipe.with_suffix(".log"))


def phase_recipe_file(phase: Phase) -> Path:
    """The recipe that a phase was begun with, beside its folder."""
    return phase.folder.parent / f"{phase.folder.name}.yaml"


def phase_result(phase: Phase) -> PhaseResult:
    """What the folder of a finished phase says."""
    summary = json.loads((phase.folder / "summary.json").read_text(encoding="utf-8"))
    return PhaseResult(name=phase.name, command=phase.command, folder=str(phase.folder), summary=summary)
