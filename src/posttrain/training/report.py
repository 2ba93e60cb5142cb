"""What a run says in words: its plan before, what came out after, and the files that keep it."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap
from typing import cast

import torch

from posttrain.batch import collate
from posttrain.runs.clock import Clock
from posttrain.runs.curves import draw_curves
from posttrain.runs.files import write_atomically, writing
from posttrain.runs.summary import HELD_OUT, build_summary
from posttrain.training.collector import StepContext, collect
from posttrain.training.session import Session
from posttrain.training.state import RunState
from posttrain.training.update import Objective, Observed, micro_loss

SHOWN = 3
"""Held-out problems whose completions are shown before and after."""
COLUMN = 46
"""Characters of a transcript's column."""
TIMED_STEP = 0
"""The step number of the trial behind the plan's timing; real steps count from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One trial step, which changes no weight."""

    seconds: float
    tokens: int
    """Completion tokens that it sampled."""


def timed_step(session: Session) -> Timing:
    """Sample, grade and differentiate one step's batch, and throw the gradient away.

    Rewards are called as in a step, so that a mistake in one of them shows before anything is trained.
    """
    clock, options = Clock(), session.config
    moment = StepContext(step=TIMED_STEP, weights_version=0, clock=clock, journal=lambda groups, grades: None)
    judged = collect(session, moment).judged
    with clock("update"):
        batch = collate(
            judged,
            session.algorithm.token_weights,
            max_completion_tokens=options.rollout.max_completion_tokens,
            keep_zero_advantages=session.algorithm.keeps_zero_advantages,
        )
        objective = Objective(
            algorithm=session.algorithm, temperature=options.rollout.temperature, reference=session.reference
        )
        for micro in batch.split(options.update.tokens_per_microbatch):
            micro_loss(session.policy, micro, objective, Observed()).backward()
        session.policy.model.zero_grad(set_to_none=True)
        if session.policy.device.type == "cuda":
            torch.cuda.synchronize(session.policy.device)
    tokens = sum(len(rollout.tokens) for group in judged.groups for rollout in group.rollouts)
    return Timing(seconds=clock.total, tokens=tokens)


def plan(session: Session, timing: Timing | None = None) -> list[str]:
    """What the run is about to do, and how long it takes where a step was timed."""
    config, model = session.config, session.policy.model
    rollout, millions = config.rollout, sum(parameter.numel() for parameter in model.parameters()) / 1e6
    share, pace = "", ""
    if timing is not None:
        share = f", at first {timing.tokens / rollout.rollouts_per_step:.0f} tokens each"
        total = timing.seconds * config.run.num_steps / 60
        pace = f", about {timing.seconds:.1f} s each as completions are now: {total:.1f} min"
    return [
        f"model      {config.model.path}, {millions:.2f} M parameters, {config.model.dtype} on {session.policy.device}",
        f"task       {session.task.name}, {len(session.questions().prompts)} held-out problems",
        f"algorithm  {session.algorithm.name}, learning rate {config.update.learning_rate:g}",
        f"rewards    {', '.join(f'{item.name} × {item.settings.weight:g}' for item in session.rewards)}",
        (
            f"one step   {rollout.prompts_per_step} prompts × {rollout.group_size} completions{share}"
            f" (limit {rollout.max_completion_tokens})"
        ),
        f"steps      {config.run.num_steps}{pace}",
        f"folder     {config.run.folder}",
    ]


def held_out_metrics(results: Mapping[str, object]) -> dict[str, float]:
    """Full held-out results under the names of docs/metrics.md."""
    metrics: dict[str, float] = {}
    if "format_rate" in results:
        metrics["eval/format_rate"] = cast(float, results["format_rate"])
    if results["mean_length"] is not None:
        metrics["eval/mean_length"] = cast(float, results["mean_length"])
    for name in HELD_OUT:
        interval = results[f"{name}_interval"]
        if interval is not None:
            low, high = cast(Sequence[float], interval)
            metrics |= {
                f"eval/{name}": cast(float, results[name]),
                f"eval/{name}_low": low,
                f"eval/{name}_high": high,
            }
    return metrics


