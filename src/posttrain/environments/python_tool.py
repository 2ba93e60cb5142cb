"""The tool `python`: runs a program in the sandbox, which is checked before anything runs in it."""

import threading
from dataclasses import dataclass
from queue import SimpleQueue

from posttrain.errors import RunError
from posttrain.options.sandbox import SandboxOptions
from posttrain.sandbox.execution import Execution, Exit, Limits, Process
from posttrain.sandbox.sandboxes import Sandboxes

LIMITS = Limits(cpu_seconds=2.0, output_bytes=1 << 16, most_seconds=3.0)
MOST_CHARACTERS = 2000
"""Characters of output that the policy sees; the rest is left out."""
ENDS = {
    Exit.CPU_LIMIT: f"Error: more than {LIMITS.cpu_seconds:g} seconds of processor time",
    Exit.WALL_LIMIT: "Error: it did not end in time",
    Exit.OUTPUT_LIMIT: f"Error: more than {LIMITS.output_bytes} bytes of output",
    Exit.THREAD_LIMIT: "Error: too many threads",
    Exit.SIGNALLED: "Error: the program crashed",
}
"""Added to the output of a program that was ended."""


@dataclass(slots=True, eq=False)
class WaitingProgram:
    """A program, and what became of it."""

    asked: Process
    execution: Execution | None = None


class SandboxedPython:
    """Programs of all completions in one sandbox, which is for one thread at a time.

    The thread that holds it runs the waiting programs of all threads, as many at once as the sandbox allows.  A few
    slow ones then do not delay the others.
    """

    def __init__(self, options: SandboxOptions) -> None:
        self.sandboxes, self.lock, self.waiting = Sandboxes(options), threading.Lock(), SimpleQueue[WaitingProgram]()
        self.python("")  # the sandbox is probed and started before the first step

    def python(self, code: str) -> str:
        """Runs a Python program, without files or network, and returns what it prints.

        Args:
            code: the program; it must print its result
        """
        mine = WaitingProgram(Process(kind="program", source=code, limits=LIMITS))
        self.waiting.put(mine)
        with self.lock:
            if not self.waiting.empty():
                self.run_waiting()
        done = mine.execution
        if done is None or done.exit is Exit.LOST or done.starved:
            raise RunError("tool python: the sandbox lost the program, or this machine is too busy to run it")
        return output_text(done)

    def run_waiting(self) -> None:
        """Run all programs that are waiting now."""
        batch = [self.waiting.get() for _ in range(self.waiting.qsize())]
        executions = self.sandboxes.importing().run([each.asked for each in batch])
        for each, execution in zip(batch, executions, strict=True):
            each.execution = execution

    def close(self) -> None:
        with self.lock:
            self.sandboxes.close()


def output_text(done: Execution) -> str:
    """Standard output, cut, and why the program failed: the last line of its standard error."""
    output = done.stdout.decode("utf-8", "replace")
    if len(output) > MOST_CHARACTERS:
        output = f"{output[:MOST_CHARACTERS]}\n[cut: {len(output)} characters, of which {MOST_CHARACTERS} are shown]"
    if done.succeeded:
        return output.rstrip("\n")
    silent = f"exit status {done.status}" if done.compiled else "SyntaxError: not a Python program"
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [silent]
    fault = ENDS.get(done.exit, f"Error: {lines[-1][:500]}")
    return f"{output.rstrip()}\n{fault}".lstrip("\n")
