"""The setup that decides a run's memory, made from its config, and its plan in words."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from posttrain.algorithms.algorithm import Algorithm
from posttrain.config import Config, DpoConfig, SftConfig
from posttrain.models.adapters.adaptable import is_4_bit, reaches_half, require_half
from posttrain.models.adapters.lora import LoraExperts, lora_layers
from posttrain.models.classifiers.last_token_scores import classifier_bytes
from posttrain.models.forward import SharedPromptForward
from posttrain.models.loading.devices import chosen_device
from posttrain.models.loading.folder_kinds import DEQUANTISED_AT_LOAD, IN_4_BITS
from posttrain.models.memory.memory_parts import BFLOAT16, FLOAT32, MemorySetup, weights
from posttrain.models.memory.memory_plan import ADAPTER_RANK, MemoryPlan, changes_that_save, changes_until_it_fits
from posttrain.models.memory.model_shape import ModelShape, recipe_shape
from posttrain.models.memory.plan_parts import PARTS
from posttrain.models.model_outputs import is_recomputing
from posttrain.models.policy import Policy
from posttrain.options.model import EXPERTS, ModelOptions, NewModelOptions
from posttrain.options.pairs import PairOptions
from posttrain.options.reward import RewardOptions

GB = 1e9
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where Linux states how much of the machine's memory a container may use."""
SFT_ROW_TOKENS = 512
"""Assumed length of rows and pairs without a `max_length`; micro-batches are limited anyway."""
SAMPLED_PROMPT_TOKENS = 256
"""Assumed length of the prompts that DPO samples from in rounds."""
NOT_OF_NEW_MODELS = ("model.adapter.rank", "model.gradient_checkpointing", "model.weights")
"""Settings that the section of a new model does not have."""
NAMED_PARTS = 3
"""Number of parts that the one-line plan names."""
WORDS = {part.name: part.words for part in PARTS}


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """The memory that a run must fit into, in bytes."""

    size: int
    kind: str


