"""Sampling by all ranks of a run: rank 0 has an engine that hands each rank its share of the continuations.

A completion depends on its prefix, the weights and its stream of uniform numbers, so it is the same on any rank.  A
conversation stays with its rank, which may have kept its cache.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from posttrain.errors import UserError
from posttrain.generation.engine import Sampling, SamplingTimeout
from posttrain.generation.in_process import InProcessEngine, InProcessSampling
from posttrain.generation.request import Continuation, Request, Sampled
from posttrain.models.sharding import whole_weights
from posttrain.ranks.group import RankGroup

if TYPE_CHECKING:
    from posttrain.models.loading.saving import ExportedWeights

LOOK_SECONDS = 1.0
"""How often a sampling rank checks that rank 0 is alive."""


class RankShare:
    """The engine of this process, for its share of a sampling; rank 0 calls the same methods on every rank."""

    def __init__(self, engine: InProcessEngine, ranks: RankGroup) -> None:
        self.engine, self.ranks = engine, ranks
        self.sampling: InProcessSampling | None = None
        self.weights = ExitStack()
        """Entered while a sampling is open: the weights are whole on every rank."""
        self.done: list[Sampled] = []

    def open_sampling(self, request: Request) -> InProcessSampling:
        if self.sampling is not None:
            raise UserError("engine: ranks sample together, one sampling at a time.  Close the open one first.")
        self.weights.enter_context(whole_weights(self.engine.policy))
        self.sampling = self.engine.open(request)
        return self.sampling

    def sample(self, shares: Sequence[Sequence[Continuation]]) -> None:
        """Sample this rank's share to its end."""
        assert self.sampling is not None, "opened by rank 0"
        mine = shares[self.ranks.rank]
        self.sampling.put(mine)
        while len(self.done) < len(mine):
            try:
                self.done += self.sampling.take(LOOK_SECONDS)
            except SamplingTimeout:
                self.ranks.require_leader()
            self.ranks.at_work()
        self.ranks.at_work(done=True)

    def sampled(self) -> list[Sampled]:
        """What all ranks have sampled, on all of them."""
        mine, self.done = self.done, []
        return [sampled for part in self.ranks.gathered(mine) for sampled in part]

    def close_sampling(self) -> None:
        if self.sampling is not None:
            self.sampling.close()
        self.weights.close()
        self.sampling, self.done = None, []

    def load_version(self, weights: "ExportedWeights", version: int) -> None:
        self.engine.load(weights, version)


class RankEngine:
    """The in-process engines of all ranks as one; an `Engine`, on rank 0."""

    reproducible = True
    logprob_gap: float | None = None
    suppresses = True
    patience_seconds = math.inf

    def __init__(self, share: RankShare) -> None:
        self.share, self.policy = share, share.engine.policy
        self.tokenizer, self.stop_ids = self.policy.tokenizer, self.policy.stop_ids
        self.max_positions = share.engine.max_positions

    @property
    def weights_version(self) -> int:
        return self.share.engine.weights_version

    def load(self, weights: "ExportedWeights", version: int) -> None:
        with self.share.ranks.leading("load_version", version):
            self.share.load_version(weights, version)

    def open(self, request: Request) -> "RankSampling":
        return RankSampling(self.share, request)


class RankSampling(Sampling):
    """Samples rank 0's share a step at a time, while the others sample theirs to the end."""

    def __init__(self, share: RankShare, request: Request) -> None:
        self.share, self.ranks = share, share.ranks
        with self.ranks.leading("open_sampling", request):
            self.own = share.open_sampling(request)
        self.owners: dict[tuple[int, int], int] = {}
        """The rank of each draw and sample."""
        self.away: list[list[Continuation]] = [[] for _ in range(self.ranks.size)]
        """Continuations of other ranks, not yet sent."""
        self.num_own, self.num_sent = 0, 0
        self.closed = False

    def put(self, continuations: Sequence[Continuation]) -> None:
        count, mine = len(continuations), list[Continuation]()
        for place, each in enumerate(continuations):
            owner = self.owners.setdefault((each.draw, each.sample), place * self.ranks.size // count)
            (self.away[owner] if owner else mine).append(each)
        self.own.put(mine)
        self.num_own += len(mine)

    def take(self, seconds: float) -> list[Sampled]:
        if any(self.away) and not self.num_sent:
            shares, self.away = self.away, [[] for _ in self.away]
            with self.ranks.leading("sample", shares):  # they are not waited for
                self.num_sent = sum(map(len, shares))
        if self.num_own:
            done = self.own.take(seconds)
            self.num_own -= len(done)
            return done
        if not self.num_sent:
            return self.own.take(seconds)  # which says that nothing is open
        self.ranks.wait_for_others()  # in no collective, which would limit the seconds of a share
        with self.ranks.leading("sampled"):
            self.num_sent = 0
            return self.share.sampled()

    def release(self, sampled: Iterable[Sampled]) -> None:
        """Frees caches of rank 0; the others free theirs when they need the room."""
        self.own.release(each for each in sampled if not self.owners[each.continuation.draw, each.continuation.sample])

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            with self.ranks.leading("close_sampling"):
                self.share.close_sampling()

    def __exit__(self, *raised: object) -> None:
        if raised[0] is None:
            self.close()
        else:  # the run ends, and the others may be in the midst of their share
            self.closed = True
            self.share.close_sampling()
