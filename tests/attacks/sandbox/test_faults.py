"""Faults that the sandbox once had: what one program does may cost it its score, and costs nobody else anything."""

import json
import os
import socket
import threading
import time
import timeit
from collections.abc import Callable
from typing import Any

import pytest

from posttrain.options.sandbox import SandboxOptions
from posttrain.rewards.code.code_reward import CodeOutcome, CodeReward
from posttrain.rewards.grading.function import ScoringFailure
from posttrain.rewards.parsing.tags import program_in
from posttrain.sandbox import sandboxed_process as processes
from posttrain.sandbox.backends import Bubblewrap
from posttrain.sandbox.execution import Exit, Limits, Process, RunConversation, Sandbox, ServerOptions, StartedProcess
from posttrain.sandbox.inside import plain
from posttrain.sandbox.process_pool import ProcessPool
from posttrain.sandbox.replay_sandbox import ReplaySandbox
from posttrain.sandbox.sandboxed_process import SandboxedProcess
from tests.support.code_cheats import ALL, RIGHT
from tests.support.refusals import refused
from tests.support.sandboxes import chosen, graded, needs_bubblewrap
from tests.support.timing import takes


def test_a_flood_of_messages_ends_the_program_and_no_other() -> None:
    flood = "import os\ndef add(a, b):\n    os.write(3, b'\\0\\0\\0\\0' * 50000)\n    return a + b"
    with chosen(SandboxOptions(at_once=8)):
        found = graded(CodeReward(cpu_seconds=0.5), [flood, *[RIGHT] * 7] * 2, ALL["calls"])
    assert found == [(0.0, "not_plain"), *[(1.0, "passed")] * 7] * 2


def test_more_programs_at_once_than_the_socket_holds_messages() -> None:
    with ProcessPool(ServerOptions(modules=("os", "time")), at_once=400) as pool:
        asked = [Process(kind="program", source="import time; time.sleep(1); print(1)")] * 400
        assert {(execution.exit, execution.stdout) for execution in pool.run(asked)} == {(Exit.FINISHED, b"1\n")}


def test_a_stalled_trainer_takes_no_answer_for_late_that_had_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Limits, "wall_seconds", property(lambda self: 0.5))
    with ProcessPool(at_once=1) as pool:
        pool.run([Process(kind="program", source="print(0)")])
        started = pool.start

        def slowly(*arguments: Any) -> SandboxedProcess:
            running = started(*arguments)
            time.sleep(1.0)  # the program is done long before we look
            return running

        monkeypatch.setattr(pool, "start", slowly)
        (execution,) = pool.run([Process(kind="program", source="print(1)")])
    assert (execution.exit, execution.stdout) == (Exit.FINISHED, b"1\n")


def test_a_call_that_took_longer_than_it_may_is_late_whenever_we_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    graded(CodeReward(), [RIGHT], ALL["calls"])  # probed while somebody looks
    monkeypatch.setattr(SandboxedProcess, "over_limit", lambda self, now: None)  # and nobody does from now on
    slow = """
import time
def add(a, b):
    until = time.process_time() + 0.5
    while time.process_time() < until: pass
    return a + b
"""
    assert graded(CodeReward(cpu_seconds=0.3), [slow], ALL["calls"]) == [(0.0, "time_limit")]
    assert graded(CodeReward(cpu_seconds=0.8), [slow], ALL["calls"]) == [(1.0, "passed")]


def test_a_program_may_rest_while_the_tests_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    graded(CodeReward(), [RIGHT], ALL["calls"])  # probed as it is
    monkeypatch.setattr(Limits, "wall_seconds", property(lambda self: 0.5))
    idle = ["import time\nfor _ in range(4): time.sleep(0.3)\nassert add(1, 2) == 3"]
    tests = {"kind": "asserts", "entry": "add", "tests": idle}
    # The tests' own clock runs out, since they wait for nobody; with time enough they pass, the program resting.
    assert graded(CodeReward(), [RIGHT], tests) == [(0.0, "time_limit")]
    monkeypatch.setattr(Limits, "wall_seconds", property(lambda self: 0.5 if self.cpu_seconds < 2.5 else 4.0))
    allow = SandboxedProcess.allow
    monkeypatch.setattr(
        SandboxedProcess, "allow", lambda self, seconds: allow(self, 3.0 if self.asked.kind == "tests" else seconds)
    )
    assert graded(CodeReward(), [RIGHT], tests) == [(1.0, "passed")]