def write_results(session: Session, folder: Path, state: RunState, after: Mapping[str, object]) -> dict[str, object]:
    """Save the model and curves of a finished run; returns the content of its summary."""
    summary = build_summary(
        before=state.before,
        after=after,
        seconds=state.seconds,
        tokens={"completion": state.completion_tokens, "trained": state.trained_tokens, "all": state.num_tokens},
        device=str(session.policy.device),
    )
    with writing(folder / "model", folder):
        session.policy.model.save_pretrained(folder / "model")
        session.policy.tokenizer.save_pretrained(folder / "model")
        write_atomically(folder / "model" / "README.md", model_card(session, state, summary).encode())
    with writing(folder / "curves.png", folder):
        draw_curves(folder / "metrics.jsonl", folder / "curves.png", title=folder.name)
    return summary


def model_card(session: Session, state: RunState, summary: Mapping[str, object]) -> str:
    """What the model folder says of itself."""
    config = session.config
    lines = "\n".join(f"| {label} | {before} | {after} |" for label, before, after in comparison(summary))
    return (
        f"---\nlibrary_name: transformers\ntags: [posttrain, {session.algorithm.name}]\n---\n\n"
        f"# {Path(config.run.folder).name}\n\n"
        f"{config.model.path}, trained with posttrain: {session.algorithm.name} on {session.task.name} for"
        f" {state.step} steps of {config.rollout.prompts_per_step} × {config.rollout.group_size}"
        " rollouts.\n\n"
        f"| held-out | before | after |\n|---|---|---|\n{lines}\n\nThe recipe is `config.yaml` in the run folder.\n"
    )


def comparison(summary: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """Rows (what, before, after) of the held-out results."""
    before, after = (cast(Mapping[str, object], summary[when]) for when in ("before", "after"))
    labels = {
        "accuracy_sampled": "accuracy, sampled at temperature 1",
        "accuracy_greedy": "accuracy, greedy",
        "pass_at_8": "pass@8",
        "mean_length": "mean length, tokens",
        "format_rate": "format rate",
        "tries_per_completion": "tries per completion",
        "success_per_try": "success per try",
        "success_of_first_try": "success of first tries",
        "accuracy_never_giving_up": "accuracy if never allowed to give up",
    }
    return [
        (label, shown(before, name), shown(after, name))
        for name, label in labels.items()
        if before.get(name) is not None and after.get(name) is not None
    ]


def shown(results: Mapping[str, object], name: str) -> str:
    """One result, with its 95% interval where it has one."""
    value = cast(float, results[name])
    interval = cast("Sequence[float] | None", results.get(f"{name}_interval"))
    form = "{:.1f}" if name in ("mean_length", "tries_per_completion") else "{:.3f}"
    return form.format(value) + (f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else "")


def closing_lines(
    folder: Path, summary: Mapping[str, object], before: Sequence[Sequence[str]], after: Sequence[Sequence[str]]
) -> list[str]:
    """The end of a run: numbers before and after, transcripts side by side, where things are and what to do next."""
    rows = [("held-out", "before", "after"), *comparison(summary)]
    table = [f"{label:<38}{left:<24}{right}" for label, left, right in rows]
    transcripts = [line for b, a in zip(before, after, strict=True) for line in side_by_side(b[0], b[1], a[1])]
    return [
        "",
        *table,
        "",
        *transcripts,
        f"run folder   {folder}  (summary.json, metrics.jsonl, rollouts/, curves.png)",
        f"ask it       posttrain chat {folder / 'model'}",
        f"measure it   posttrain eval {folder / 'model'}",
    ]


def side_by_side(prompt: str, before: str, after: str) -> list[str]:
    """One problem's completions in two columns."""
    left, right = (
        [piece for line in text.split("\n") for piece in (wrap(line, COLUMN, drop_whitespace=False) or [""])]
        for text in (before, after)
    )
    body = [f"  {a:<{COLUMN}} | {b}" for a, b in zip_longest(left, right, fillvalue="")]
    return [prompt.strip(), f"  {'before':<{COLUMN}} | after", *body, ""]


def interrupted(folder: Path, step: int, by: signal.Signals) -> list[str]:
    """What an interrupted run leaves."""
    return [
        f"{by.name}: stopped after step {step}; everything is saved.",
        f"go on with   posttrain rl --resume {folder}",
    ]
