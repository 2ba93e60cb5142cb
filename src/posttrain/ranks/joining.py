"""Joining the group of ranks that the environment describes; a run in one process does not join one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from posttrain.errors import UserError
from posttrain.ranks.group import ONE_RANK, RankGroup, num_ranks

STARTERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that torchrun sets for each rank; another starter has to set the same."""


@contextmanager
def joined(timeout_seconds: float) -> Iterator[RankGroup]:
    """The group of this process, joined until the context ends; an error on a rank ends all of them."""
    if num_ranks() == 1:
        yield ONE_RANK
        return
    if missing := [name for name in STARTERS if name not in os.environ]:
        raise UserError(
            f"WORLD_SIZE = {num_ranks()} in the environment, without {', '.join(missing)}.  Start the ranks with"
            " torchrun, or unset WORLD_SIZE."
        )
    from posttrain.ranks.processes import joined_processes

    with joined_processes(timeout_seconds) as ranks:
        yield ranks
