"""torch's number of threads: one for the process, on which all open sessions must agree."""

import threading
import weakref

import torch

from posttrain.errors import UserError


class ThreadCount:
    """torch's number of threads, and the claims to it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._claims: weakref.WeakSet[ThreadClaim] = weakref.WeakSet()
        self._before = 0
        """The number before the first of the current claims."""

    def take(self, claim: "ThreadClaim", count: int, what: str) -> None:
        """Set the number for a claim.  Raises UserError where another claim needs another number."""
        with self._lock:
            held = [each.count for each in self._claims if each is not claim and each.count]
            if any(each != count for each in held):
                raise UserError(
                    f"{what}, but another session of this process computes with {held[0]}, and torch has one"
                    " number of threads.  Close that session, use its run.threads, or start another process."
                )
            if not held and not claim.count:
                self._before = torch.get_num_threads()
            self._claims.add(claim)
            claim.count = count
            torch.set_num_threads(count)

    def drop(self, claim: "ThreadClaim") -> None:
        """Release a claim; the last one restores the number."""
        with self._lock:
            held, claim.count = claim.count, 0
            if held and not any(each.count for each in self._claims):
                torch.set_num_threads(self._before)


_PROCESS = ThreadCount()


class ThreadClaim:
    """One session's claim to a number of threads, until it is released or garbage-collected."""

    def __init__(self) -> None:
        self.count = 0
        """Threads that it needs; 0 means any number."""

    def __enter__(self) -> "ThreadClaim":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self, count: int, what: str) -> None:
        """Claim a number; `what` begins the message where another session has another number."""
        _PROCESS.take(self, count, what)

    def release(self) -> None:
        _PROCESS.drop(self)


def claim_threads(count: int) -> ThreadClaim:
    """Set torch's number of threads until the claim is released; 0 changes nothing.

    Raises UserError where an open session has claimed another number.
    """
    claim = ThreadClaim()
    if count:
        claim.take(count, f"run.threads = {count}")
    return claim
