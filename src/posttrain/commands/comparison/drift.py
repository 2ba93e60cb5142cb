"""How far training has moved a policy: its KL to its start, on held-out prompts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

from jaxtyping import Float64
from torch import Tensor

from posttrain.commands.comparison.cells import Cell
from posttrain.generation.groups import sample_groups
from posttrain.generation.request import GroupRequest
from posttrain.generation.streams import StreamKey
from posttrain.models.loading.model_folder import load_policy
from posttrain.options.model import ModelOptions, is_adapter_folder, run_model
from posttrain.options.rollout import SamplingParams
from posttrain.records import Rollout
from posttrain.tasks.base import held_out_prompts, training_prompts
from posttrain.training.session import open_session
from posttrain.training.update import group_logprobs

PROMPTS = 64
SAMPLES = 4
"""Completions of each prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """KL(π‖π₀) from completions of π at temperature 1, in nats."""

    per_completion: float
    per_completion_error: float
    """Standard error of the mean over completions."""
    per_token: float
    """The same sum over the number of tokens."""


def kl_to_start(cell: Cell) -> Drift:
    """The KL of a finished cell's policy to its start.

    KL(π‖π₀) = E_{y ~ π} Σ_t log π(y_t) - log π₀(y_t)      k1: unbiased, of a completion as a whole
    """
    config = cell.config
    with open_session(replace(config, model=model_of_run(config.model, cell.folder)), inference=True) as session:
        session.load_weights()
        prompts = held_out_prompts(session.task)[:PROMPTS] or training_prompts(session.task, 1, range(PROMPTS))
        request = GroupRequest(
            group_size=SAMPLES,
            max_completion_tokens=config.rollout.max_completion_tokens,
            sampling=SamplingParams(),
            key=StreamKey(cell.seed, "kl to start", 0),
        )
        groups = sample_groups(session.engine, prompts, request)
    start = load_policy(config.model, seed=cell.seed, inference=True)
    logprobs = group_logprobs(start, groups, temperature=1.0, max_tokens=config.update.tokens_per_microbatch)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return drift_of(rollouts, logprobs)


def drift_of(rollouts: Sequence[Rollout], start_logprobs: Float64[Tensor, " token"]) -> Drift:
    """The estimate from completions of π and the log-probs under π₀ of all their sampled tokens, in order."""
    lengths = [rollout.num_sampled for rollout in rollouts]
    of_start = [part.sum().item() for part in start_logprobs.split(lengths)]
    ratios = [sum(rollout.logprobs) - other for rollout, other in zip(rollouts, of_start, strict=True)]
    return Drift(
        per_completion=fmean(ratios),
        per_completion_error=stdev(ratios) / math.sqrt(len(ratios)),
        per_token=sum(ratios) / sum(lengths),
    )


def model_of_run(began: ModelOptions, run: Path) -> ModelOptions:
    """The saved model of a run, loaded as it was trained: in 4 bits only with an adapter over such a base.

    The revision is of the hub model that the run began with, and the template is saved with the run's model.
    """
    folder = run_model(run)
    bits = began.quantization if is_adapter_folder(folder) else None
    return replace(began, path=str(folder), revision="", chat_template="", adapter=None, quantization=bits)
