"""Whether a run can collect ahead of its updates (`rollout.max_staleness`), and the collector that does so."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.terms import TokenView
from posttrain.batch import TokenColumns
from posttrain.errors import UserError
from posttrain.needs import NEED_OF
from posttrain.training.session import Session


def require_ahead(session: Session) -> None:
    """Reject collecting ahead if the loss does not read the sampler's log-probs."""
    where, name = f"rollout.max_staleness = {session.config.rollout.max_staleness}", session.algorithm.name
    if not reads_behaviour(session.algorithm):
        raise UserError(
            f"{where}: algorithm {name} does not use a ratio to the sampling policy, so it would treat old samples as"
            " new ones.  Set algorithm.correction, such as {level: token}, or max_staleness: 0."
        )


def collecting(session: Session) -> AbstractContextManager[object]:
    """The active collector, which works ahead of the updates if `rollout.max_staleness` allows it."""
    if not session.config.rollout.max_staleness:
        return nullcontext()
    from posttrain.training.ahead import CollectorAhead

    ahead = CollectorAhead(session.collector)
    session.collector, session.engine = ahead, ahead.trainers_engine
    return ahead


def reads_behaviour(algorithm: Algorithm) -> bool:
    """Whether the loss changes with log μ, tested on the tokens of two completions at the start of an update."""
    generator = torch.Generator().manual_seed(0)

    def column() -> Float64[Tensor, " token"]:
        return torch.rand(6, generator=generator, dtype=torch.float64) - 1.5

    logprobs = column()
    known = {**{name: column() for name in NEED_OF}, "proximal_logprobs": logprobs}
    columns = TokenColumns(
        advantages=torch.tensor([1.0, 1, 1, -1, -1, -1], dtype=torch.float64),
        weights=torch.full((6,), 1 / 6, dtype=torch.float64),
        behaviour_logprobs=column(),
        known={**known, "returns": column()},
    )
    view = TokenView(logprobs=logprobs, rollout=torch.tensor([0, 0, 0, 1, 1, 1]), columns=columns, known=known)
    # Near log π no clip acts and no mask; far from it every mask does, and a clip of one sign.
    losses = [
        algorithm.loss(replace(view, columns=replace(columns, behaviour_logprobs=view.logprobs + shift)))
        for shift in (0, 1e-4, 9, -9)
    ]
    return not all(torch.equal(losses[0], each) for each in losses[1:])
