"""Trying mutants in forks, and what is known of each, one ignored file for each source file, to go on from.

A result holds as long as the source file and the mutant have the content that they had when it was tried.
"""

import contextlib
import json
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from multiprocessing import Pipe
from pathlib import Path
from typing import Generic, TypeVar

from mutations import PACKAGE, Mutant

FOLDER = Path(__file__).parents[1] / ".mutants"


@dataclass(frozen=True)
class Result:
    """How it went with a mutant."""

    source: str
    """Digest of the file that is mutated."""
    mutant: str
    """Digest of the file, mutated."""
    noticed_by: str
    """The test that failed first; none if empty."""
    seconds: float
    """Of trying."""


class Results:
    """The results for one source file."""

    def __init__(self, file: str) -> None:
        self.source = digest((PACKAGE / file).read_text(encoding="utf-8"))
        self.path = FOLDER / f"{file.replace('/', '.')}.jsonl"
        lines = self.path.read_text(encoding="utf-8").split("\n")[:-1] if self.path.exists() else []  # none torn
        found = [Result(**json.loads(line)) for line in lines]
        self.known = {result.mutant: result for result in found if result.source == self.source}
        """By the mutant's digest; the last counts."""

    def of(self, mutant: Mutant) -> Result | None:
        """What is known of a mutant."""
        return self.known.get(digest(mutant.source))

    def add(self, mutant: Mutant, noticed_by: str, seconds: float) -> None:
        """Keep a result, also from a process that was forked."""
        result = Result(self.source, digest(mutant.source), noticed_by, round(seconds, 2))
        FOLDER.mkdir(exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        self.known[result.mutant] = result

    def forget(self) -> None:
        """Know nothing."""
        self.path.unlink(missing_ok=True)
        self.known = {}


def digest(text: str) -> str:
    """A name for a content."""
    return sha256(text.encode()).hexdigest()[:20]


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
