"""The last lines of `posttrain collect`: what there is, who agreed, and what can be done with it."""

import shlex
from collections.abc import Mapping
from math import comb
from typing import Any

from posttrain.commands.collection.judge_answers import LlmJudge
from posttrain.commands.collection.pair_choice import choose_pairs
from posttrain.commands.collection.prompt_sampler import PairObjects, PromptSampler
from posttrain.commands.collection.sampled_prompts import SampledCompletion, SampledPrompt
from posttrain.commands.collection.terminal_ballot import barred
from posttrain.config import CollectConfig
from posttrain.options.collect import LlmJudgeOptions, RewardJudgeOptions
from posttrain.runs.folder import resume_command, shown
from posttrain.runs.progress import visible
from posttrain.runs.reports import Run
from posttrain.tasks.dataset import count_text

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


def show_collection_plan(config: CollectConfig) -> None:
    """Print the plan, and the first prompt's completions as they would be compared; nothing is kept, nobody asked."""
    calls = 0
    if isinstance(config.judge, LlmJudgeOptions):
        judge = LlmJudge(config.judge, seed=config.run.seed)
        calls = 2 * (len(judge.principles) if config.judge.principle == "all" else 1)
    with PromptSampler(config, PairObjects()) as sampler:
        print("\n".join(collection_plan_lines(config, calls)))
        (first,) = sampler.sampled(range(1))
    print("\n".join(first_prompt_lines(first, config)))


def most_pairs(config: CollectConfig) -> int:
    """Pairs of a prompt where no completion falls out."""
    every = comb(config.collect.group_size, 2)
    return {"all": every, "best_worst": 1, "random": min(every, config.collect.pairs_per_prompt)}[config.collect.pairs]


def collection_plan_lines(config: CollectConfig, calls_per_pair: int) -> list[str]:
    """What is sampled, how many pairs that makes at most, and what judging them takes."""
    options, pairs = config.collect, config.collect.num_prompts * most_pairs(config)
    return [
        f"model      {config.model.path}",
        (
            f"samples    {count_text(options.num_prompts, 'prompt')} × {count_text(options.group_size, 'completion')},"
            f" round {options.round}"
        ),
        f"pairs      {options.pairs}: at most {pairs}",
        f"judged     {judged_how(config)}" + (f": at most {pairs * calls_per_pair} calls" if calls_per_pair else ""),
        f"folder     {config.run.folder}",
    ]


def judged_how(config: CollectConfig) -> str:
    """By whom, in words."""
    judge = config.judge
    if isinstance(judge, LlmJudgeOptions):
        return f"by {judge.model} at {judge.endpoint}, in both orders"
    if isinstance(judge, RewardJudgeOptions):
        return f"by rewards; a difference of at most {judge.margin:g} is a tie"
    return "by people"


def first_prompt_lines(prompt: SampledPrompt, config: CollectConfig) -> list[str]:
    """A prompt, its completions, and which of them are compared."""
    pairs = choose_pairs([prompt], config.collect, seed=config.run.seed).pairs
    return [
        "",
        visible(f"prompt     {prompt.prompt_id}: {prompt.question.rstrip()}"),
        *(line for each in prompt.completions for line in completion_lines(each)),
        f"compared   {', '.join(f'{pair.first.sample} and {pair.second.sample}' for pair in pairs) or 'none of them'}",
    ]


def completion_lines(completion: SampledCompletion) -> list[str]:
    """One completion with its length, its end and its reward."""
    reward = "" if completion.reward is None else f", reward {completion.reward:g}"
    head = f"{completion.sample:<10} {completion.num_tokens} tokens, {completion.finish}{reward}"
    return [head, *barred(completion.text)]
