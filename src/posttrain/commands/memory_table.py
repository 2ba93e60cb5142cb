"""Memory plans as a table for a terminal and as JSON: one column per plan, the recipe's first."""

from collections.abc import Iterator, Mapping, Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from posttrain.models.adapters.adaptable import share_of_linear_layers
from posttrain.models.memory.memory_plan import MemoryPlan, changes_that_save
from posttrain.options.training import RATE_OF_ADAPTERS, OptimizerOptions
from posttrain.runs.planned_memory import WORDS, MachineMemory, gigabytes, memory_warning


def count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def table_rows(plans: Sequence[MemoryPlan], machine: MachineMemory) -> Iterator[tuple[str, list[str]]]:
    """Names and cells, with sizes in GB; parts that are in no column are omitted."""

    def parts(held: Sequence[Mapping[str, int]]) -> Iterator[tuple[str, list[str]]]:
        for name, words in WORDS.items():
            if any(each.get(name) for each in held):
                yield f"  {words}", [gigabytes(each[name]) if each.get(name) else "" for each in held]

    yield "parameters", [count(plan.shape.parameters) for plan in plans]
    yield "trained", [count(plan.trained) for plan in plans]
    yield from parts([plan.parts["always"] for plan in plans])
    yield "process, allocator", [gigabytes(plan.runtime) for plan in plans]
    for phase in plans[0].phases:
        yield f"while {phase}", [gigabytes(plan.phases[phase] + plan.runtime) for plan in plans]
        if phase != "loading":
            yield from parts([plan.parts[phase] for plan in plans])
    yield f"fits {gigabytes(machine.size)} GB", ["yes" if plan.peak <= machine.size else "no" for plan in plans]


def print_plans(plans: Mapping[str, MemoryPlan], machine: MachineMemory, optimizer: OptimizerOptions) -> None:
    """Print the table, and below it the settings that would reduce memory."""
    recipe, *_ = plans.values()
    setup, shape = recipe.setup, recipe.shape
    table = Table(box=SIMPLE, header_style="bold", padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column("GB", no_wrap=True)
    for name in plans:
        table.add_column(name, justify="right", no_wrap=True)
    for name, cells in table_rows([*plans.values()], machine):
        table.add_row(name, *cells)
    Console(highlight=False).print(table)
    rows = f"{setup.num_rows} rows" if setup.samples else f"{setup.tokens_per_microbatch} tokens"
    length = f"{setup.prompt_tokens} + {setup.completion_tokens} tokens"
    print(f"{rows} at a time, of {length}; micro-batches of {setup.tokens_per_microbatch} tokens")
    rate, default = optimizer.largest_rate, optimizer.default_rate
    usual = f"where none is given {default:g}, of an adapter {default * RATE_OF_ADAPTERS:g}"
    print(f"learning rate {rate:g}; {usual}")
    if shape.expert_parameters and not setup.adapts_experts:
        share = share_of_linear_layers(shape.linear_parameters, shape.expert_parameters)
        print(f"all-linear and nf4 reach {share:.0%} of the matrix weights; the experts of this mixture are the rest")
    fits = f"It fits: {gigabytes(recipe.peak)} of {gigabytes(machine.size)} GB."
    print("\n".join(memory_warning(recipe, machine) or [fits]))


def plans_as_json(plans: Mapping[str, MemoryPlan], machine: MachineMemory) -> dict[str, object]:
    """The plans as JSON, with sizes in bytes."""
    recipe, *_ = plans.values()
    listed = {
        name: {
            "parameters": plan.shape.parameters,
            "trained_parameters": plan.trained,
            **plan.parts,
            "runtime": plan.runtime,
            "peak": plan.peak,
            "fits": plan.peak <= machine.size,
        }
        for name, plan in plans.items()
    }
    changes = [
        {"setting": change.setting, "saves": change.saves, "same_results": change.same_results}
        for change in changes_that_save(recipe.shape, recipe.setup)
    ]
    return {"machine_bytes": machine.size, "machine": machine.kind, "plans": listed, "changes": changes}
