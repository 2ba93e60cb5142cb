"""The memory of a run, part by part, before anything is loaded: always, while sampling, while updating."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from posttrain.models.adapters.adaptable import reaches_half
from posttrain.models.memory import memory_parts as parts
from posttrain.models.memory.memory_parts import BFLOAT16, FLOAT32, MemorySetup
from posttrain.models.memory.model_shape import ModelShape

IMPORTED_BYTES = 405_000_000
"""Of a Python process that has imported torch and transformers: measured, x86-64 Linux, torch 2.13 for CPUs."""
LIBRARY_BYTES = 35_000_000
"""What their libraries add once a model runs: compiled kernels, threads.  Measured there too."""
CUDA_CONTEXT_BYTES = 600_000_000
"""Of a CUDA context with torch's kernels and its libraries' workspaces: 400 to 900 MB, by device and version."""
CUDA_ALLOCATOR_SHARE = 0.05
"""What torch's allocator on a GPU holds beyond what is in use, as a share of it: an allowance, not measured."""
ADAPTER_RANK = 16
"""Of the adapter that a plan is compared with."""
FREED_ACTIVATIONS_SHARE = 0.9
"""What malloc keeps of the activations that a micro-batch has freed, in a run that does not sample, as a share of them:
measured on supervised runs of eight shapes, 0.6 (one micro-batch an update) to 1.1."""
WORTH_TELLING = 0.02
"""Share of the peak that a change of settings must save to be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes by part, at their largest; parts of sampling and of updating are not held at the same time."""

    shape: ModelShape
    setup: MemorySetup
    loading: Mapping[str, int]
    """Of weights that end in a smaller type or in 4 bits it may be more than the run ever holds again."""
    always: Mapping[str, int]
    sampling: Mapping[str, int]
    updating: Mapping[str, int]

    @property
    def phases(self) -> dict[str, int]:
        """Bytes in use while loading and in each phase that a step has, the runtime's apart."""
        always = sum(self.always.values())
        sampling = {"sampling": always + sum(self.sampling.values())} if self.setup.samples else {}
        return {
            "loading": sum(self.loading.values()),
            **sampling,
            "updating": always + sum(self.updating.values()),
        }

    @property
    def runtime(self) -> int:
        """What is held beside tensors in use: by the process or the CUDA context, and by the allocator.

        On a CPU what one phase has freed counts while the other runs: malloc gives back large tensors alone, and keeps
        the rest in pieces that the other phase's tensors do not fit into.  So it is with one micro-batch and the next.
        """
        if self.setup.on_cuda:
            return CUDA_CONTEXT_BYTES + round(CUDA_ALLOCATOR_SHARE * max(self.phases.values()))
        if not self.setup.samples:
            return IMPORTED_BYTES + LIBRARY_BYTES + round(FREED_ACTIVATIONS_SHARE * self.updating["activations"])
        kept = sum(self.sampling.values()) - parts.returned_cache(self.shape, self.setup)
        freed = min(kept, sum(self.updating.values()))
        return IMPORTED_BYTES + LIBRARY_BYTES + freed

    @property
    def peak(self) -> int:
        return max(self.phases.values()) + self.runtime

    @property
    def trained(self) -> int:
        return parts.trained_parameters(self.shape, self.setup)


