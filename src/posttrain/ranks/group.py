"""The processes of one run, its ranks.  Torch-free, and a run in one process needs nothing else.

Rank 0 leads: it owns the folder, the task, the rewards and the progress, and decides what comes next.  The others
follow its calls (`training.following`).  Inside a call all ranks run the same code: each takes its share of the
micro-batches, and the results are gathered or summed.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Dealt(Generic[Item]):
    """A micro-batch that this rank computes."""

    number: int
    """Its place among those of all ranks."""
    item: Item
    counts: bool = True
    """False for a stand-in: a rank without a micro-batch computes one too, since a sharded pass needs all ranks."""

    def weighed(self, loss: "Tensor") -> "Tensor":
        """The loss, or 0 of it for a stand-in."""
        return loss if self.counts else 0.0 * loss


class RankGroup:
    """A group of one process, which sends nothing; `processes.RankProcesses` is a group of several."""

    rank: int = 0
    size: int = 1
    asked: str = ""
    """The signal that this rank got, if any; others learn of it when they next agree."""
    signal: str = ""
    """The signal that a rank got, if any: the run is to stop."""

    def leading(self, call: str, *given: object) -> AbstractContextManager[None]:
        """On rank 0: the others run this call too, with these arguments; inside it, all run the same code."""
        return nullcontext()

    def broadcast(self, value: Result) -> Result:
        """Rank 0's value, on all ranks."""
        return value

    def gathered(self, value: Result) -> list[Result]:
        """The values of all ranks, in their order, on all ranks."""
        return [value]

    def meet(self) -> None:
        """Wait until all ranks arrive, however long that takes.  Raises RunError if one is gone."""

    def agree(self, what: str, digest: Callable[[], str]) -> None:
        """Raise RunError if a digest differs between ranks; learn of signals that other ranks got."""

    def mesh(self, device: "torch.device") -> "DeviceMesh | None":
        """The ranks as places over which weights are split; None for one."""
        return None

    def require_leader(self) -> None:
        """Raise RunError if rank 0 has ended."""

    def naming_peers(self) -> AbstractContextManager[None]:
        """Raise a RunError with the message of the rank that failed, if this one only knows that some rank did."""
        return nullcontext()

    def budget(self, tokens: int, most: int) -> int:
        """Tokens of a micro-batch: at most `most`, and few enough that each rank gets a share of `tokens`."""
        return most if self.size == 1 else max(1, min(most, -(-tokens // self.size)))

    def deal(self, items: Sequence[Item], cost: Callable[[Item], int]) -> Iterator[Dealt[Item]]:
        """This rank's items, as many on every rank; the same items are dealt in the same way everywhere.

        The costliest first, each goes to the rank with the lowest cost so far that has room.
        """
        rounds = -(-len(items) // self.size)
        costs, hands = [cost(item) for item in items], [list[int]() for _ in range(self.size)]
        for number in sorted(range(len(items)), key=lambda number: -costs[number]):
            free = [hand for hand in hands if len(hand) < rounds]
            min(free, key=lambda hand: sum(costs[each] for each in hand)).append(number)
        mine = sorted(hands[self.rank])
        for place in range(rounds):
            number = mine[place] if place < len(mine) else 0
            yield Dealt(number, items[number], counts=place < len(mine))

    def each(
        self, items: Sequence[Item], cost: Callable[[Item], int], compute: Callable[[Item], Result]
    ) -> list[Result]:
        """What `compute` finds for each item, in order, on all ranks; each item is computed by one of them."""
        if self.size == 1:
            return [compute(item) for item in items]
        return self.in_order([(share, compute(share.item)) for share in self.deal(items, cost)])

    def in_order(self, found: Sequence[tuple[Dealt[Item], Result]]) -> list[Result]:
        """The results of all ranks in the order of the items, without those of stand-ins."""
        mine = [(share.number, result) for share, result in found if share.counts]
        together = [pair for part in self.gathered(mine) for pair in part]
        return [result for _, result in sorted(together, key=lambda pair: pair[0])]

    def at_work(self, *, done: bool = False) -> None:
        """On other ranks: report progress or the end of a call that rank 0 does not wait for."""

    def wait_for_others(self) -> None:
        """On rank 0: wait until that call is done, however long it takes.

        Raises RunError if a rank ends, or makes no progress for `run.rank_timeout_seconds`.
        """

    def next_call(self) -> tuple[str, tuple[Any, ...]]:
        """The next call of rank 0 and its arguments, however long that takes.  Raises RunError if rank 0 is gone."""
        raise AssertionError("rank 0 follows nobody")

    def finish(self, result: Result) -> Result:
        """End the other ranks too, with this result."""
        return result

    def has_begun(self) -> bool:
        """Whether an earlier attempt of this job, which torchrun restarted, began the run, which is then resumed."""
        return False

    def begins(self) -> None:
        """Note that the run has begun: its folder is laid out."""


ONE_RANK = RankGroup()
"""A run in one process."""


def num_ranks() -> int:
    """The number of ranks that a starter such as torchrun states; 1 without one."""
    count = os.environ.get("WORLD_SIZE", "1")
    return int(count) if count.isdecimal() and "MASTER_ADDR" in os.environ else 1


def leads() -> bool:
    """Whether this is rank 0, the only one that reports how a run ended: a starter ends all ranks if one fails."""
    return num_ranks() == 1 or os.environ.get("RANK") == "0"


def resume_flags() -> list[str]:
    """The flags that continue a run with as many ranks as this one has."""
    return ["--ranks", str(num_ranks())] if num_ranks() > 1 else []
