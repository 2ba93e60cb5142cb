"""`--ranks N`: start the same command as N ranks on this machine, as torchrun does."""

import logging
import os
import sys
from collections.abc import Sequence

from posttrain.commands.arguments import INTERRUPTED
from posttrain.errors import UserError
from posttrain.ranks.group import num_ranks

SHUTDOWN_SECONDS = 3600
"""Time for ranks to finish and save their step after a signal."""


def starts_ranks(asked: int) -> bool:
    """Whether this process should start ranks.  Raises UserError if it is itself one of another number of ranks."""
    here = num_ranks()
    if asked and here > 1 and asked != here:
        raise UserError(f"command line: --ranks {asked}: {here} ranks were started here.  Leave --ranks out.")
    return asked > 1 and here == 1


def run_ranks(count: int, command: str, arguments: Sequence[str]) -> int:
    """Run `posttrain COMMAND ARGUMENTS` as ranks; returns the exit code of rank 0, or of the first rank that failed."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # a rank says itself why it fails
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id="posttrain",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=SHUTDOWN_SECONDS,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "posttrain", command, *arguments)
    except ChildFailedError as error:
        failed = error.failures.get(0) or error.get_first_failure()[1]
        return failed.exitcode if failed.exitcode > 0 else 1
    except SignalException:
        return INTERRUPTED
    return 0
