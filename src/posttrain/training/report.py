"""What a run says in words: its plan before, what came out after, and the files that keep it."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap
from types import MappingProxyType
from typing import cast

import torch

from posttrain.config.recipes import recorded_time
from posttrain.generation.parity import mixture_note
from posttrain.models.loading.description import adapter_lines, model_lines, unused_options
from posttrain.models.loading.saving import save_trained
from posttrain.models.memory.memory_plan import MemoryPlan
from posttrain.models.memory.model_shape import object_shape
from posttrain.options.adapter import run_model
from posttrain.rewards.model import reward_models_in
from posttrain.runs.curves import draw_curves
from posttrain.runs.files import writing
from posttrain.runs.folder import shown
from posttrain.runs.planned_memory import held_by, machine_memory, memory_line, memory_warning, rl_setup
from posttrain.runs.run_folder import RunFolder
from posttrain.runs.summary import HELD_OUT, REWARD, SCORE, build_summary
from posttrain.tasks.base import Probe, Reading
from posttrain.tasks.dataset import DatasetTask, count_text
from posttrain.training.caller.caller_objects import given_rewards
from posttrain.training.collector import CollectedStep
from posttrain.training.critic import save_critic
from posttrain.training.evaluation import completions_of_run, logged_readings, source_readings
from posttrain.training.optimizer import standing_still
from posttrain.training.session import Session
from posttrain.training.trained import RunState

SHOWN = 3
"""Held-out problems whose completions are shown before and after."""
COLUMN = 46
"""Characters of a transcript's column."""
NOTHING_HELD_OUT = "No rows were held out, so nothing was measured before and after."
NO_SECONDS: Mapping[str, float] = MappingProxyType({})
NO_PROBES: Mapping[str, Probe] = MappingProxyType({})


def rl_plan_lines(
    session: Session,
    first: CollectedStep | None = None,
    seconds: Mapping[str, float] = NO_SECONDS,
    *,
    whole_step: bool = False,
) -> list[str]:
    """What the run is about to do; where a step was collected, how long that took and how long its completions are.

    Seconds are by stage; with `whole_step` those of its gradient are among them.
    """
    config, rollout = session.config, session.config.rollout
    share = pace = ""
    time = []
    if first is not None:
        share = f", at first {first.num_completion_tokens / rollout.rollouts_per_step:.0f} tokens each"
        each = sum(seconds.values())
        pace = f", about {each:.1f} s each" if whole_step else f", {each:.1f} s to sample and score the first"
        time = time_lines(session, first, seconds, whole_step=whole_step)
    lines = [
        *policy_lines(session),
        f"task       {session.task.name}, {len(session.questions().prompts)} held-out problems",
        *(f"           {note}" for note in (session.task.notes() if isinstance(session.task, DatasetTask) else ())),
        *adapter_lines(session.policy, config.update),
        f"algorithm  {session.algorithm.name}, learning rate {config.update.largest_rate:g}",
        f"rewards    {', '.join(f'{item.name} × {item.settings.weight:g}' for item in session.rewards)}",
        (
            f"one step   {count_text(rollout.prompts_per_step, 'prompt')} ×"
            f" {count_text(rollout.group_size, 'completion')}{share} (limit {rollout.max_completion_tokens})"
        ),
        f"steps      {config.run.num_steps}{pace}",
        *time,
        planned_memory(session)[0],
        f"folder     {config.run.folder}",
    ]
    return lines


def planned_memory(session: Session) -> tuple[str, list[str]]:
    policy, prompt_tokens = session.policy, max(1, session.longest_prompt_tokens)
    shape, on_cuda = object_shape(policy.model), policy.device.type == "cuda"
    setup = rl_setup(session.config, shape, session.algorithm, prompt_tokens=prompt_tokens, on_cuda=on_cuda)
    setup = replace(setup, reward_models=reward_model_bytes(session), samples=not has_own_engine(session))
    plan, machine = MemoryPlan(shape, held_by(policy, setup)), machine_memory(on_cuda=on_cuda)
    return memory_line(plan, machine), memory_warning(plan, machine)


def has_own_engine(session: Session) -> bool:
    return session.own.engine is not None or isinstance(session.config.engine, Mapping)


def reward_model_bytes(session: Session) -> int:
    models = [model for function in session.rewards for model in reward_models_in(function.call)]
    return sum(each.memory_bytes for each in models if each.model.device.type == session.policy.device.type)


def policy_lines(session: Session) -> list[str]:
    """What is trained, and what of its weights cannot be."""
    lines, rate = model_lines(session.policy, session.model_name), session.config.update.largest_rate
    if session.own.policy is None:
        lines += [f"           {each}" for each in unused_options(session.policy, session.config.model)]
    if (note := mixture_note(session.policy)) is not None:
        lines.append(f"           {note}")
    still = standing_still(session.policy.model.parameters(), rate)
    if still > 0:
        lines.append(
            f"           {still:.0%} of the trained weights are too large in bfloat16 for a step of {rate:g} to move"
            " them, and so are Adam's running means; train in float32 (model.weights: auto), or with a higher rate"
        )
    return lines


