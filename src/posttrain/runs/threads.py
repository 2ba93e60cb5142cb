"""How many threads torch computes with: one number for the process, on which all that is open at once must agree."""

import threading
import weakref

import torch

from posttrain.errors import UserError


class ThreadCount:
    """torch's number of threads, and who needs it to stay what it is."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._claims: weakref.WeakSet[ThreadClaim] = weakref.WeakSet()
        self._before = 0
        """The number before the first claim of those that hold now."""

    def take(self, claim: "ThreadClaim", count: int, what: str) -> None:
        """Compute with so many threads for a claim.  Raises UserError where another claim needs another number."""
        with self._lock:
            held = [each.count for each in self._claims if each is not claim and each.count]
            if any(each != count for each in held):
                raise UserError(
                    f"{what}, but another session that is open in this process computes with {held[0]}: torch has one"
                    " number of threads for the whole process, and sums follow it.  Close that session first (a run"
                    " closes its own when it ends), use the same run.threads for both, or start this run in a process"
                    " of its own."
                )
            if not held and not claim.count:
                self._before = torch.get_num_threads()
            self._claims.add(claim)
            claim.count = count
            torch.set_num_threads(count)

    def drop(self, claim: "ThreadClaim") -> None:
        """Give a claim up; the last one puts the number back."""
        with self._lock:
            held, claim.count = claim.count, 0
            if held and not any(each.count for each in self._claims):
                torch.set_num_threads(self._before)


_PROCESS = ThreadCount()


class ThreadClaim:
    """One session's need for a number of threads, until it is released or nobody holds it any longer."""

    def __init__(self) -> None:
        self.count = 0
        """Threads that it needs; 0 where any number will do."""

    def __enter__(self) -> "ThreadClaim":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self, count: int, what: str) -> None:
        """Need so many threads from now on; `what` begins the error where they cannot be had."""
        _PROCESS.take(self, count, what)

    def release(self) -> None:
        """Need no number any longer.  Releasing twice does nothing."""
        _PROCESS.drop(self)


def claim_threads(count: int) -> ThreadClaim:
    """Have torch compute with so many threads until the claim is released; 0 has no wish and changes nothing.

    Raises UserError where a session that is open has claimed another number.
    """
    claim = ThreadClaim()
    if count:
        claim.take(count, f"run.threads = {count}")
    return claim
