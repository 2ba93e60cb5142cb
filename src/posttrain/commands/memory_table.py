"""Memory plans as a table for a terminal and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from posttrain.models.adapters.adaptable import share_of_linear_layers
from posttrain.models.memory.memory_plan import MemoryPlan, changes_that_save
from posttrain.options.training import RATE_OF_ADAPTERS
from posttrain.runs.planned_memory import WORDS, MachineMemory, gigabytes, memory_warning


def count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


@dataclass(frozen=True)
class MemoryTable:
    """A column for each plan, the recipe's first."""

    plans: Mapping[str, MemoryPlan]
    machine: MachineMemory

    @property
    def recipe(self) -> MemoryPlan:
        return next(iter(self.plans.values()))

    def rows(self) -> Iterator[tuple[str, list[str]]]:
        """Names and cells, sizes in GB; a part that no column has is omitted."""
        plans = list(self.plans.values())
        yield "parameters", [count(plan.shape.parameters) for plan in plans]
        yield "trained", [count(plan.trained) for plan in plans]
        yield from self.parts([plan.parts["always"] for plan in plans])
        yield "process, allocator", [gigabytes(plan.runtime) for plan in plans]
        for phase in plans[0].phases:
            yield f"while {phase}", [gigabytes(plan.phases[phase] + plan.runtime) for plan in plans]
            if phase != "loading":
                yield from self.parts([plan.parts[phase] for plan in plans])
        fits = ["yes" if plan.peak <= self.machine.size else "no" for plan in plans]
        yield f"fits {gigabytes(self.machine.size)} GB", fits

    def parts(self, held: Sequence[Mapping[str, int]]) -> Iterator[tuple[str, list[str]]]:
        for name, words in WORDS.items():
            if any(parts.get(name) for parts in held):
                yield f"  {words}", [gigabytes(parts[name]) if parts.get(name) else "" for parts in held]

    def print(self, *, learning_rate: float, default_rate: float) -> None:
        """Print the table, and below it the settings that would reduce memory."""
        setup = self.recipe.setup
        table = Table(box=SIMPLE, header_style="bold", padding=(0, 0, 0, 1), pad_edge=False)
        table.add_column("GB", no_wrap=True)
        for name in self.plans:
            table.add_column(name, justify="right", no_wrap=True)
        for name, cells in self.rows():
            table.add_row(name, *cells)
        console = Console(highlight=False)
        console.print(table)
        rows = f"{setup.num_rows} rows" if setup.samples else f"{setup.tokens_per_microbatch} tokens"
        print(
            f"{rows} at a time, of {setup.prompt_tokens} + {setup.completion_tokens} tokens; micro-batches of"
            f" {setup.tokens_per_microbatch} tokens"
        )
        print(
            f"learning rate {learning_rate:g}; where none is given {default_rate:g}, of an adapter"
            f" {default_rate * RATE_OF_ADAPTERS:g}"
        )
        shape = self.recipe.shape
        if shape.expert_parameters and not setup.adapts_experts:
            share = share_of_linear_layers(shape.linear_parameters, shape.expert_parameters)
            print(
                f"all-linear and nf4 reach {share:.0%} of the matrix weights; the experts of this mixture are the rest"
            )
        warning = memory_warning(self.recipe, self.machine)
        for line in warning or [f"It fits: {gigabytes(self.recipe.peak)} of {gigabytes(self.machine.size)} GB."]:
            print(line)

    def as_json(self) -> dict[str, object]:
        """Everything in bytes."""
        plans = {
            name: {
                "parameters": plan.shape.parameters,
                "trained_parameters": plan.trained,
                **plan.parts,
                "runtime": plan.runtime,
                "peak": plan.peak,
                "fits": plan.peak <= self.machine.size,
            }
            for name, plan in self.plans.items()
        }
        changes = [
            {"setting": change.setting, "saves": change.saves, "same_results": change.same_results}
            for change in changes_that_save(self.recipe.shape, self.recipe.setup)
        ]
        return {"machine_bytes": self.machine.size, "machine": self.machine.kind, "plans": plans, "changes": changes}
