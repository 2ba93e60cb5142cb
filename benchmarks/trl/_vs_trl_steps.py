"""posttrain's side of a comparison with TRL: a session's steps, one at a time as they are asked for."""

import torch
from _vs_trl_wire import MIB, Stopwatch, Wire

from posttrain.runs.progress import Clock
from posttrain.training.collector import CollectedStep, discard_scores
from posttrain.training.metrics import step_metrics, update_metrics
from posttrain.training.session import Session


def serve(session: Session, wire: Wire, *, prompts_per_step: int, steps: int) -> None:
    """Tell the first step's prompts, then take and report steps until there are no more, or nobody asks."""
    first = sorted(session.task.prompts(1, range(prompts_per_step)), key=lambda prompt: prompt.text)
    wire.ready([prompt.tokens for prompt in first], ["torch", "transformers"])
    on_cuda = session.policy.device.type == "cuda"
    for step in range(1, steps + 1):
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
            **({"peak_device_mib": torch.cuda.max_memory_allocated() / MIB} if on_cuda else {}),
        )


def take_step(session: Session, step: int, clock: Clock) -> CollectedStep:
    """One step as `posttrain.training.rl.take_steps` takes it."""
    collected = session.collector.collect(step, discard_scores, clock)
    credited = session.learner.credit(collected, clock)
    session.learner.remember(credited)
    updates = session.learner.learn(session.learner.batches(credited, clock), step, clock)
    session.load_weights()
    step_metrics(collected.groups, collected.grades, credited.groups.informed)
    update_metrics(updates)
    assert len(updates) in (0, session.learner.passes.updates), "an update was left out"  # 0: no group told anything
    if session.policy.device.type == "cuda":
        torch.cuda.synchronize()
    return collected
