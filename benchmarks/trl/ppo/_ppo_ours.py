"""posttrain's worker of vs_trl_ppo.py: the stages of `posttrain.training.rl`, one step at a time, with `ppo`.

python benchmarks/trl/ppo/_ppo_ours.py JOB.json
"""

import os
import sys

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command sets it, before torch is loaded

from _ppo_job import PpoJob
from _vs_trl_steps import serve
from _vs_trl_wire import Wire

from posttrain.config import Config
from posttrain.options.model import ModelOptions
from posttrain.options.reward import RewardOptions
from posttrain.options.rollout import InProcessOptions, RolloutOptions
from posttrain.options.training import RunOptions, UpdateOptions
from posttrain.training.session import open_session


def main() -> None:
    job = PpoJob.read(sys.argv[1])
    serve(open_session(config_of(job)), Wire(), prompts_per_step=job.prompts_per_step, steps=job.steps)


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
        engine=InProcessOptions(native=True),
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