def time_lines(session: Session, first: CollectedStep, seconds: Mapping[str, float], *, whole_step: bool) -> list[str]:
    """The minutes that steps and evaluations take: if completions stay as long as the first step's, and at their limit.

    Below it what the recipe's header says of the run that was made, if it is known which recipe that is.
    """
    config = session.config
    collected = sum(len(groups) for groups in (first.groups, *(groups for groups, _ in first.replaced)))
    per_completion = (seconds["rollout"] + seconds["grade"]) / (collected * config.rollout.group_size)
    asked = completions_of_run(session.questions(), config.evaluation, config.run.num_steps)
    steps, evaluations = sum(seconds.values()) * config.run.num_steps / 60, per_completion * asked / 60
    length, limit = first.num_completion_tokens / config.rollout.rollouts_per_step, config.rollout.max_completion_tokens
    longest = (steps + evaluations) * limit / length
    spread = f"if completions stay at {length:.0f} tokens, up to {longest:.1f} min if they grow to {limit}"
    if round(length) == limit:
        spread = f"with completions of {limit} tokens, which is their limit"
    parts = (
        f"{steps:.1f} for steps{'' if whole_step else ' without their gradients'}, {evaluations:.1f} for evaluations"
    )
    recorded = recorded_time(session.trained.run.recipe)
    own = [f"           the recipe's own run took {recorded}, on the machine that its header names"] if recorded else []
    return [f"time       about {steps + evaluations:.1f} min {spread}", f"           (the first is {parts})", *own]


def held_out_metrics(results: Mapping[str, object], probes: Mapping[str, Probe] = NO_PROBES) -> dict[str, float]:
    """Full held-out results under the names of docs/metrics.md."""
    metrics: dict[str, float] = {}
    for name in (name for probe in probes.values() for name in probe.readings if name in results):
        metrics[f"eval/{name}"] = cast(float, results[name])
    metrics |= source_readings(cast(Mapping[str, Mapping[str, object]], results.get("sources", {})))
    metrics |= logged_readings(cast(Mapping[str, float], results.get("logged", {})))
    if results["mean_length"] is not None:
        metrics["eval/mean_length"] = cast(float, results["mean_length"])
    for name in (*HELD_OUT, SCORE, REWARD):
        if results.get(name) is not None:
            metrics[f"eval/{name}"] = cast(float, results[name])
        if interval := cast("Sequence[float] | None", results.get(f"{name}_interval")):
            metrics |= {f"eval/{name}_low": interval[0], f"eval/{name}_high": interval[1]}
    return metrics


def write_results(session: Session, run: RunFolder, state: RunState, after: Mapping[str, object]) -> dict[str, object]:
    """Save the model and curves of a finished run; returns the content of its summary."""
    folder = run.path
    summary = build_summary(
        before=state.before,
        after=after,
        seconds=state.seconds,
        tokens={
            "completion": state.completion_tokens,
            "sampled": state.sampled_tokens,
            "trained": state.trained_tokens,
            "all": state.num_tokens,
        },
        device=str(session.policy.device),
        run=described_run(session, state, [line["reward"] for line in run.metrics() if "reward" in line]),
    )
    adapter = session.config.model.adapter
    with writing(folder / "model", folder):
        card = model_card(session, state, summary)
        try:
            save_trained(session.policy, folder, adapter.save if adapter is not None else "adapter", card)
        finally:  # so that both are kept whatever is wrong with the policy
            if (critic := session.learner.critic) is not None:
                save_critic(critic.head, critic.own_trunk, folder / "critic")
    if session.config.run.curves:
        with writing(folder / "curves.png", folder):
            draw_curves(folder / "metrics.jsonl", folder / "curves.png", title=folder.name)
    return summary


def described_run(session: Session, state: RunState, rewards: Sequence[float | None]) -> dict[str, object]:
    return {
        "steps": state.step,
        "algorithm": session.algorithm.name,
        "rewards": {function.name: function.settings.weight for function in session.rewards},
        "training_reward": {"first_step": rewards[0], "last_step": rewards[-1]} if rewards else None,
        "recipe": state.recipe or None,
        "machine": {"cores": os.cpu_count(), "threads": torch.get_num_threads()},
    }


