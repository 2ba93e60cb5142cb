"""What a run on pairs says in words, and the files that keep what came out."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch

from posttrain.config import DpoConfig
from posttrain.models.loading.description import adapter_lines, model_lines
from posttrain.models.loading.saving import save_trained
from posttrain.models.memory.memory_plan import memory_plan
from posttrain.models.memory.model_shape import object_shape
from posttrain.models.policy import Policy
from posttrain.options.adapter import run_model
from posttrain.options.dpo import DpoOptions
from posttrain.records import Preference
from posttrain.runs.curves import draw_curves
from posttrain.runs.files import writing
from posttrain.runs.folder import resume_command, shown
from posttrain.runs.planned_memory import dpo_setup, machine_memory, memory_line, memory_warning
from posttrain.runs.summary import peak_memory_bytes, versions
from posttrain.tasks.base import Probe
from posttrain.training.dpo.dpo_state import TrainedOnPairs
from posttrain.training.report import comparison, side_by_side

SHOWN_CHARACTERS = 400
"""Of each part of a pair that is shown."""
Transcripts = tuple[Sequence[Sequence[str]], Sequence[Sequence[str]]]


def dpo_plan_lines(
    config: DpoConfig, policy: Policy, model: str, described: Sequence[str], *, num_steps: int
) -> list[str]:
    """What the run is about to do with the model of this name, and with the pairs so described."""
    options, shape = config.dpo, object_shape(policy.model)
    on_cuda = policy.device.type == "cuda"
    memory, machine = memory_plan(shape, dpo_setup(config, shape, on_cuda=on_cuda)), machine_memory(on_cuda=on_cuda)
    epochs = f": {options.num_epochs:g} epochs" if options.num_epochs is not None and not options.rounds else ""
    rounds = f": {options.steps_per_round} in each round" if options.rounds else ""
    first, *more = described
    return [
        *model_lines(policy, model),
        *adapter_lines(policy, options),
        f"pairs      {first}",
        *(f"           {line}" for line in more),
        f"loss       {loss_in_words(options)}",
        f"reference  {reference_in_words(options)}",
        f"one step   {options.pairs_per_batch} pairs, learning rate {options.largest_rate:g} ({options.schedule})",
        f"steps      {num_steps}{epochs}{rounds}",
        memory_line(memory, machine),
        *memory_warning(memory, machine),
        f"folder     {config.run.folder}",
    ]


def loss_in_words(options: DpoOptions) -> str:
    """What is minimised."""
    parts = [f"{options.loss}, beta {options.beta:g}"]
    parts += [f"{options.label_smoothing:g} of the labels taken to be wrong"] if options.label_smoothing else []
    parts += ["log-probs per token"] if options.length_normalized else []
    parts += [f"{options.nll_weight:g} × -log π of chosen answers per token"] if options.nll_weight else []
    return ", ".join(parts)


def reference_in_words(options: DpoOptions) -> str:
    """What the policy is compared with."""
    whose = "the policy at the beginning of each round" if options.refresh_reference else "the policy at the beginning"
    how = "asked once for all pairs" if options.reference == "precomputed" else "asked for each batch"
    return f"{whose}, {how}"


def preview_lines(policy: Policy, pairs: Sequence[Preference]) -> list[str]:
    """Pairs as the model reads them, a line for each line of theirs."""
    lines = ["The first pairs, as they are read:"]
    for pair in pairs:
        parts = {"prompt": pair.prompt.tokens, "chosen": pair.chosen.tokens, "rejected": pair.rejected.tokens}
        for name, tokens in parts.items():
            lines.append(f"--- {name}, {len(tokens)} tokens ({pair.where})")
            lines += shortened(str(policy.tokenizer.decode(list(tokens)))).split("\n")
    return lines


def shortened(text: str) -> str:
    """A text without its middle, if it is long."""
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} … {text[-half:]}"


def write_model(config: DpoConfig, policy: Policy, folder: Path, model: str) -> None:
    """Save the model, or its adapter, and curves of a finished run."""
    adapter = config.model.adapter
    card = (
        f"---\nlibrary_name: transformers\ntags: [posttrain, dpo]\n---\n\n# {folder.name}\n\n{model}, trained with"
        f" posttrain on pairs of answers: {loss_in_words(config.dpo)}.\n\nThe recipe is `config.yaml` in the run"
        " folder.\n"
    )
    with writing(folder / "model", folder):
        save_trained(policy, folder, adapter.save if adapter is not None else "adapter", card)
    if config.run.curves:
        with writing(folder / "curves.png", folder):
            draw_curves(folder / "metrics.jsonl", folder / "curves.png", title=folder.name)


def dpo_summary(config: DpoConfig, policy: Policy, trained: TrainedOnPairs) -> dict[str, object]:
    """The content of summary.json, but for what it says of where the pairs come from."""
    run = trained.run
    return {
        "before": run.before,
        "after": run.after,
        "steps": run.step,
        "updates": run.num_updates,
        "loss": loss_in_words(config.dpo),
        "pairs_learned": run.num_pairs,
        **({"rounds": run.rounds} if config.dpo.rounds else {}),
        "seconds": {**run.seconds, "total": trained.seconds},
        "tokens": {"trained": run.num_tokens, "completion": run.completion_tokens},
        "peak_memory_bytes": peak_memory_bytes(),
        "versions": versions(),
        "device": str(policy.device),
        "machine": {"cores": os.cpu_count(), "threads": torch.get_num_threads()},
    }


def last_lines(
    folder: Path,
    trained: TrainedOnPairs,
    summary: Mapping[str, object],
    probes: Mapping[str, Probe],
    transcripts: Transcripts,
) -> list[str]:
    """The end of the output: what was measured before and after, and what to do next."""
    folder, run = shown(folder), trained.run
    if trained.options.rounds:
        rows = comparison(summary, probes.values()) if run.after.get("num_problems") else []
        rows = [("held-out", "before", "after"), *rows] if rows else []
        pairs = [line for b, a in zip(*transcripts, strict=True) for line in side_by_side(b[0], b[1], a[1])]
    else:
        rows, pairs = [("held-out pairs", "before", "after"), *pair_rows(run.before, run.after)], []
        rows = rows if len(rows) > 1 else []
    wide, width = (max([18, *(len(row[column]) for row in rows)]) + 2 for column in (0, 1))
    table = [f"{label:<{wide}}{left:<{width}}{right}" for label, left, right in rows]
    return [
        "",
        *(table or ["Nothing was held out, so nothing was measured before and after."]),
        "",
        *pairs,
        f"model        {run_model(folder)}",
        f"talk to it   posttrain chat {folder}",
    ]


def pair_rows(before: Mapping[str, object], after: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """Rows (what, before, after) of what held-out pairs say."""
    named = {
        "ranked right": "pairs/accuracy",
        "margin": "pairs/margin",
        "loss": "loss",
        "log π of chosen": "logps/chosen",
        "log π of rejected": "logps/rejected",
    }
    return [
        (label, told(before, name), told(after, name))
        for label, name in named.items()
        if name in before and name in after
    ]


def told(results: Mapping[str, object], name: str) -> str:
    """One result, with its 95% interval where it has one."""
    value = cast(float, results[name])
    if f"{name}_low" not in results:
        return f"{value:.3f}"
    low, high = (cast(float, results[f"{name}_{end}"]) for end in ("low", "high"))
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def interrupted_lines(folder: Path, step: int, by: str) -> list[str]:
    """What an interrupted run leaves."""
    return [
        f"{by}: stopped after step {step}; everything is saved.",
        f"go on with   {resume_command(folder, 'dpo')}",
    ]