@pytest.mark.parametrize("name", ["bubblewrap", "sealed"])
def test_whatever_a_program_says_ends_in_a_verdict(name: str) -> None:
    if name == "bubblewrap" and needs_bubblewrap.args[0]:
        pytest.skip("bubblewrap is not installed, or not allowed here")
    said = {
        "long_integer": b'["value","[\\"i\\",\\"' + b"f" * 16387 + b'\\"]"]',
        "long_key": b'["value","[\\"d\\",[[\\"i\\",\\"' + b"f" * 16387 + b'\\"],1]]"]',
        "nested": b"[" * 100_000,
        "surrogate": b'["value","\\ud800"]',
        "no_text": b"\xff\xfe\x00",
    }
    forged = "import os\ndef add(a, b):\n    text = {!r}\n    os.write({}, {})\n    os._exit(0)"
    frame = {"sealed": (3, "len(text).to_bytes(4, 'little') + text"), "bubblewrap": (4, "text + b'\\n'")}[name]
    sources = [forged.format(text, *frame) for text in said.values()]
    with chosen(SandboxOptions(kind=name, at_once=2)):  # type: ignore[arg-type]  # one of them
        for kind in ("calls", "asserts"):
            found = graded(CodeReward(cpu_seconds=0.5), sources, ALL[kind])
            assert [score for score, _ in found] == [0.0] * len(said), found


@needs_bubblewrap
def test_a_result_that_fits_and_a_call_with_it_that_does_not() -> None:
    source = "def f(n): return '\"' * n\ndef g(text): return len(text)"
    tests = {"kind": "asserts", "entry": ["f", "g"], "tests": ["assert g(f(524284)) == 524284"]}
    sealed = graded(CodeReward(), [source], tests)
    with chosen(SandboxOptions(kind="bubblewrap", at_once=1)):
        assert graded(CodeReward(), [source], tests) == sealed


@needs_bubblewrap
def test_a_flood_of_lines_costs_the_program_its_score_and_us_no_time() -> None:
    flood = "import os\ndef add(a, b):\n    os.write(4, b'\\n' * 3_000_000)\n    return a + b"
    with chosen(SandboxOptions(kind="bubblewrap", at_once=1)):
        began = time.process_time()
        ((score, _),) = graded(CodeReward(), [flood], ALL["calls"])
        assert score == 0.0
        assert time.process_time() - began < 2


@needs_bubblewrap
def test_tests_that_draw_numbers_or_go_through_sets_ask_the_same_each_time() -> None:
    draws = [
        "import random\nfor _ in range(5):\n    a, b = random.random(), random.random()\n    assert add(a, b) == a + b",
        "for word in {'ab', 'cd', 'ef', 'gh', 'ij'}: assert add(word, '!') == word + '!'",
    ]
    tests = {"kind": "asserts", "entry": "add", "tests": draws}
    with chosen(SandboxOptions(kind="bubblewrap", at_once=2)):
        assert graded(CodeReward(), [RIGHT] * 3, tests) == [(1.0, "passed")] * 3


@needs_bubblewrap
def test_one_call_may_not_take_what_all_were_allowed_together() -> None:
    slow = """
import time
n = []
def add(a, b):
    n.append(1)
    until = time.process_time() + (len(n) == 3) * 1.2
    while time.process_time() < until: pass
    return a + b
"""
    for kind in ("sealed", "bubblewrap"):
        with chosen(SandboxOptions(kind=kind, at_once=1)):  # type: ignore[arg-type]  # one of them
            assert graded(CodeReward(cpu_seconds=0.5), [slow], ALL["calls"]) == [(0.0, "time_limit")], kind


@needs_bubblewrap
def test_time_of_children_that_nobody_waits_for_counts() -> None:
    burn = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(8):
    if os.fork() == 0:
        until = time.process_time() + 0.4
        while time.process_time() < until: pass
        os._exit(0)
    time.sleep(0.5)