def model_card(session: Session, state: RunState, summary: Mapping[str, object]) -> str:
    """What the model folder says of itself."""
    config = session.config
    rows = comparison(summary, session.questions().probes.values())
    lines = ["| held-out | before | after |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    table = "\n".join(lines) if rows else NOTHING_HELD_OUT
    return (
        f"---\nlibrary_name: transformers\ntags: [posttrain, {session.algorithm.name}]\n---\n\n"
        f"# {Path(config.run.folder).name}\n\n"
        f"{session.model_name}, trained with posttrain: {session.algorithm.name} on {session.task.name} for"
        f" {state.step} steps of {config.rollout.prompts_per_step} × {config.rollout.group_size}"
        " rollouts.\n\n"
        f"{table}\n\nThe recipe is `config.yaml` in the run folder.\n"
    )


def comparison(summary: Mapping[str, object], probes: Iterable[Probe] = ()) -> list[tuple[str, str, str]]:
    """Rows (what, before, after) of the held-out results, those of a task's probes last.

    Where the reward is the accuracy, that is shown; else the reward is, and accuracy where any answer was right.
    """
    before, after = (cast(Mapping[str, object], summary[when]) for when in ("before", "after"))
    same = all(each.get(REWARD) in (None, each["accuracy_sampled"]) for each in (before, after))
    right = any(each[name] for each in (before, after) for name in HELD_OUT)
    accuracies = {
        "accuracy_sampled": Reading("accuracy, sampled at temperature 1"),
        "accuracy_greedy": Reading("accuracy, greedy"),
        "pass_at_8": Reading("pass@8"),
    }
    readings = {
        SCORE: Reading("score, sampled at temperature 1"),
        **({} if same else {REWARD: Reading("reward, sampled at temperature 1")}),
        **(accuracies if same or right else {}),
        "mean_length": Reading("mean length, tokens", digits=1),
        **{name: reading for probe in probes for name, reading in probe.readings.items()},
    }
    return [
        (prefix + reading.label, result_text(first, name, reading), result_text(last, name, reading))
        for prefix, first, last in [("", before, after), *of_sources(before, after)]
        for name, reading in readings.items()
        if first.get(name) is not None and last.get(name) is not None
    ]


def of_sources(
    before: Mapping[str, object], after: Mapping[str, object]
) -> list[tuple[str, Mapping[str, object], Mapping[str, object]]]:
    first, last = (cast(Mapping[str, Mapping[str, object]], each.get("sources", {})) for each in (before, after))
    return [(f"{source}: ", first[source], last[source]) for source in first if source in last]


def result_text(results: Mapping[str, object], name: str, reading: Reading) -> str:
    value = cast(float, results[name])
    interval = cast("Sequence[float] | None", results.get(f"{name}_interval"))
    return f"{value:.{reading.digits}f}" + (f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else "")


def closing_lines(
    session: Session,
    folder: Path,
    summary: Mapping[str, object],
    transcripts: tuple[Sequence[Sequence[str]], Sequence[Sequence[str]]],
) -> list[str]:
    """The end of a run: numbers before and after, transcripts side by side, where things are and what to do next."""
    rows = comparison(summary, session.questions().probes.values())
    width = max([23, *(len(left) for _, left, _ in rows)]) + 1
    wide = max([37, *(len(label) for label, _, _ in rows)]) + 1
    table = [
        f"{label:<{wide}}{left:<{width}}{right}" for label, left, right in [("held-out", "before", "after"), *rows]
    ]
    before, after = ({each[0]: each[1] for each in some} for some in transcripts)
    both = [prompt for prompt in before if prompt in after]
    pairs = [line for prompt in both for line in side_by_side(prompt, before[prompt], after[prompt])]
    folder, picture = shown(folder), ", curves.png" if session.config.run.curves else ""
    return [
        "",
        *(table if rows else unmeasured_lines(summary)),
        "",
        *pairs,
        f"run folder   {folder}  (summary.json, metrics.jsonl, rollouts/{picture})",
        f"ask it       posttrain chat {folder}",
        *([f"measure it   {measuring(session, folder)}"] if session.questions().prompts else []),
    ]


def unmeasured_lines(summary: Mapping[str, object]) -> list[str]:
    rewards = cast("Mapping[str, float | None] | None", summary["training_reward"])
    told = [NOTHING_HELD_OUT, "A dataset holds out rows by task.held_out_share, such as 0.1, or task.held_out_path."]
    if rewards is not None:
        first, last = ("unknown" if each is None else f"{each:.3f}" for each in rewards.values())
        told.append(f"Reward in training: {first} in the first step, {last} in the last.")
    return told


def measuring(session: Session, folder: Path) -> str:
    """What measures the trained model as the run did: a command, or a call where no recipe says all that it takes."""
    own = session.own
    brought = {
        "task": own.task is not None,
        "rows": own.rows is not None,
        "held_out_rows": own.held_out_rows is not None,
        "rewards": bool(given_rewards(own)),
    }
    given = ", ".join(f"{name}={name}" for name, is_brought in brought.items() if is_brought)
    return f"posttrain.evaluate({str(run_model(folder))!r}, config, {given})" if given else f"posttrain eval {folder}"


def side_by_side(prompt: str, before: str, after: str) -> list[str]:
    left, right = (
        [piece for line in text.split("\n") for piece in (wrap(line, COLUMN, drop_whitespace=False) or [""])]
        for text in (before, after)
    )
    body = [f"  {a:<{COLUMN}} | {b}" for a, b in zip_longest(left, right, fillvalue="")]
    return [prompt.strip(), f"  {'before':<{COLUMN}} | after", *body, ""]
