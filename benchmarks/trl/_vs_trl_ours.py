"""posttrain's worker of vs_trl.py: the stages of `posttrain.training.rl`, one step at a time, without the run folder.

python benchmarks/trl/_vs_trl_ours.py JOB.json
"""

import os
import sys
from collections.abc import Sequence

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command sets it, before torch is loaded

from _vs_trl_steps import serve
from _vs_trl_wire import Job, Wire, hash_score

from posttrain.config import Config
from posttrain.options.dataset import DatasetOptions
from posttrain.options.model import ModelOptions
from posttrain.options.rollout import InProcessOptions, RolloutOptions
from posttrain.options.task import CountdownOptions
from posttrain.options.training import RunOptions, UpdateOptions
from posttrain.training.session import CallerObjects, Session, open_session


def main() -> None:
    job = Job.read(sys.argv[1])
    serve(opened(job), Wire(), prompts_per_step=job.prompts_per_step, steps=job.steps)


def opened(job: Job) -> Session:
    """The session that `posttrain rl` opens for a recipe with these values; all others are the recipe's defaults."""
    config = Config(
        model=ModelOptions(path=job.model, dtype=job.dtype, device=job.device),  # type: ignore[arg-type]
        task=CountdownOptions() if job.countdown else DatasetOptions(held_out_share=0.0),
        algorithm={"name": "grpo", "deviation": "sample"},
        engine=InProcessOptions(native=True),
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
