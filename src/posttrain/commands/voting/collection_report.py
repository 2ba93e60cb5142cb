"""The last lines of `posttrain collect`: what there is, who agreed, and what can be done with it."""

import shlex
from collections.abc import Mapping
from typing import Any

from posttrain.runs.folder import resume_command, shown
from posttrain.runs.reports import Run

DROPPED = {
    "num_identical": "identical",
    "num_cut_off": "cut off",
    "num_empty": "empty",
    "num_unscored": "without a reward",
}
"""Completions that are in no pair, by the summary's names."""


def collection_closing_lines(run: Run) -> list[str]:
    """What came out, and how to go on."""
    resume = f"go on      {resume_command(run.folder, 'collect')}"
    if not run.summary:
        return ["Nothing is collected yet."]
    summary: Mapping[str, Any] = run.summary
    dropped = [f"{summary[name]} {what}" for name, what in DROPPED.items() if summary[name]]
    left_out = f"; not compared: {', '.join(dropped)}" if dropped else ""
    rows = shlex.quote(str(shown(run.folder) / "preferences.jsonl"))
    lines = [
        f"sampled    {summary['num_completions']} completions of {summary['num_prompts']} prompts{left_out}",
        pairs_line(summary),
        *judge_lines(summary),
        *length_lines(summary),
        f"rows       {rows}",
    ]
    if run.interrupted or summary.get("num_unasked"):
        lines.append(resume)
    if summary["num_preferences"]:
        lines.append(f"learn      posttrain reward-model, or posttrain dpo, with --task.path {rows}")
    return lines


def pairs_line(summary: Mapping[str, Any]) -> str:
    """What came of the pairs."""
    better, ties, left = summary["num_preferences"], summary["num_ties"], summary["num_open"]
    skipped = f", {summary['num_skipped']} of them skipped" if summary.get("num_skipped") else ""
    return f"pairs      {summary['num_pairs']}: {better} preferences, {ties} ties, {left} open{skipped}"


def judge_lines(summary: Mapping[str, Any]) -> list[str]:
    """How far judges are to be trusted, as far as their answers tell."""
    lines = []
    if summary.get("num_asked_in_both_orders"):
        lines.append(
            f"orders     {summary['same_in_both_orders']:.0%} of {summary['num_asked_in_both_orders']} judged alike in"
            f" both; what was shown first got {summary['first_shown_share']:.0%} of the points"
        )
    for raters, found in summary.get("agreement", {}).items():
        kappa = "undefined" if found["kappa"] is None else f"{found['kappa']:.2f}"
        raw = "" if found["raw"] is None else f" {found['raw']:.0%} alike, Cohen's kappa {kappa},"
        lines.append(f"agreement  {raters}:{raw} over {found['num_common']} pairs")
    return lines


def length_lines(summary: Mapping[str, Any]) -> list[str]:
    """Whether the longer answer wins."""
    if summary["longer_chosen_share"] is None:
        return []
    chosen, rejected = summary["mean_chosen_tokens"], summary["mean_rejected_tokens"]
    wins = f"the longer one wins {summary['longer_chosen_share']:.0%}"
    return [f"length     {chosen:.0f} tokens chosen, {rejected:.0f} rejected; {wins}"]