def machine_memory(*, on_cuda: bool, ranks: int = 1) -> MachineMemory:
    """The memory of the GPU, or this process's share of this machine's memory, as one of several ranks."""
    if on_cuda:
        return MachineMemory(torch.cuda.get_device_properties(0).total_memory, "GPU memory")
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in LIMITS:
        said = limit.read_text().strip() if limit.is_file() else ""
        size = min(size, int(said)) if said.isdecimal() else size
    return MachineMemory(size // ranks, "RAM" if ranks == 1 else f"RAM for each of {ranks} ranks here")


def held_as(options: ModelOptions, shape: ModelShape, *, on_cuda: bool | None = None) -> MemorySetup:
    """How a model is stored, by its options; `on_cuda` None: the device that it would use here."""
    if options.quantization is not None:
        require_half(shape.linear_parameters, shape.expert_parameters)
    cuda = chosen_device(options.device).type == "cuda" if on_cuda is None else on_cuda
    small = options.weights == "bfloat16"
    in_bfloat16 = options.dtype == "bfloat16" or small or (options.dtype == "auto" and cuda)
    compute = BFLOAT16 if in_bfloat16 else FLOAT32
    rank = ADAPTER_RANK if options.adapter is None else options.adapter.rank
    frozen = shape.frozen_parameters(options.frozen)
    refused = {
        "model.adapter.rank": bool(options.frozen),
        "model.weights": options.dtype == "float32",
        "model.quantization": shape.quantised is not None,
    }
    return MemorySetup(
        weight_bytes=BFLOAT16 if small else FLOAT32,
        # weights: auto, of a model that was stored in bfloat16
        frozen_bytes=FLOAT32 if options.weights == "float32" else compute,
        compute_bytes=compute,
        adapter_rank=rank if options.trains_adapter else None,
        adapts_experts=options.adapter is not None and EXPERTS in options.adapter.targets,
        quantized=options.quantization is not None or shape.quantised == IN_4_BITS,
        trained=shape.parameters - frozen if frozen and not options.trains_adapter else None,
        recomputes=options.gradient_checkpointing,
        refused=tuple(option for option, is_refused in refused.items() if is_refused),
        shared_prompt=shape.shared_prompt,
        on_cuda=cuda,
    )


def rl_setup(
    config: Config, shape: ModelShape, algorithm: Algorithm, *, prompt_tokens: int, on_cuda: bool | None = None
) -> MemorySetup:
    """The setup of an RL run: completions at their limit, after prompts of this length."""
    rollout, critic, teacher = config.rollout, algorithm.critic, algorithm.teacher
    held = held_as(config.model, shape, on_cuda=on_cuda)
    longest = min(config.model.context or shape.max_positions, shape.max_positions)
    reference = config.reference.path if algorithm.uses_reference else ""
    others = [ModelOptions(path=path) for path in ("" if teacher is None else teacher.model, reference) if path]
    shapes = [(options, recipe_shape(options)) for options in others]
    return replace(
        held,
        reference=(algorithm.uses_reference and not reference) or (teacher is not None and teacher.weights == "start"),
        teacher=sum(weights(of, held_as(options, of, on_cuda=held.on_cuda)) for options, of in shapes),
        reward_models=planned_reward_bytes(config.rewards, on_cuda=held.on_cuda),
        critic=critic is not None and critic.has_own_trunk(shape.parameters),
        value_head="none" if critic is None else critic.head,
        prompt_tokens=prompt_tokens,
        completion_tokens=max(1, min(rollout.max_completion_tokens, longest - prompt_tokens)),
        prompts_per_step=rollout.prompts_per_step,
        group_size=rollout.group_size,
        max_rows=rollout.max_rows,
        steps_ahead=rollout.max_staleness,
        evaluates_amid=config.evaluation.every_steps > 0,
        tokens_per_microbatch=config.update.tokens_per_microbatch,
    )


def planned_reward_bytes(rewards: Sequence[RewardOptions], *, on_cuda: bool) -> int:
    """Bytes of all reward models that a recipe names, including all members of ensembles."""
    return sum(
        classifier_bytes(replace(item, model=folder), on_cuda=on_cuda)
        for item in rewards
        for folder in ((item.model, *item.ensemble) if item.model else ())
    )


def sft_setup(config: SftConfig, shape: ModelShape, *, on_cuda: bool | None = None) -> MemorySetup:
    """The setup of a supervised run: whole rows of some length, as many as fit a micro-batch."""
    options, model = config.sft, config.model
    if isinstance(model, NewModelOptions):
        held = MemorySetup(shared_prompt=shape.shared_prompt, on_cuda=bool(on_cuda), refused=NOT_OF_NEW_MODELS)
    else:
        held = held_as(model, shape, on_cuda=on_cuda)
    tokens = min(options.max_length or SFT_ROW_TOKENS, shape.max_positions)
    rows = max(1, -(-options.tokens_per_batch // tokens))
    return replace(
        held,
        samples=False,
        micro_batch_option="sft.tokens_per_microbatch",
        prompt_tokens=0,
        completion_tokens=tokens,
        prompts_per_step=min(rows, options.rows_per_batch or rows),
        group_size=1,
        tokens_per_microbatch=options.tokens_per_microbatch,
    )


def pairs_setup(
    model: ModelOptions,
    options: PairOptions,
    shape: ModelShape,
    *,
    longest: int | None = None,
    on_cuda: bool | None = None,
) -> MemorySetup:
    """The setup of a run on pairs, with both answers of a pair at once; `longest` None: before any pair is read."""
    return replace(
        held_as(model, shape, on_cuda=on_cuda),
        samples=False,
        micro_batch_option=f"{options.section}.tokens_per_microbatch",
        prompt_tokens=0,
        completion_tokens=longest or min(options.max_length or SFT_ROW_TOKENS, shape.max_positions),
        prompts_per_step=options.pairs_per_batch,
        group_size=2,
        tokens_per_microbatch=options.tokens_per_microbatch,
    )


def dpo_setup(config: DpoConfig, shape: ModelShape, *, on_cuda: bool | None = None) -> MemorySetup:
    """The same with a reference, and, with rounds, the sampler and the reward models that judge completions."""
    options, rollout = config.dpo, config.rollout
    pairs = pairs_setup(config.model, options, shape, on_cuda=on_cuda)
    pairs = replace(pairs, reference=options.keeps_reference)
    if not options.rounds:
        return pairs
    answer = max(1, min(rollout.max_completion_tokens, shape.max_positions - 1))
    return replace(
        pairs,
        samples=True,
        reward_models=planned_reward_bytes(config.rewards, on_cuda=pairs.on_cuda),
        prompt_tokens=min(SAMPLED_PROMPT_TOKENS, shape.max_positions - answer),
        completion_tokens=answer,
        prompts_per_step=options.prompts_per_round,
        group_size=rollout.group_size,
        max_rows=rollout.max_rows,
    )


def held_by(policy: Policy, setup: MemorySetup) -> MemorySetup:
    """The setup with the actual types and frozen weights of a loaded policy."""
    model = policy.model
    layers = [each for each in model.modules() if isinstance(each, nn.Linear | Conv1D)]
    frozen = [each.weight for each in layers if not each.weight.requires_grad and each.weight.is_floating_point()]
    adapters = list(lora_layers(model).values())
    return replace(
        setup,
        weight_bytes=cast(nn.Embedding, model.get_input_embeddings()).weight.dtype.itemsize,
        frozen_bytes=frozen[0].dtype.itemsize if frozen else FLOAT32,
        compute_bytes=policy.compute_dtype.itemsize,
        adapter_rank=adapters[0].options.rank if adapters else None,
        adapts_experts=any(isinstance(each, LoraExperts) for each in adapters),
        quantized=any(is_4_bit(each) for each in layers),
        trained=sum(each.numel() for each in model.parameters() if each.requires_grad),
        recomputes=is_recomputing(model),
        shared_prompt=isinstance(policy.forward, SharedPromptForward)
        or (policy.ranks.size > 1 and policy.forward_reason is None),
        ranks=policy.ranks.size,
        on_cuda=policy.device.type == "cuda",
    )


def compared_setups(shape: ModelShape, setup: MemorySetup) -> dict[str, MemorySetup]:
    """This recipe, and the same as PPO with a critic, as GRPO, as GRPO with LoRA and as GRPO with QLoRA.

    Leaves out QLoRA if 4 bits would be rejected; if a folder's weights cannot be trained, only the recipe remains.
    """
    if shape.quantised not in (None, DEQUANTISED_AT_LOAD):
        return {"recipe": setup}
    whole = replace(setup, adapter_rank=None, adapts_experts=False, quantized=False, trained=None)
    grpo = replace(whole, critic=False, value_head="none")
    columns = {
        "recipe": setup,
        "PPO": replace(grpo, critic=True, value_head="mlp"),
        "GRPO": grpo,
        "GRPO LoRA": grpo.with_adapter(ADAPTER_RANK),
    }
    if shape.quantised is None and reaches_half(shape.linear_parameters, shape.expert_parameters):
        columns["GRPO QLoRA"] = grpo.with_adapter(ADAPTER_RANK, quantized=True)
    return columns


def memory_line(plan: MemoryPlan, machine: MachineMemory) -> str:
    """The plan in one line: the peak, its phase, and its largest parts."""
    phase = plan.largest_phase
    held = {**(plan.parts["always"] if phase != "loading" else {}), **plan.parts[phase]}
    largest = sorted(held.items(), key=lambda part: -part[1])[:NAMED_PARTS]
    named = ", ".join(f"{WORDS[name]} {gigabytes(size)}" for name, size in largest)
    return (
        f"memory     at most about {gigabytes(plan.peak)} of {gigabytes(machine.size)} GB {machine.kind}, while"
        f" {phase}: {named}, the process itself {gigabytes(plan.runtime)}"
    )


def memory_warning(plan: MemoryPlan, machine: MachineMemory) -> list[str]:
    """The warning before a run that will not fit, with settings that would help; empty if it fits."""
    if plan.peak <= machine.size:
        return []
    warning = (
        f"warning    this run will not fit: it needs up to about {gigabytes(plan.peak)} GB while"
        f" {plan.largest_phase}, but there are {gigabytes(machine.size)} GB of {machine.kind}."
    )
    changes = changes_that_save(plan.shape, plan.setup)
    if not changes:
        return [f"{warning}  Use a smaller model."]
    lines = [f"{warning}  Each of these settings saves"]
    for change in changes:
        enough = ", enough to fit" if plan.peak - change.saves <= machine.size else ""
        other = "" if change.same_results else "; it changes the training"
        lines.append(f"           {gigabytes(change.saves)} GB  {change.setting}{enough}{other}")
    settings, then = changes_until_it_fits(plan.shape, plan.setup, machine.size)
    fits = "it fits" if then.peak <= machine.size else "it still does not fit: use a smaller model"
    together = " together" if len(settings) > 1 else ""
    return [*lines, f"           With {', '.join(settings)}{together} it is {gigabytes(then.peak)} GB, and {fits}."]


def gigabytes(size: float) -> str:
    """Bytes in units of 10⁹, with about three digits."""
    return f"{size / GB:.0f}" if size >= 100 * GB else f"{size / GB:.1f}" if size >= 10 * GB else f"{size / GB:.2f}"