"""
    with ReplaySandbox(Bubblewrap(), at_once=1) as there:
        (execution,) = there.run([Process(kind="program", source=burn, limits=Limits(cpu_seconds=1.0))])
    assert execution.exit is Exit.CPU_LIMIT


def test_a_loop_of_the_tests_does_not_end_because_the_program_says_so() -> None:
    loop = "assert all(map(lambda pair: add(*pair) == sum(pair), [(1, 2), (3, 4)]))"
    tests = {"kind": "asserts", "entry": "add", "tests": [loop]}
    raises = [f"def add(a, b): raise {error}" for error in ("StopIteration", "StopAsyncIteration", "KeyError")]
    assert graded(CodeReward(), raises, tests) == [(0.0, "raised")] * 3


def test_input_is_given_without_waiting_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where a user has many pipes open, the kernel gives further ones a page or two.
    assert processes.PIPE_BYTES <= 4096
    pipes = [os.pipe() for _ in range(200)]
    try:
        for size in (1, 4096, 4097, 70_000):
            descriptor = processes.readable(b"x" * size)
            with os.fdopen(descriptor, "rb") as file:
                assert len(file.read()) == size
    finally:
        for reader, writer in pipes:
            os.close(reader)
            os.close(writer)


def test_plain_values_that_are_read_can_be_written() -> None:
    longest = "f" * (plain.MAX_BITS // 4)
    number = plain.scalar("i", longest)
    assert plain.load(plain.dump(number)) == number
    for text in (longest + "f", "0x1" + longest, "-" + longest + "0"):
        with pytest.raises(plain.NotPlainError):
            plain.scalar("i", text)


def quickest(work: Callable[[str], object], text: str) -> float:
    """Seconds of processor time, without the garbage collector, which looks at all that other tests left."""
    return min(timeit.repeat(lambda: work(text), timer=time.process_time, repeat=3, number=1))


def refused_for_its_hashes(text: str) -> None:
    with refused("same hash", error=plain.NotPlainError):
        plain.load(text.encode())


def test_keys_that_share_a_hash_are_refused_in_no_time() -> None:
    """In a few times what reading the text takes; to make a set of these keys would take five hundred times as long."""
    same = [["i", hex(k * ((1 << 61) - 1))] for k in range(1, 20_000)]
    for written in (["s", *same], ["z", *same], ["d", *([key, None] for key in same)]):
        text = json.dumps(written)
        assert quickest(refused_for_its_hashes, text) < 50 * quickest(json.loads, text)
    numbers = set(range(-3000, 3000)) | {0.5, "a", (1, 2)}
    assert plain.load(plain.dump(numbers)) == numbers


def test_a_fence_is_found_in_linear_time() -> None:
    for text in ("```" + "a" * 300_000 + "`", "```python\n" + "`" * 300_000, ("```" + "a" * 50 + "`\n") * 5000):
        with takes(most=1):
            program_in(text)


def test_a_module_that_nobody_has_is_told_and_no_program_is_blamed() -> None:
    reward = CodeReward(modules=("numpyy",))
    with refused("module numpyy cannot be imported: ModuleNotFoundError"):
        graded(reward, [RIGHT], ALL["calls"])


def test_arguments_that_cannot_cross_are_the_tests_fault() -> None:
    for argument in ("x" * (5 << 20), list(range(300_000)), 1 << 70_000):
        tests = {"kind": "calls", "entry": "f", "cases": [{"args": [argument], "expected": 1}]}
        with refused("arg"):
            graded(CodeReward(), ["def f(x): return 1"], tests)
    assert graded(CodeReward(), [RIGHT], ALL["calls"]) == [(1.0, str(CodeOutcome.PASSED))]


def test_threads_of_a_pool_work_in_the_sealed_kind() -> None:
    source = "from concurrent.futures import ThreadPoolExecutor\nprint(list(ThreadPoolExecutor(2).map(abs, [-1, -2])))"
    with ProcessPool() as pool:
        (execution,) = pool.run([Process(kind="program", source=source)])
    assert execution.stdout == b"[1, 2]\n"


class HangsUp(RunConversation):
    """Closes its side of the channel after the first message."""

    def message(self, sandbox: Sandbox, process: StartedProcess, payload: bytes) -> None:
        assert isinstance(process, SandboxedProcess)
        process.channel.socket.shutdown(socket.SHUT_WR)


def test_a_program_whose_caller_hangs_up_ends_in_good_order() -> None:
    call = HangsUp(Process(kind="calls", source="print('printed')\ndef f(): return 1"))
    with ProcessPool() as pool:
        pool.converse([call])
    assert (call.execution.exit, call.execution.status) == (Exit.FINISHED, 0), call.execution.stderr
    assert call.execution.stdout == b"printed\n"


def test_nothing_of_this_leaves_threads_or_failures_behind() -> None:
    assert threading.active_count() < 20
    assert not isinstance(graded(CodeReward(), [RIGHT], ALL["stdio"])[0], ScoringFailure)
