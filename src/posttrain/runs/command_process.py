"""`posttrain` commands as processes of their own: each with its own peak of memory, and ended with this one."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from posttrain.errors import RunError
from posttrain.runs.files import no_link

GOES_ON = "What is finished is kept; the same command goes on with the rest."


def run_command(command: Sequence[str], *, name: str, log: Path) -> None:
    """Run `posttrain` with these arguments; what it prints goes to the end of a log.

    An interruption is passed on once, and waited for: the run saves the step that it is at.  It is in a session of its
    own, for a terminal's Ctrl-C goes to all that are in one, and a second signal ends a run at once.  Raises RunError
    where the command fails; `name` is what the message calls it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab", opener=no_link) as output:
        said_before = output.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "posttrain", *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait()
        except BaseException:
            terminate(process)
            raise
    if code:
        said = log.read_bytes()[said_before:].decode("utf-8", errors="replace")
        last = said.strip().splitlines()[-1:]
        raise RunError(
            f"{name}: `posttrain {' '.join(command)}` ended with {code}: {''.join(last)}\n    {log} has all that it"
            f" said.  {GOES_ON}"
        )


def terminate(process: subprocess.Popen[bytes]) -> None:
    """Tell a process to end, and wait until it has; whoever is interrupted in waiting tells it again."""
    process.terminate()
    try:
        process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
