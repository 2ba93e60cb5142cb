"""The output of `posttrain collect`: the plan and first pairs of a dry run, and the last lines of a collection."""

import shlex
from collections.abc import Mapping
from math import comb
from typing import Any

from posttrain.commands.collection.ballot import barred
from posttrain.commands.collection.judge_answers import LlmJudge
from posttrain.commands.collection.pairs import choose_pairs
from posttrain.commands.collection.prompt_sampler import PromptSampler
from posttrain.config import CollectConfig
from posttrain.options.collect import LlmJudgeOptions, RewardJudgeOptions
from posttrain.runs.folder import resume_command, shown
from posttrain.runs.progress import visible
from posttrain.runs.reports import Run
from posttrain.tasks.dataset import count_text
from posttrain.training.session import NO_CALLER

DROPPED = {
    "num_identical": "identical",
    "num_cut_off": "cut off",
    "num_empty": "empty",
    "num_unscored": "without a reward",
}
"""Completions without a pair, by the summary's names."""


def show_collection_plan(config: CollectConfig) -> None:
    """Print the plan, and the first prompt's completions as they would be compared; nothing is saved or asked."""
    options, judge, every = config.collect, config.judge, comb(config.collect.group_size, 2)
    most = {"all": every, "best_worst": 1, "random": min(every, options.pairs_per_prompt)}[options.pairs]
    pairs, how = options.num_prompts * most, "by people"
    if isinstance(judge, LlmJudgeOptions):
        principles = LlmJudge(judge, seed=config.run.seed).principles
        calls = 2 * pairs * (len(principles) if judge.principle == "all" else 1)
        how = f"by {judge.model} at {judge.endpoint}, in both orders: at most {calls} calls"
    elif isinstance(judge, RewardJudgeOptions):
        how = f"by rewards; a difference of at most {judge.margin:g} is a tie"
    sampled = f"{count_text(options.num_prompts, 'prompt')} × {count_text(options.group_size, 'completion')}"
    with PromptSampler(config, NO_CALLER) as sampler:
        print(f"model      {config.model.path}")
        print(f"samples    {sampled}, round {options.round}")
        print(f"pairs      {options.pairs}: at most {pairs}")
        print(f"judged     {how}")
        print(f"folder     {config.run.folder}\n")
        (prompt,) = sampler.sampled(range(1))
    print(visible(f"prompt     {prompt.prompt_id}: {prompt.question.rstrip()}"))
    for each in prompt.completions:
        reward = "" if each.reward is None else f", reward {each.reward:g}"
        print("\n".join([f"{each.sample:<10} {each.num_tokens} tokens, {each.finish}{reward}", *barred(each.text)]))
    chosen = choose_pairs([prompt], options, seed=config.run.seed).pairs
    compared = ", ".join(f"{pair.first.sample} and {pair.second.sample}" for pair in chosen)
    print(f"compared   {compared or 'none'}")


def collection_closing_lines(run: Run) -> list[str]:
    """The results, and how to continue."""
    if not run.summary:
        return ["Nothing has been collected yet."]
    summary: Mapping[str, Any] = run.summary
    dropped = [f"{summary[name]} {what}" for name, what in DROPPED.items() if summary[name]]
    left_out = f"; not compared: {', '.join(dropped)}" if dropped else ""
    skipped = f", {summary['num_skipped']} of them skipped" if summary.get("num_skipped") else ""
    counts = f"{summary['num_preferences']} preferences, {summary['num_ties']} ties, {summary['num_open']} open"
    rows = shlex.quote(str(shown(run.folder) / "preferences.jsonl"))
    lines = [
        f"sampled    {summary['num_completions']} completions of {summary['num_prompts']} prompts{left_out}",
        f"pairs      {summary['num_pairs']}: {counts}{skipped}",
    ]
    if summary.get("num_asked_in_both_orders"):
        lines.append(
            f"orders     {summary['same_in_both_orders']:.0%} of {summary['num_asked_in_both_orders']} judged alike in"
            f" both; what was shown first got {summary['first_shown_share']:.0%} of the points"
        )
    for raters, found in summary.get("agreement", {}).items():
        kappa = "undefined" if found["kappa"] is None else f"{found['kappa']:.2f}"
        raw = "" if found["raw"] is None else f" {found['raw']:.0%} alike, Cohen's kappa {kappa},"
        lines.append(f"agreement  {raters}:{raw} over {found['num_common']} pairs")
    if summary["longer_chosen_share"] is not None:
        means = f"{summary['mean_chosen_tokens']:.0f} tokens chosen, {summary['mean_rejected_tokens']:.0f} rejected"
        lines.append(f"length     {means}; the longer one wins {summary['longer_chosen_share']:.0%}")
    lines.append(f"rows       {rows}")
    if run.interrupted or summary.get("num_unasked"):
        lines.append(f"continue   {resume_command(run.folder, 'collect')}")
    if summary["num_preferences"]:
        lines.append(f"learn      posttrain reward-model, or posttrain dpo, with --task.path {rows}")
    return lines
