"""`posttrain phases`: the phases of one recipe, one after another, each using what earlier ones made."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.commands.arguments import TrustSwitch, split_arguments
from posttrain.commands.flags import CommandSpec, read_flags


@dataclass(frozen=True, kw_only=True)
class PhasesSwitches(TrustSwitch):
    """Where phases are kept."""

    folder: str = "runs/phases"
    """Where runs and the report are kept.  Run the same command again to continue, within a phase too."""
    dry_run: bool = False
    """Show the phases and what each takes over, and run nothing."""


PROGRAM = CommandSpec(
    name="posttrain phases RECIPE.yaml",
    description="Run the phases of a recipe one after another: sft, reward-model, rl, dpo.  A phase names what"
    " it takes over from an earlier one: phase:NAME is its model, run:NAME the folder of its run.",
    switches=PhasesSwitches(),
)


def main(arguments: Sequence[str]) -> int:
    """Run the unfinished phases, and print the report."""
    recipe, flags = split_arguments(arguments).only("RECIPE", PROGRAM)
    _, switches = read_flags(flags, PROGRAM, {})
    from posttrain.commands.phase_checks import require_startable
    from posttrain.commands.phase_list import read_phases

    folder = Path(switches.folder)
    phases = read_phases(recipe, folder, trust_code=switches.trust_code)
    require_startable(phases)
    if switches.dry_run:
        for phase in phases:
            taken = ", ".join(sorted(phase.takes_over())) or "nothing of an earlier phase"
            print(f"{phase.number}. {phase.name:16} posttrain {phase.command:12} takes over {taken}")
        return 0
    from posttrain.commands.phase_runs import run_phases
    from posttrain.runs.interruption import GOES_ON, stopped_with_a_word

    with stopped_with_a_word(lambda: GOES_ON):
        report = run_phases(phases, folder)
    print(f"\n{report}\n{folder} has it as Markdown and as JSON.")
    return 0
