"""posttrain's worker of vs_trl.py: the stages of `posttrain.training.rl`, one step at a time, without the run folder.

python benchmarks/trl/_vs_trl_ours.py JOB.json
"""

import sys
from collections.abc import Sequence

import torch
from _vs_trl_wire import MIB, Job, Stopwatch, Wire, hash_score

from posttrain.config import Config
from posttrain.options.countdown import CountdownOptions
from posttrain.options.dataset import DatasetOptions
from posttrain.options.model import ModelOptions
from posttrain.options.rollout import RolloutOptions
from posttrain.options.training import RunOptions, UpdateOptions
from posttrain.runs.clock import Clock
from posttrain.training.caller.caller_objects import CallerObjects
from posttrain.training.collector import CollectedStep, no_journal
from posttrain.training.metrics import step_metrics
from posttrain.training.session import Session, open_session
from posttrain.training.update_metrics import update_metrics


def main() -> None:
    job, wire = Job.read(sys.argv[1]), Wire()
    session = opened(job)
    first = session.task.prompts(1, range(job.prompts_per_step))
    wire.ready([prompt.tokens for prompt in sorted(first, key=lambda prompt: prompt.text)], ["torch", "transformers"])
    for step in range(1, job.steps + 1):
        if not wire.wait():
            break
        clock, watch = Clock(), Stopwatch()
        collected = take_step(session, step, clock)
        took = watch.read()
        rollouts = [rollout for group in collected.groups for rollout in group.rollouts]
        wire.report(
            took,
            [len(rollout.tokens) for rollout in rollouts],
            collected.grades.rewards.flatten().tolist(),
            **{f"seconds_{stage}": value for stage, value in clock.seconds.items()},
            **({"peak_device_mib": torch.cuda.max_memory_allocated() / MIB} if job.device == "cuda" else {}),
        )


def take_step(session: Session, step: int, clock: Clock) -> CollectedStep:
    """One step as `posttrain.training.rl.take_steps` takes it."""
    collected = session.collector.collect(step, no_journal, clock)
    credited = session.learner.credit(collected, clock)
    batches = session.learner.batches(credited, clock)
    updates = session.learner.learn(batches, step, clock)
    session.load_weights()
    step_metrics(collected.groups, collected.grades, credited.groups.informed)
    update_metrics(updates)
    if session.policy.device.type == "cuda":
        torch.cuda.synchronize()
    return collected


def opened(job: Job) -> Session:
    """The session that `posttrain rl` opens for a recipe with these values; all others are the recipe's defaults."""
    config = Config(
        model=ModelOptions(path=job.model, dtype=job.dtype, device=job.device),  # type: ignore[arg-type]
        task=CountdownOptions() if job.countdown else DatasetOptions(held_out_share=0.0),
        algorithm={"name": "grpo", "deviation": "sample"},
        rollout=RolloutOptions(
            prompts_per_step=job.prompts_per_step,
            group_size=job.group_size,
            max_completion_tokens=job.max_completion_tokens,
        ),
        update=UpdateOptions(learning_rate=job.learning_rate, tokens_per_microbatch=job.tokens_per_microbatch),
        run=RunOptions(seed=job.seed, num_steps=job.steps, threads=job.threads),
    )
    # A random model's prompts are the same in every step, which a dataset of just these rows gives.
    rows = None if job.countdown else job.rows[: job.prompts_per_step]
    return open_session(config, CallerObjects(rewards=[hash_reward] if job.reward == "hash" else [], rows=rows))


def hash_reward(completion_ids: Sequence[Sequence[int]]) -> list[float]:
    return [hash_score(ids) for ids in completion_ids]


if __name__ == "__main__":
    main()
