"""posttrain's worker of vs_trl_ppo.py: the stages of `posttrain.training.rl`, one step at a time, with `ppo`.

python benchmarks/trl/ppo/_ppo_ours.py JOB.json
"""

import sys

from _ppo_job import PpoJob
from _vs_trl_wire import Stopwatch, Wire

from posttrain.config import Config
from posttrain.options.model import ModelOptions
from posttrain.options.reward import RewardOptions
from posttrain.options.rollout import RolloutOptions
from posttrain.options.training import RunOptions, UpdateOptions
from posttrain.runs.clock import Clock
from posttrain.training.collector import CollectedStep, no_journal
from posttrain.training.metrics import step_metrics
from posttrain.training.session import Session, open_session
from posttrain.training.update_metrics import update_metrics


def main() -> None:
    job, wire = PpoJob.read(sys.argv[1]), Wire()
    session = open_session(config_of(job))
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
        )


def take_step(session: Session, step: int, clock: Clock) -> CollectedStep:
    """One step as `posttrain.training.rl.take_steps` takes it."""
    collected = session.collector.collect(step, no_journal, clock)
    credited = session.learner.credit(collected, clock)
    session.learner.remember(credited)
    updates = session.learner.learn(session.learner.batches(credited, clock), step, clock)
    session.load_weights()
    step_metrics(collected.groups, collected.grades, credited.groups.informed)
    update_metrics(updates)
    assert len(updates) == session.learner.passes.updates, "an update was left out"
    return collected


def config_of(job: PpoJob) -> Config:
    """A recipe with TRL's values where they decide what is computed; all others are the recipe's defaults."""
    return Config(
        model=ModelOptions(path=job.policy, dtype="float32", device="cpu"),
        rewards=(RewardOptions(model=job.reward_model),),
        algorithm={
            "name": "ppo",
            "gae": {"gamma": 1.0, "lambda_policy": job.lambda_, "lambda_value": job.lambda_},
            "critic": {"trunk": job.trunk, "head": "linear", "rate_scale": 1.0, "fit_steps": 0},
            "value_loss": {"coefficient": job.value_coefficient, "clip": 0.2},
            "kl": {"coefficient": job.kl_coefficient, "estimator": "k1", "place": "reward"},
            "largest_epoch_kl": None,  # TRL takes every update
        },
        rollout=RolloutOptions(
            prompts_per_step=job.prompts_per_step,
            group_size=1,
            max_completion_tokens=job.completion_tokens,
            temperature=1.0,
        ),
        update=UpdateOptions(
            learning_rate=job.learning_rate,
            tokens_per_microbatch=job.tokens_per_microbatch,
            epochs_per_step=job.epochs,
            minibatches_per_epoch=1,
            measure_entropy=True,  # as TRL does
        ),
        run=RunOptions(seed=job.seed, num_steps=job.steps, threads=job.threads),
    )


if __name__ == "__main__":
    main()
