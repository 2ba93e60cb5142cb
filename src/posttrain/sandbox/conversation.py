"""What is said between whoever has programs run and whatever runs them.

a Conversation starts processes in a Sandbox  ->  each is a Started process
what a process says  ->  Conversation.message        its end  ->  Conversation.ended
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from posttrain.sandbox.execution import Execution, Exit, Process


class StartedProcess(Protocol):
    """A process that has been asked for."""

    def allow(self, cpu_seconds: float) -> None:
        """Let it use that much more processor time from now on, within what it has in all."""
        ...

    def rest(self) -> None:
        """Nothing is asked of it now, so that no wall clock runs against it."""
        ...

    def send(self, payload: bytes) -> None:
        """Say something to it."""
        ...

    def cpu_seconds(self) -> float:
        """Processor time used so far, as far as it is known."""
        ...

    def waited_seconds(self) -> float:
        """How long it was ready to run and had no processor, as far as it is known."""
        ...

    def end(self, why: Exit = Exit.ENDED) -> None:
        """End it; `ended` follows."""
        ...


class Conversation(Protocol):
    """One piece of work: the processes that it needs, and what their messages mean."""

    def begin(self, sandbox: "Sandbox") -> None:
        """Start the first process or processes."""
        ...

    def message(self, sandbox: "Sandbox", process: StartedProcess, payload: bytes) -> None:
        """A process has said something."""
        ...

    def ended(self, sandbox: "Sandbox", process: StartedProcess, execution: Execution) -> None:
        """A process is over."""
        ...


class Sandbox(Protocol):
    """Runs programs that a model wrote; for one thread."""

    @property
    def start_seconds(self) -> float:
        """What starting a process, or telling it something, may take beyond the program's own time."""
        ...

    def start(self, conversation: Conversation, asked: Process) -> StartedProcess:
        """Start a process for a conversation."""
        ...

    def converse(self, conversations: Sequence[Conversation]) -> None:
        """Have all conversations, as many at once as there is room for, in order."""
        ...

    def close(self) -> None:
        """End everything."""
        ...


class RunConversation:
    """A conversation with a program that is only run."""

    def __init__(self, asked: Process) -> None:
        self.asked = asked
        self.execution: Execution | None = None

    def begin(self, sandbox: Sandbox) -> None:
        sandbox.start(self, self.asked)

    def message(self, sandbox: Sandbox, process: StartedProcess, payload: bytes) -> None:
        """It has nothing to say that counts."""

    def ended(self, sandbox: Sandbox, process: StartedProcess, execution: Execution) -> None:
        self.execution = execution


def run(sandbox: Sandbox, processes: Iterable[Process]) -> list[Execution]:
    """Run programs; one that starved on a busy machine is run again, alone.  It may starve again."""
    singles = [RunConversation(process) for process in processes]
    sandbox.converse(singles)
    for single in singles:
        if single.execution is not None and single.execution.starved:
            sandbox.converse([single])
    return [single.execution for single in singles if single.execution is not None]