def memory_plan(shape: ModelShape, setup: MemorySetup) -> MemoryPlan:
    """The memory of a run of this setup."""
    always = {
        "weights": parts.weights(shape, setup),
        "optimizer": parts.optimizer(shape, setup),
        "reference": parts.reference(shape, setup),
        "critic": parts.critic_bytes(shape, setup),
        "reward_models": setup.reward_models,
        "teacher": setup.teacher,
    }
    sampling = {
        "key_value_cache": parts.key_value_cache(shape, setup),
        "cache_growth": parts.cache_growth(shape, setup),
        "logits": parts.sampled_logits(shape, setup),
        "copies": parts.sampler_copies(shape, setup),
    }
    if not setup.samples:
        sampling = dict.fromkeys(sampling, 0)
    if setup.on_cuda and setup.shared_prompt:  # captured steps keep their addresses, so these stay where they are
        always |= {name: sampling.pop(name) for name in ("key_value_cache", "copies")}
    updating = {
        "gradients": parts.gradients(shape, setup),
        "activations": parts.activations(shape, setup) + parts.value_activations(shape, setup),
        "logits": parts.trained_logits(shape, setup),
        "copies": parts.update_copies(shape, setup),
    }
    loading = {"as_loaded": parts.bytes_while_loading(shape, setup)}
    return MemoryPlan(shape=shape, setup=setup, loading=loading, always=always, sampling=sampling, updating=updating)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one setting that makes a run smaller."""

    setting: str
    setup: MemorySetup
    """What it makes of the run."""
    saves: int
    """Bytes that it takes off the peak."""
    same_results: bool
    """Whether it changes nothing but memory and time."""


def changes_that_save(shape: ModelShape, setup: MemorySetup) -> list[Change]:
    """Each change that makes the run smaller and is not refused.

    Those that change no result come first, and of these the one that saves most.
    """
    peak = memory_plan(shape, setup).peak
    tried = [(each, True) for each in smaller_parts(setup)] + [(each, False) for each in other_training(shape, setup)]
    found = [
        Change(setting, changed, peak - memory_plan(shape, changed).peak, same) for (setting, changed), same in tried
    ]
    worth = [
        each for each in found if each.saves > WORTH_TELLING * peak and option_name(each.setting) not in setup.refused
    ]
    return sorted(worth, key=lambda change: (not change.same_results, -change.saves))


def changes_until_it_fits(shape: ModelShape, setup: MemorySetup, size: int) -> tuple[list[str], MemoryPlan]:
    """Settings to change together until the run fits into so many bytes, or nothing more helps, and the plan then."""
    settings: list[str] = []
    plan = memory_plan(shape, setup)
    while plan.peak > size and (changes := changes_that_save(shape, plan.setup)):
        settings = [each for each in settings if option_name(each) != option_name(changes[0].setting)] + [
            changes[0].setting
        ]
        plan = memory_plan(shape, changes[0].setup)
    return settings, plan


def option_name(setting: str) -> str:
    return setting.partition(" ")[0]


def smaller_parts(setup: MemorySetup) -> list[tuple[str, MemorySetup]]:
    """What bounds memory and changes no result: what to set, and the setup that it makes."""
    tried: list[tuple[str, MemorySetup]] = []
    held = min(setup.tokens_per_microbatch, setup.prompts_per_step * setup.group_size * setup.row_tokens)
    tokens = max(setup.row_tokens, held // 4)
    if tokens < setup.tokens_per_microbatch:
        tried.append((f"{setup.micro_batch_option} = {tokens}", replace(setup, tokens_per_microbatch=tokens)))
    if setup.samples and setup.num_rows > 1:
        rows = max(1, setup.num_rows // 4)
        tried.append((f"rollout.max_rows = {rows}", replace(setup, max_rows=rows)))
    if not setup.recomputes:
        tried.append(("model.gradient_checkpointing = true", replace(setup, recomputes=True)))
    return tried


def other_training(shape: ModelShape, setup: MemorySetup) -> list[tuple[str, MemorySetup]]:
    """What trains less of the model, or less exactly: what to set, and the setup that it makes."""
    tried: list[tuple[str, MemorySetup]] = []
    rank = setup.adapter_rank or ADAPTER_RANK
    if setup.weight_bytes == FLOAT32:
        halved = replace(setup, weight_bytes=BFLOAT16, compute_bytes=BFLOAT16, frozen_bytes=BFLOAT16)
        tried.append(("model.weights = bfloat16", halved))
    if setup.adapter_rank is None:
        tried.append((f"model.adapter.rank = {rank}", setup.with_adapter(rank)))
    elif not setup.quantized and reaches_half(shape.linear_parameters, shape.expert_parameters):
        tried.append(("model.quantization = nf4", setup.with_adapter(rank, quantized=True)))
    return tried
