"""Work in a process of its own, which has all that this one has loaded."""

import contextlib
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Generic, TypeVar

T = TypeVar("T")
ERRORS = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8")
"""Where a mistake of our own is told, whatever becomes of descriptor 2."""


class Fork(Generic[T]):
    """Work in a process of its own, on all that this one has loaded."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.receiver, sender = Pipe(duplex=False)
        self.process = os.fork()
        if self.process == 0:
            code = 1
            try:
                sender.send(work())
                code = 0
            except BaseException:
                traceback.print_exc(file=ERRORS)
                raise
            finally:
                os._exit(code)
        sender.close()

    def result(self) -> T | None:
        """What the work gave; None where it ran out of time."""
        given = None
        with contextlib.suppress(EOFError):
            given = self.receiver.recv()
        status = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        assert status in (0, -signal.SIGALRM), f"a fork ended with {status}"
        return given
