"""What a sealed program finds out about where it runs, and how many threads it may have."""

import sys
from pathlib import Path

import posttrain
from posttrain.rewards.code.code_reward import CodeReward
from posttrain.sandbox.execution import Execution, Exit, Limits, Process, ServerOptions
from posttrain.sandbox.probes import PROBES
from posttrain.sandbox.process_pool import ProcessPool
from tests.support.code_cheats import ALL, RIGHT
from tests.support.sandboxes import scored

THREADS = """
import time, threading, _thread
threading.stack_size(32768)
for _ in range({}): _thread.start_new_thread(time.sleep, (2,))
time.sleep(0.5)
print("done")
"""


def run(source: str, pool: ProcessPool | None = None) -> Execution:
    with pool or ProcessPool() as used:
        (execution,) = used.run([Process(kind="program", source=source, limits=Limits(cpu_seconds=1.0))])
    return execution


def test_nothing_says_where_the_project_lies_or_what_the_machine_is_called() -> None:
    source = """
import os, platform, socket, sys
print(os.uname().nodename, platform.node(), socket.gethostname(), sys.argv, sys.orig_argv, sys.path, sys.executable)
frame, names = sys._getframe(), []
while frame:
    names += [frame.f_code.co_filename, *(str(value) for value in frame.f_globals.values() if isinstance(value, str))]
    frame = frame.f_back
print(names, [vars(sys.modules[name]).get("__file__") for name in ("runner", "frames", "plain", "lockdown", "filter")])
"""
    said = run(source).stdout.decode()
    first = "sandbox sandbox sandbox ['program.py'] ['python3', 'program.py'] [] /usr/bin/python3\n"
    assert said.startswith(first)
    folder = str(Path(posttrain.__file__).parent)
    assert folder not in said
    assert sys.prefix not in said
    assert "[None, None, None, None, None]" in said


def test_a_program_of_too_many_threads_is_ended_and_one_of_a_hundred_is_not() -> None:
    assert run(THREADS.format(100)).stdout == b"done\n"
    assert run(THREADS.format(400)).exit is Exit.THREAD_LIMIT
    source = f"{THREADS.format(400)}\n{RIGHT}"
    for kind in ALL:
        (found,) = scored(CodeReward(), [source], ALL[kind])
        assert (found.score, str(found.outcome)) == (0.0, "thread_limit"), kind  # type: ignore[union-attr]  # Graded


FAILING = """
import sys
kind = sys.modules["__main__"].ForkServer
made = kind.__init__
def failing_now_and_then(self, *given):
    made(self, *given)
    fork, asked = self.fork, []
    def other():
        asked.append(None)
        return -1 if len(asked) - {probes} in (2, 3) else fork()  # as where the user may have no more processes
    self.fork = other
kind.__init__ = failing_now_and_then
"""


def test_a_fork_that_fails_loses_its_job_and_no_other() -> None:
    options = ServerOptions(prepare=FAILING.format(probes=len(PROBES)))
    with ProcessPool(options, at_once=1) as pool:
        server = pool.opened()
        found = pool.run([Process(kind="program", source="print(1)")] * 5)
        assert [each.exit is Exit.LOST for each in found] == [False, True, True, False, False]
        assert {each.stdout for each in found} == {b"1\n", b""}
        assert pool.server is server
