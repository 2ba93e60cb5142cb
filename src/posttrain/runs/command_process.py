"""`posttrain` commands as processes of their own: each with its own peak of memory, and ended with this one."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from posttrain.errors import RunError


def run_command(command: Sequence[str], *, name: str, log: Path) -> None:
    """Run `posttrain` with these arguments; what it prints goes to the end of a log.

    An interruption is passed on, and waited for: the run saves the step that it is at.  Raises RunError where the
    command fails; `name` is what the message calls it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "posttrain", *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if code:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise RunError(
            f"{name}: `posttrain {' '.join(command)}` ended with {code}: {''.join(last)}\n    {log} has all that it"
            " said.  What is finished is kept; the same command goes on with the rest."
        )
