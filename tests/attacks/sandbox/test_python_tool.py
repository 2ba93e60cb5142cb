"""The tool `python`: programs that a policy wrote compute in the sandbox, and what they print is cut."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from posttrain.environments import python_tool
from posttrain.environments.python_tool import MOST_CHARACTERS, SandboxedPython
from posttrain.errors import RunError
from posttrain.options.sandbox import SandboxOptions
from tests.support.refusals import refused


@pytest.fixture(scope="module")
def running() -> Iterator[SandboxedPython]:
    made = SandboxedPython(SandboxOptions())
    yield made
    made.close()


PROGRAMS = {
    "print(6 * 7)": "42",
    "print('a')\nprint('b')": "a\nb",
    "": "",
    "print('a')\n1 / 0": "a\nError: ZeroDivisionError: division by zero",
    "1 +": "Error: SyntaxError: not a Python program",
    "import sys; sys.exit(3)": "Error: exit status 3",
    "import posttrain": "Error: ModuleNotFoundError: No module named 'posttrain'",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_answers_with_what_it_prints_or_with_the_last_line_of_its_error(
    running: SandboxedPython, program: str
) -> None:
    assert running.python(program) == PROGRAMS[program]


ESCAPES = [
    "print(open('/etc/passwd').read())",
    "import socket; socket.create_connection(('127.0.0.1', 80))",
    "import os; os.fork()",
    "import subprocess; print(subprocess.run(['true']))",
]


@pytest.mark.parametrize("program", ESCAPES)
def test_a_program_reads_no_file_and_starts_no_process(running: SandboxedPython, program: str) -> None:
    assert "Error: " in running.python(program)


def test_endless_programs_and_floods_end_and_say_so(running: SandboxedPython, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_tool, "LIMITS", replace(python_tool.LIMITS, cpu_seconds=0.2))
    assert running.python("while True: pass") == python_tool.ENDS["cpu_limit"]  # type: ignore[index]
    flood = running.python("while True: print('x' * 1000)")
    assert flood.endswith(python_tool.ENDS["output_limit"])  # type: ignore[index]
    assert len(flood) < MOST_CHARACTERS + 200


def test_long_output_is_cut_to_the_stated_length(running: SandboxedPython) -> None:
    shown = running.python(f"print('x' * {MOST_CHARACTERS + 5})")
    assert shown.startswith("x" * MOST_CHARACTERS + "\n[cut: ")
    assert running.python(f"print('x' * {MOST_CHARACTERS - 1})") == "x" * (MOST_CHARACTERS - 1)


def test_programs_of_several_completions_run_together_and_each_gets_its_own_output(running: SandboxedPython) -> None:
    found: dict[int, str] = {}

    def run(number: int) -> None:
        found[number] = running.python(f"print({number})")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    with running.lock:  # until all wait
        for thread in threads:
            thread.start()
        while running.waiting.qsize() < len(threads):
            time.sleep(0.01)
    for thread in threads:
        thread.join()
    assert found == {number: str(number) for number in range(6)}


def test_a_sandbox_that_breaks_is_an_error_of_the_run_for_all_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = SandboxedPython(SandboxOptions())
    monkeypatch.setattr(broken.sandboxes, "importing", lambda: (_ for _ in ()).throw(RunError("gone")))
    for _ in range(2):
        with refused("gone", error=RunError):
            broken.python("print(1)")
    broken.close()
