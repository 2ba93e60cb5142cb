"""The tool `python`: runs a program in the sandbox, which is checked before anything runs in it."""

import threading

from posttrain.errors import RunError
from posttrain.options.sandbox import SandboxOptions
from posttrain.sandbox.execution import Execution, Exit, Limits, Process
from posttrain.sandbox.sandboxes import Sandboxes

LIMITS = Limits(cpu_seconds=5.0, output_bytes=1 << 16, most_seconds=10.0)
MOST_CHARACTERS = 2000
"""Output that the policy is shown; the rest is left out."""
ENDS = {
    Exit.CPU_LIMIT: f"Error: more than {LIMITS.cpu_seconds:g} seconds of processor time",
    Exit.WALL_LIMIT: "Error: it did not end in time",
    Exit.OUTPUT_LIMIT: f"Error: more than {LIMITS.output_bytes} bytes of output",
    Exit.THREAD_LIMIT: "Error: too many threads",
    Exit.SIGNALLED: "Error: the program crashed",
}
"""What is added to the output of a program that did not end by itself."""


class SandboxedPython:
    """Programs of all completions in one sandbox, one after the other: a sandbox is for one thread at a time."""

    def __init__(self, options: SandboxOptions) -> None:
        self.sandboxes, self.lock = Sandboxes(options), threading.Lock()
        self.python("")  # the sandbox is probed and started before the first step

    def python(self, code: str) -> str:
        """Runs a Python program, without files or network, and returns what it prints.

        Args:
            code: the program; it must print its result
        """
        asked = Process(kind="program", source=code, limits=LIMITS)
        with self.lock:
            done = self.sandboxes.importing().run([asked])[0]
        if done.exit is Exit.LOST or done.starved:
            raise RunError("tool python: the sandbox lost the program, or this machine is too busy to run it")
        return output_text(done)

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
