"""Processes of tests, forked from one that has loaded the library and computed what every command computes first."""

import contextlib
import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

ROOT = Path(__file__).parents[2]


def fork_context() -> ForkServerContext:
    """One server for all tests.  It loads its modules when it starts; modules that are named later are not loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    with contextlib.chdir(ROOT):  # from any other folder the module is not found, and nothing is said
        forkserver.ensure_running()
    return context
