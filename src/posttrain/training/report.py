"""An RL run in words: its plan, its results, and its files."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from posttrain.config.recipes import recorded_time
from posttrain.generation.engine import Engine, EngineElsewhere
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.parity import mixture_note
from posttrain.models.loading.description import adapter_lines, model_lines, unused_options
from posttrain.models.memory.memory_plan import MemoryPlan
from posttrain.models.memory.model_shape import object_shape
from posttrain.options.model import run_model
from posttrain.options.rollout import InProcessOptions
from posttrain.options.training import RunOptions
from posttrain.rewards.model import reward_models_in
from posttrain.runs.files import writing
from posttrain.runs.folder import shown
from posttrain.runs.planned_memory import held_by, machine_memory, memory_line, memory_warning, rl_setup
from posttrain.runs.progress import peak_memory_bytes
from posttrain.runs.reports import held_out_results, versions
from posttrain.runs.run_folder import RunFolder
from posttrain.tasks.dataset import count_text
from posttrain.training.collector import CollectedStep
from posttrain.training.critic import save_critic
from posttrain.training.fit import model_card, write_model
from posttrain.training.full_evaluation import completions_of_run
from posttrain.training.held_out import NOTHING_HELD_OUT, comparison, table_lines, transcript_lines
from posttrain.training.optimizer import standing_still
from posttrain.training.session import Session
from posttrain.training.trained import RunState


def rl_plan_lines(
    session: Session, first: CollectedStep | None, seconds: Mapping[str, float], *, whole_step: bool = False
) -> list[str]:
    """The plan of a run, with lengths and seconds by stage if the first step was collected.

    With `whole_step` the seconds include its gradient.
    """
    config, rollout = session.config, session.config.rollout
    share, pace, time = "", "", list[str]()
    if first is not None:
        share = f", initially {first.num_completion_tokens / rollout.rollouts_per_step:.0f} tokens each"
        each = sum(seconds.values())
        pace = f", about {each:.1f} s each" if whole_step else f", {each:.1f} s to sample and score the first"
        time = time_lines(session, first, seconds, whole_step=whole_step)
    return [
        *policy_lines(session),
        f"task       {session.task.name}, {len(session.questions().prompts)} held-out problems",
        *(f"           {note}" for note in session.task.notes()),
        *session.environment.notes,
        *adapter_lines(session.policy, config.update),
        *engine_lines(session.engine),
        f"algorithm  {session.algorithm.name}, learning rate {config.update.largest_rate:g}",
        f"rewards    {', '.join(f'{item.name} × {item.settings.weight:g}' for item in session.rewards)}",
        (
            f"one step   {count_text(rollout.prompts_per_step, 'prompt')} ×"
            f" {count_text(rollout.group_size, 'completion')}{share} (limit {rollout.max_completion_tokens})"
        ),
        f"steps      {steps_text(config.run)}{pace}",
        *ahead_lines(session),
        *time,
        planned_memory(session)[0],
        f"folder     {config.run.folder}",
    ]


def ahead_lines(session: Session) -> list[str]:
    """What overlaps if steps are collected ahead."""
    most = session.config.rollout.max_staleness
    if not most:
        return []
    own = isinstance(session.engine, InProcessEngine)
    what = "grading overlaps updates and sampling, which take turns" if own else "sampling and grading overlap updates"
    return [f"ahead      up to {count_text(most, 'step')}: {what}"]


def engine_lines(engine: Engine) -> list[str]:
    """The sampling servers, if this process does not sample."""
    lines = engine.describe() if isinstance(engine, EngineElsewhere) else []
    return [f"{'' if number else 'engine':10} {each}" for number, each in enumerate(lines)]


def planned_memory(session: Session) -> tuple[str, list[str]]:
    policy, prompt_tokens = session.policy, max(1, session.longest_prompt_tokens)
    shape, on_cuda = object_shape(policy.model), policy.device.type == "cuda"
    setup = rl_setup(session.config, shape, session.algorithm, prompt_tokens=prompt_tokens, on_cuda=on_cuda)
    samples_elsewhere = session.caller.engine is not None or not isinstance(session.config.engine, InProcessOptions)
    setup = replace(setup, reward_models=reward_model_bytes(session), samples=not samples_elsewhere)
    plan, machine = MemoryPlan(shape, held_by(policy, setup)), machine_memory(on_cuda=on_cuda, ranks=policy.ranks.size)
    return memory_line(plan, machine), memory_warning(plan, machine)


def reward_model_bytes(session: Session) -> int:
    models = [model for function in session.rewards for model in reward_models_in(function.call)]
    return sum(each.memory_bytes for each in models if each.model.device.type == session.policy.device.type)


def policy_lines(session: Session) -> list[str]:
    """The model, and the share of its weights that training cannot change."""
    lines, rate = model_lines(session.policy, session.model_name), session.config.update.largest_rate
    if session.caller.policy is None:
        lines += [f"           {each}" for each in unused_options(session.policy, session.config.model)]
    if (note := mixture_note(session.policy)) is not None:
        lines.append(f"           {note}")
    still = standing_still(session.policy.model.parameters(), rate)
    if still > 0:
        lines.append(
            f"           in bfloat16, {still:.0%} of the trained weights are too large for a step of {rate:g} to move"
            " them, and so are Adam's running means.  Train in float32 (model.weights: auto), or with a higher rate"
        )
    return lines


def steps_text(run: RunOptions) -> str:
    """How many steps a run takes at most, and what may end it earlier."""
    limits = [] if run.token_limit is None else [f"{run.token_limit:,} tokens are sampled"]
    if run.time_limit_minutes is not None:
        limits.append(f"{run.time_limit_minutes:g} min have passed")
    return f"at most {run.num_steps}, until {' or '.join(limits)}" if limits else str(run.num_steps)


def time_lines(session: Session, first: CollectedStep, seconds: Mapping[str, float], *, whole_step: bool) -> list[str]:
    """Minutes of steps and evaluations if completions keep the first step's length, and if they grow to their limit.

    If the recipe is known, the time in its header follows.
    """
    config = session.config
    collected = sum(len(groups) for groups in (first.groups, *(groups for groups, _ in first.replaced)))
    per_completion = (seconds["rollout"] + seconds["grade"]) / (collected * config.rollout.group_size)
    length, limit = first.num_completion_tokens / config.rollout.rollouts_per_step, config.rollout.max_completion_tokens

    def minutes_at(mean_length: float) -> tuple[float, float]:
        """Of steps and of evaluations, whose completions take as long as they have tokens."""
        num_steps = config.run.num_steps
        if config.run.token_limit is not None:
            tokens = first.num_sampled_tokens * mean_length / length
            num_steps = min(num_steps, math.ceil(config.run.token_limit / tokens))
        evaluated = completions_of_run(session.questions(), config.evaluation, num_steps)
        longer = mean_length / length / 60
        return sum(seconds.values()) * num_steps * longer, per_completion * evaluated * longer

    steps, evaluations = minutes_at(length)
    shortest, most = sorted((steps + evaluations, sum(minutes_at(limit))))
    minutes = f"{shortest:.1f} to {most:.1f} min: completions have {length:.0f} tokens and may grow to {limit}"
    if round(length) == limit:
        minutes = f"about {shortest:.1f} min with completions of {limit} tokens, which is their limit"
    ends = config.run.time_limit_minutes
    if ends is not None and ends < most:
        share = min(1.0, ends / (steps + evaluations))
        steps, evaluations = share * steps, share * evaluations
        minutes = f"{f'{shortest:.1f} to ' if shortest < ends else ''}{ends:g} min, and the evaluation after training"
    both = f"{steps:.1f} for steps{'' if whole_step else ' without their gradients'}, {evaluations:.1f} for evaluations"
    recorded = recorded_time(session.trained.run.recipe)
    own = [f"           the recipe's own run took {recorded} on the machine named in its header"] if recorded else []
    least = "" if round(length) == limit else "at least "
    return [f"time       {minutes}", f"           ({least}{both})", *own]


def write_results(session: Session, run: RunFolder, state: RunState, after: Mapping[str, object]) -> dict[str, object]:
    """Save the model and curves of a finished run; returns the content of its summary."""
    folder, rewards = run.path, [line["reward"] for line in run.metrics() if "reward" in line]
    summary: dict[str, object] = {
        "before": held_out_results(state.before),
        "after": held_out_results(after),
        "seconds": {**state.seconds, "total": sum(state.seconds.values())},
        "tokens": {
            "completion": state.completion_tokens,
            "sampled": state.sampled_tokens,
            "trained": state.trained_tokens,
            "all": state.num_tokens,
        },
        "peak_memory_bytes": peak_memory_bytes(),
        "versions": versions(),
        "device": str(session.policy.device),
        "steps": state.step,
        "algorithm": session.algorithm.name,
        "rewards": {function.name: function.settings.weight for function in session.rewards},
        "training_reward": {"first_step": rewards[0], "last_step": rewards[-1]} if rewards else None,
        "recipe": state.recipe or None,
        "machine": {"cores": os.cpu_count(), "threads": torch.get_num_threads()},
    }
    rollout, rows = session.config.rollout, comparison(summary, session.questions().probes.values())
    lines = ["| held-out | before | after |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    table = "\n".join(lines) if rows else NOTHING_HELD_OUT
    about = (
        f"{session.model_name}, trained with posttrain: {session.algorithm.name} on {session.task.name} for"
        f" {state.step} steps of {rollout.prompts_per_step} × {rollout.group_size} rollouts.\n\n{table}"
    )
    card = model_card(folder, session.algorithm.name, about)
    try:
        write_model(session.config.model, session.policy, run, curves=session.config.run.curves, card=card)
    finally:  # a policy that cannot be saved does not lose the critic
        if (critic := session.learner.critic) is not None:
            with writing(folder / "critic", folder):
                save_critic(*critic.whole(), folder / "critic")
    return summary


def closing_lines(
    session: Session,
    folder: Path,
    summary: Mapping[str, object],
    transcripts: tuple[Sequence[Sequence[str]], Sequence[Sequence[str]]],
) -> list[str]:
    """The end of a run: results and transcripts before and after, files, and the next commands."""
    rows = comparison(summary, session.questions().probes.values())
    folder, picture, caller = shown(folder), ", curves.png" if session.config.run.curves else "", session.caller
    given = {
        "task": caller.task is not None,
        "rows": caller.rows is not None,
        "held_out_rows": caller.held_out_rows is not None,
        "rewards": bool(caller.functions),
        "environment": caller.environment is not None,
        "tools": bool(caller.tools),
    }
    arguments = ", ".join(f"{name}={name}" for name, is_given in given.items() if is_given)
    measured = f"posttrain eval {folder}"
    if arguments:  # a command does not have the caller's objects
        measured = f"posttrain.evaluate({str(run_model(folder))!r}, config, {arguments})"
    return [
        "",
        *(table_lines(rows) if rows else unmeasured_lines(summary)),
        "",
        *transcript_lines(*transcripts),
        f"run folder   {folder}  (summary.json, metrics.jsonl, rollouts/{picture})",
        f"look at it   posttrain view {folder}",
        f"ask it       posttrain chat {folder}",
        *([f"measure it   {measured}"] if session.questions().prompts else []),
    ]


def unmeasured_lines(summary: Mapping[str, object]) -> list[str]:
    """The last lines of a run without held-out problems."""
    rewards = cast("Mapping[str, float | None] | None", summary["training_reward"])
    lines = [
        NOTHING_HELD_OUT,
        "To hold out rows of a dataset, set task.held_out_share, such as 0.1, or task.held_out_path.",
    ]
    if rewards is not None:
        first, last = ("unknown" if each is None else f"{each:.3f}" for each in rewards.values())
        lines.append(f"Reward in training: {first} in the first step, {last} in the last.")
    return lines
