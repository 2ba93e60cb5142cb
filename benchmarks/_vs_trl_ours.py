"""posttrain's worker of vs_trl.py: the stages of `posttrain.training.rl`, one step at a time, without the run folder.

python benchmarks/_vs_trl_ours.py JOB.json
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
from posttrain.training.collector import Collected, StepContext, collect
from posttrain.training.metrics import step_metrics
from posttrain.training.rl import learn
from posttrain.training.session import Session, open_session
from posttrain.training.state import RunState


def main() -> None:
    job, wire = Job.read(sys.argv[1]), Wire()
    session = opened(job)
    state = RunState()
    first = session.task.prompts(1, range(job.prompts_per_step))
    wire.ready([prompt.tokens for prompt in sorted(first, key=lambda prompt: prompt.text)], ["torch", "transformers"])
    while state.step < job.steps and wire.wait():
        steps = Steps(session, state)
        watch = Stopwatch()
        steps.take()
        took = watch.read()
        assert steps.collected is not None
        rollouts = [rollout for group in steps.collected.judged.groups for rollout in group.rollouts]
        wire.report(
            took,
            [len(rollout.tokens) for rollout in rollouts],
            steps.collected.grades.rewards.flatten().tolist(),
            **{f"seconds_{stage}": value for stage, value in steps.clock.seconds.items()},
            **({"peak_device_mib": torch.cuda.max_memory_allocated() / MIB} if job.device == "cuda" else {}),
        )


class Steps:
    """One step as `posttrain.training.rl.steps` takes it."""

    def __init__(self, session: Session, state: RunState) -> None:
        self.session, self.state, self.clock = session, state, Clock()
        self.collected: Collected | None = None

    def take(self) -> None:
        session, state, step = self.session, self.state, self.state.step + 1
        moment = StepContext(
            step=step, weights_version=state.num_updates, clock=self.clock, journal=lambda groups, grades: None
        )
        collected = collect(session, moment)
        step_metrics(collected.judged.groups, collected.grades, collected.judged.advantages)
        learn(session, step, collected, state, self.clock)
        if session.policy.device.type == "cuda":
            torch.cuda.synchronize()
        state.step, self.collected = step, collected


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
    return open_session(config, rewards=[hash_reward] if job.reward == "hash" else [], rows=rows)


def hash_reward(completion_ids: Sequence[Sequence[int]]) -> list[float]:
    return [hash_score(ids) for ids in completion_ids]


if __name__ == "__main__":
    main()
