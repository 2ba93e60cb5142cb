"""Processes of tests, forked from one that has loaded the library and computed what every command computes first."""

import multiprocessing
from multiprocessing.context import ForkServerContext


def fork_context() -> ForkServerContext:
    """The same for every test: the first that uses it starts the server, and what later ones ask for is not loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    return context
