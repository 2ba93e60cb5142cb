"""The memory of a run, part by part, before anything is loaded, and the settings that would reduce it."""

from dataclasses import dataclass, replace
from functools import cached_property

from posttrain.models.adapters.adaptable import reaches_half
from posttrain.models.memory import memory_parts, plan_parts
from posttrain.models.memory.model_shape import ModelShape

IMPORTED_BYTES = 405_000_000
"""Memory of a Python process that has imported torch and transformers: measured, x86-64 Linux, torch 2.13 for CPUs."""
LIBRARY_BYTES = 35_000_000
"""Added once a model runs, by compiled kernels and threads.  Measured there too."""
CUDA_CONTEXT_BYTES = 600_000_000
"""Memory of a CUDA context with torch's kernels and its libraries' workspaces: 400 to 900 MB, by device and version."""
CUDA_ALLOCATOR_SHARE = 0.05
"""Share of the memory in use that torch's GPU allocator holds on top: an allowance, not measured."""
ADAPTER_RANK = 16
"""Rank of the adapters that a plan compares or suggests."""
FREED_ACTIVATIONS_SHARE = 0.9
"""Share of a micro-batch's freed activations that malloc keeps in a run that does not sample: measured on supervised
runs of eight shapes, 0.6 (one micro-batch an update) to 1.1."""
WORTH_TELLING = 0.02
"""Share of the peak that a change of settings must save to be suggested."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part, each at its largest."""

    shape: ModelShape
    setup: memory_parts.MemorySetup

    @cached_property
    def parts(self) -> dict[str, dict[str, int]]:
        """Names and bytes, by the phase in which a part is held."""
        made: dict[str, dict[str, int]] = {"loading": {}, "always": {}, "sampling": {}, "updating": {}}
        captured = self.setup.on_cuda and self.setup.shared_prompt
        for part in plan_parts.PARTS:
            stays = part.stays and (captured or self.setup.steps_ahead > 0)
            unused = part.phase == "sampling" and not self.setup.samples
            size = 0 if unused else part.held(self.shape, self.setup)
            made["always" if stays else part.phase][part.name] = size
        return made

    @property
    def phases(self) -> dict[str, int]:
        """Bytes in use while loading and in each phase of a step, without the runtime's."""
        sums = {phase: sum(parts.values()) for phase, parts in self.parts.items()}
        always = sums.pop("always")
        if not self.setup.samples:
            del sums["sampling"]
        return {phase: size + always * (phase != "loading") for phase, size in sums.items()}

    @property
    def largest_phase(self) -> str:
        return max(self.phases, key=lambda phase: self.phases[phase])

    @property
    def runtime(self) -> int:
        """What the process or the CUDA context holds, and the allocator on top of tensors in use.

        On a CPU, what one phase has freed counts while the other runs: malloc returns only large tensors, and keeps
        the rest in pieces too small for the other phase's tensors.  The same holds between micro-batches.
        """
        updating = self.parts["updating"]
        if self.setup.on_cuda:
            return CUDA_CONTEXT_BYTES + round(CUDA_ALLOCATOR_SHARE * max(self.phases.values()))
        if self.setup.ranks > 1:  # `ranks.processes` has malloc return large tensors, and small ones stay
            return IMPORTED_BYTES + LIBRARY_BYTES + (updating["activations"] if self.setup.samples else 0)
        if not self.setup.samples:
            return IMPORTED_BYTES + LIBRARY_BYTES + round(FREED_ACTIVATIONS_SHARE * updating["activations"])
        kept = sum(self.parts["sampling"].values()) - memory_parts.returned_cache(self.shape, self.setup)
        return IMPORTED_BYTES + LIBRARY_BYTES + min(kept, sum(updating.values()))

    @property
    def peak(self) -> int:
        return max(self.phases.values()) + self.runtime

    @property
    def trained(self) -> int:
        return memory_parts.trained_parameters(self.shape, self.setup)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one setting that reduces memory."""

    setting: str
    setup: memory_parts.MemorySetup
    """The run's setup after it."""
    saves: int
    """Bytes that it takes off the peak."""
    same_results: bool
    """Whether it changes only memory and time."""

    @property
    def option(self) -> str:
        return self.setting.partition(" ")[0]


def changes_that_save(shape: ModelShape, setup: memory_parts.MemorySetup) -> list[Change]:
    """Each change that reduces the peak and is not refused: first those that change no result, the largest first."""
    held = min(setup.tokens_per_microbatch, setup.prompts_per_step * setup.group_size * setup.row_tokens)
    tokens, rows = max(setup.row_tokens, held // 4), max(1, setup.num_rows // 4)
    whole, rank = setup.adapter_rank is None, setup.adapter_rank or ADAPTER_RANK
    half = reaches_half(shape.linear_parameters, shape.expert_parameters)
    two = memory_parts.BFLOAT16
    halved = replace(setup, weight_bytes=two, compute_bytes=two, frozen_bytes=two)
    in_4_bits = setup.with_adapter(rank, quantized=True)
    fewer_tokens, fewer_rows = replace(setup, tokens_per_microbatch=tokens), replace(setup, max_rows=rows)
    tried = [  # setting, whether it applies, whether it changes no result, the setup that it makes
        (f"{setup.micro_batch_option} = {tokens}", tokens < setup.tokens_per_microbatch, True, fewer_tokens),
        (f"rollout.max_rows = {rows}", setup.samples and setup.num_rows > 1, True, fewer_rows),
        ("model.gradient_checkpointing = true", not setup.recomputes, True, replace(setup, recomputes=True)),
        ("model.weights = bfloat16", setup.weight_bytes == memory_parts.FLOAT32, False, halved),
        (f"model.adapter.rank = {rank}", whole, False, setup.with_adapter(rank)),
        ("model.quantization = nf4", half and not whole and not setup.quantized, False, in_4_bits),
    ]
    peak = MemoryPlan(shape, setup).peak
    found = [
        Change(setting, changed, peak - MemoryPlan(shape, changed).peak, same)
        for setting, applies, same, changed in tried
        if applies
    ]
    worth = [each for each in found if each.saves > WORTH_TELLING * peak and each.option not in setup.refused]
    return sorted(worth, key=lambda change: (not change.same_results, -change.saves))


def changes_until_it_fits(
    shape: ModelShape, setup: memory_parts.MemorySetup, size: int
) -> tuple[list[str], MemoryPlan]:
    """Settings to change together until the run fits into `size` bytes or nothing more helps, and the plan then."""
    settings: dict[str, str] = {}
    plan = MemoryPlan(shape, setup)
    while plan.peak > size and (changes := changes_that_save(shape, plan.setup)):
        settings.pop(changes[0].option, None)
        settings[changes[0].option] = changes[0].setting
        plan = MemoryPlan(shape, changes[0].setup)
    return list(settings.values()), plan
