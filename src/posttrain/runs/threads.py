"""torch's number of threads: one for the process, on which all open sessions must agree."""

import threading
import weakref
from typing import ClassVar

import torch

from posttrain.errors import UserError


class ThreadClaim:
    """One session's claim to a number of threads, until it is released or garbage-collected."""

    _lock = threading.RLock()
    _open: ClassVar["weakref.WeakSet[ThreadClaim]"] = weakref.WeakSet()
    _before = 0
    """The number before the first of the open claims."""

    def __init__(self) -> None:
        self.count = 0
        """Threads that it needs; 0 means any number."""

    def __enter__(self) -> "ThreadClaim":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self, count: int, what: str) -> None:
        """Claim a number; `what` begins the message where another session has another number."""
        with self._lock:
            held = [each.count for each in self._open if each is not self and each.count]
            if any(each != count for each in held):
                raise UserError(
                    f"{what}, but another session of this process computes with {held[0]}, and torch has one number of"
                    " threads.  Close that session, use its run.threads, or start another process."
                )
            if not held and not self.count:
                ThreadClaim._before = torch.get_num_threads()
            self._open.add(self)
            self.count = count
            torch.set_num_threads(count)

    def release(self) -> None:
        """Drop the claim; the last one restores the number.  Releasing twice does nothing."""
        with self._lock:
            held, self.count = self.count, 0
            if held and not any(each.count for each in self._open):
                torch.set_num_threads(self._before)


def claim_threads(count: int) -> ThreadClaim:
    """Set torch's number of threads until the claim is released; 0 changes nothing.

    Raises UserError where an open session has claimed another number.
    """
    claim = ThreadClaim()
    if count:
        claim.take(count, f"run.threads = {count}")
    return claim
