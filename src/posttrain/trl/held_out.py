"""trainer.evaluate(): completions of the evaluation rows at the training temperature, scored, under TRL's names."""

import time
from collections.abc import Sequence

import torch

from posttrain.generation.engine import sample_groups
from posttrain.generation.request import Request
from posttrain.generation.streams import StreamKey
from posttrain.runs.clock import Clock
from posttrain.training.collector import CollectedStep
from posttrain.training.session import Session
from posttrain.training.update import Observations, micro_loss
from posttrain.trl.log_entries import Entry, sampled_entry
from posttrain.trl.training_rows import Row, rows_task

PURPOSE = "trl evaluation"
"""The name of its random streams: the same numbers for every evaluation of one run."""


def evaluation_entry(session: Session, rows: Sequence[Row], group_size: int, *, whole_batch: bool = False) -> Entry:
    """What TRL logs of an evaluation, without its prefix."""
    began, config = time.monotonic(), session.config
    task = rows_task(rows, config.task, session.policy, config.model.template_options)  # type: ignore[arg-type]
    prompts = [task.prompt(row) for row in task.training_rows]
    request = Request(
        group_size=group_size,
        max_completion_tokens=config.rollout.max_completion_tokens,
        sampling=config.rollout.sampling,
        key=StreamKey(config.run.seed, PURPOSE, 0),
    )
    groups = sample_groups(session.engine, prompts, request)
    grades = session.collector.grade(groups)
    collected = CollectedStep(step=max(1, session.trained.step), groups=groups, grades=grades)
    entry: Entry = {"loss": loss_of(session, collected) if group_size > 1 else None}
    entry |= sampled_entry(groups, grades, whole_batch=whole_batch)
    entry["num_tokens"] = float(session.trained.run.num_tokens)
    seconds = time.monotonic() - began
    return entry | {"runtime": seconds, "samples_per_second": len(prompts) * group_size / seconds}


@torch.no_grad()
def loss_of(session: Session, collected: CollectedStep) -> float:
    """The loss that an update on these completions would begin with, a mean over mini-batches."""
    learner, clock = session.learner, Clock()
    batches = learner.batches(learner.credit(collected, clock), clock)
    batches = batches[: len(batches) // learner.passes.epochs]  # one pass
    budget, padded = learner.settings.update.tokens_per_microbatch, learner.policy.forward.padded
    total = 0.0
    for batch in batches:
        for micro in batch.split(budget, padded=padded) if batch.completions else ():
            total += micro_loss(learner.policy, micro, learner.objective(), Observations()).item()
    return total / len(batches)
