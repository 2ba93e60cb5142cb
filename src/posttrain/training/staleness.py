"""How old the weights are that sampled a step's tokens, and whether an algorithm allows for it."""

from dataclasses import replace

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.terms import TokenView
from posttrain.batch import TokenColumns
from posttrain.errors import UserError
from posttrain.needs import NEED_OF
from posttrain.records import TokenSequence
from posttrain.training.credited_step import CreditedStep
from posttrain.training.metrics import STALENESS


def with_staleness(credited: CreditedStep, num_updates: int) -> CreditedStep:
    """With the updates between the weights that sampled each token and those of now, as column and metrics.

    Nothing is added where all tokens are of the weights of now.
    """
    rollouts = [rollout for group in credited.collected.groups for rollout in group.rollouts]
    if all(rollout.weights_version == num_updates for rollout in rollouts):
        return credited
    staleness = num_updates - torch.cat([token_versions(rollout.sequence) for rollout in rollouts])
    columns = credited.groups.columns
    columns = replace(columns, known={**columns.known, STALENESS: staleness})
    told = {f"{STALENESS}/mean": staleness.mean().item(), f"{STALENESS}/max": staleness.max().item()}
    return replace(credited, groups=replace(credited.groups, columns=columns), metrics={**credited.metrics, **told})


def token_versions(sequence: TokenSequence) -> Float64[Tensor, " token"]:
    """The version of the weights behind each sampled token."""
    starts = [first for first, _ in sequence.versions[1:]]
    counts = [end - start for start, end in zip([0, *starts], [*starts, sequence.num_sampled], strict=True)]
    versions = torch.tensor([version for _, version in sequence.versions], dtype=torch.float64)
    return versions.repeat_interleave(torch.tensor(counts))


def require_correction(algorithm: Algorithm, max_staleness: int) -> None:
    """Refuse samples of older weights where no term of the loss reads the log-probs that they were sampled with."""
    if max_staleness and not reads_behaviour(algorithm):
        raise UserError(
            f"rollout.max_staleness = {max_staleness}: algorithm {algorithm.name} has no ratio to the weights that"
            " sampled, so it would train as if they were the present ones.  Set algorithm.correction, such as"
            " {level: token}, or max_staleness: 0."
        )


def reads_behaviour(algorithm: Algorithm) -> bool:
    """Whether the loss changes with log μ, tried on the tokens of two completions."""
    generator = torch.Generator().manual_seed(0)

    def column() -> Float64[Tensor, " token"]:
        return torch.rand(6, generator=generator, dtype=torch.float64) - 1.5

    known = {name: column() for name in NEED_OF}
    columns = TokenColumns(
        advantages=torch.tensor([1.0, 1, 1, -1, -1, -1], dtype=torch.float64),
        weights=torch.full((6,), 1 / 6, dtype=torch.float64),
        behaviour_logprobs=column(),
        known={**known, "returns": column()},
    )
    view = TokenView(logprobs=column(), rollout=torch.tensor([0, 0, 0, 1, 1, 1]), columns=columns, known=known)
    # Close to log π, where no clip acts; both are far from what other columns hold.
    losses = [
        algorithm.loss(replace(view, columns=replace(columns, behaviour_logprobs=view.logprobs + shift)))
        for shift in (1e-4, -1e-4)
    ]
    return not torch.equal(*losses)
