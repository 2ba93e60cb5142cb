"""trainer.evaluate(): completions of the evaluation rows at the training temperature, scored, under TRL's names."""

from collections.abc import Sequence

import torch

from posttrain.generation.engine import sample_groups
from posttrain.generation.request import Request
from posttrain.generation.streams import StreamKey
from posttrain.runs.clock import Clock
from posttrain.training.collector import CollectedStep
from posttrain.training.session import Session
from posttrain.training.update import Observations, micro_loss, token_totals
from posttrain.trl.log_entries import Entry, Logged, Trained, sampled_entry, token_entry
from posttrain.trl.training_rows import Row, rows_task

PURPOSE = "trl evaluation"
"""The name of its random streams: the same numbers for every evaluation of one run."""


def evaluation_entry(session: Session, rows: Sequence[Row], group_size: int, logged: Logged) -> Entry:
    """What TRL logs of an evaluation, without its prefix."""
    config = session.config
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
    entry: Entry = loss_entry(session, collected, logged) if group_size > 1 else {"loss": None}
    entry |= sampled_entry(groups, grades, logged)
    return entry


@torch.no_grad()
def loss_entry(session: Session, collected: CollectedStep, logged: Logged) -> Entry:
    """The loss that an update on these completions would begin with, a mean over mini-batches, and its metrics."""
    learner, clock = session.learner, Clock()
    credited = learner.credit(collected, clock)
    batches = learner.batches(credited, clock)
    batches = batches[: len(batches) // learner.passes.epochs]  # one pass
    budget, padded = learner.settings.update.tokens_per_microbatch, learner.policy.forward.padded
    total, observed = 0.0, Observations()
    micros = [micro for batch in batches if batch.completions for micro in batch.split(budget, padded=padded)]
    for micro in micros:
        total += micro_loss(learner.policy, micro, learner.objective(), observed).item()
    entry: Entry = {"loss": total / len(batches)}
    kl = logged.penalised_kl(collected.groups, credited.token_rewards)
    if not micros:  # nobody has an advantage
        return entry | token_entry({}, logged, trained_share=0.0) | kl
    totals = token_totals(micros, observed)
    means = {name: value / totals["num_tokens"] for name, value in totals["sums"].items()}
    means |= {name: value / totals["num_completions"] for name, value in totals["completion_sums"].items()}
    counts = float(totals["num_tokens"]), float(totals["num_completions"])
    trained = Trained(tokens=counts[0], completions=counts[1])
    return entry | token_entry(means, logged, trained_share=logged.trained_share(trained, groups=collected.groups)) | kl
