"""A thread for the calls of one tracker's library, which may raise anything and wait for a network for ever."""

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread

Job = Callable[[], None]
LONGEST = 300
"""Characters of what a library says that are told."""


class TrackerFailure(Exception):
    """A tracker's library raised an error, which is the cause."""


def attempt(job: Job) -> None:
    """Do it.  Raises TrackerFailure, whatever the library raises."""
    try:
        job()
    except TrackerFailure:
        raise
    except BaseException as error:  # one that leaves, by SystemExit, would take its thread along
        said = " ".join(str(error).split())
        raise TrackerFailure(f"{type(error).__name__}: {said}"[:LONGEST]) from error


class TrackerThread:
    """Does what it is given one after the other; the program may end without waiting for it."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Future[None], Job]] = SimpleQueue()
        Thread(target=self._work, name=f"tracker {name}", daemon=True).start()

    def submit(self, job: Job) -> Future[None]:
        """Have it done after what was given before; its exception is a TrackerFailure."""
        future: Future[None] = Future()
        self._jobs.put((future, job))
        return future

    def _work(self) -> None:
        while True:
            future, job = self._jobs.get()
            try:
                attempt(job)
            except TrackerFailure as failure:
                future.set_exception(failure)
            else:
                future.set_result(None)
