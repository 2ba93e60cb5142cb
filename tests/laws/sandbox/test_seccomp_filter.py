"""The compiled filter says of every call what the plain rules say, on both machines."""

import itertools
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

from posttrain.sandbox import inside

INSIDE = str(Path(inside.__file__).parent)
sys.path.insert(0, INSIDE)  # these files import each other as the server does
import filter as compiled  # noqa: E402

sys.path.remove(INSIDE)

ALLOW, REFUSE, ABSENT, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
OWN = 4711
MINUS = 1 << 32
VALUES = [0, 1, 2, 3, 4, 9, OWN, 0x5401, 0x5421, 1030, 0x10000, 0x3D0F00, 0x10000000, 1 << 32, (1 << 32) + 1, OWN << 32]
FLAGS = [0x20, 0x40, 0x100, 0x4000, 0x4040, 0x4001, 0x2000, 0x800, 0x8000, 17, 31, 39, 77]
"""Of sending, receiving and opening; options of a socket, SO_PEERCRED, SO_PEERSEC and SO_PEERPIDFD among them."""
CLOCKS = [7, 15, 16, 20, MINUS - 6, MINUS - 2, MINUS - 8, (~OWN << 3 | 2) & 0xFFFFFFFF, (~OWN << 3 | 6) & 0xFFFFFFFF]
""" -6 is the clock of oneself, -2 that of one's thread."""


def verdict(steps: list[tuple[int, int, int, int]], machine: int, number: int, arguments: list[int]) -> int:
    """What the kernel's interpreter of classic BPF would return."""
    data = {0: number, 4: machine}
    for index, argument in enumerate(arguments):
        data[16 + 8 * index], data[20 + 8 * index] = argument & 0xFFFFFFFF, argument >> 32
    accumulator = at = 0
    while True:
        code, true, false, value = steps[at]
        value = OWN if value == compiled.OWN_PID else value
        at += 1
        if code == compiled.RETURN:
            return value
        if code == compiled.LOAD:
            accumulator = data[value]
            continue
        taken = {
            compiled.JUMP_EQUAL: accumulator == value,
            compiled.JUMP_AT_LEAST: accumulator >= value,
            compiled.JUMP_BITS: bool(accumulator & value),
        }[code]
        at += true if taken else false


def rule(machine: str, number: int, arguments: list[int]) -> int:
    """The same in plain words."""
    names = {given: name for name, given in compiled.NUMBERS[machine].items()}
    if machine == "x86_64" and number >= compiled.X32_BIT:
        return ABSENT
    name = names.get(number, "")
    low = [argument & 0xFFFFFFFF for argument in arguments]
    if name == "clone3":
        return ABSENT
    checks = {
        "ioctl": low[1] in compiled.TERMINAL_QUERIES,
        # F_SETFL without O_ASYNC (0x2000) and O_DIRECT (0x4000 on x86-64, 0x10000 on aarch64).
        "fcntl": not low[2] & 0x16000 if low[1] == 4 else low[1] in (0, 1, 2, 3, 1030, 1032),
        "kill": low[0] == OWN,
        "tgkill": low[0] == OWN,
        "socketpair": low[0] == compiled.AF_UNIX,
        "getpgid": low[0] in (0, OWN),
        "getsid": low[0] in (0, OWN),
        "get_robust_list": low[0] in (0, OWN),
        "sched_getaffinity": low[0] in (0, OWN),
        "clock_gettime": own_clock(low[0]),
        "clock_getres": own_clock(low[0]),
        "clock_nanosleep": own_clock(low[0]),
        "getsockopt": low[2] in (3, 4, 7, 8, 30, 38, 39),
        "sendto": arguments[4] == 0 and not low[3] & ~0x4040,
        "recvfrom": not low[3] & ~0x142,
        "prlimit64": low[0] == 0 and arguments[2] == 0,
        "clone": not low[0] & compiled.NAMESPACES and bool(low[0] & compiled.CLONE_THREAD),
    }
    allowed = checks.get(name, name in compiled.ALLOWED)
    if name == "sched_getaffinity" and not allowed:
        return ABSENT
    return ALLOW if allowed else REFUSE


def own_clock(clock: int) -> bool:
    """One of the machine's, of this process, or of a thread, as the kernel looks for it in this process alone."""
    return clock < 16 or clock == 0xFFFFFFFA or bool(clock & 4)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_call_gets_the_verdict_of_the_rules(machine: str) -> None:
    steps, draw = compiled.filter_program(machine), random.Random(5)
    seen = set()
    for number in [*range(600), 0x40000000, 0x40000001, 0x7FFFFFFF, 0xFFFFFFFF]:
        for _ in range(60):
            arguments = [draw.choice([*VALUES, *FLAGS, *CLOCKS]) for _ in range(6)]
            said = verdict(steps, compiled.ARCHITECTURES[machine], number, arguments)
            assert said == rule(machine, number, arguments), (number, arguments)
            seen.add(said)
    assert seen == {ALLOW, REFUSE, ABSENT}
    assert len(steps) < 200  # its length is paid for in every child


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_call_that_is_checked_is_tried_with_every_value_in_every_place(machine: str) -> None:
    steps, numbers = compiled.filter_program(machine), compiled.NUMBERS[machine]
    every = [*VALUES, *FLAGS, *CLOCKS]
    for name in compiled.conditions():
        if name not in numbers:
            continue
        seen = set()
        for index, before, value in itertools.product(range(6), (0, 4), every):
            arguments = [0] * 6
            arguments[index - 1], arguments[index] = before, value  # F_SETFL is 4
            said = verdict(steps, compiled.ARCHITECTURES[machine], numbers[name], arguments)
            assert said == rule(machine, numbers[name], arguments), (name, arguments)
            seen.add(said)
        assert len(seen) == 2, name  # it is allowed to some and refused to others


def test_what_tells_of_others_is_on_no_list_without_a_condition() -> None:
    asks_by_pid = {"getpgid", "getsid", "sched_getaffinity", "get_robust_list", "kill", "tgkill", "prlimit64"}
    assert not (asks_by_pid | {"clock_gettime", "getsockopt", "sendto", "recvfrom", "uname"}) & set(compiled.ALLOWED)
    for machine in ("x86_64", "aarch64"):
        assert compiled.NUMBERS[machine].keys() >= (asks_by_pid | {"clock_gettime", "getsockopt", "sendto", "recvfrom"})


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_call_of_another_machine_kills(machine: str) -> None:
    steps = compiled.filter_program(machine)
    for other in (0, 0x40000003, 0xC0000028, 0xC00000B7 if machine == "x86_64" else 0xC000003E):
        assert verdict(steps, other, compiled.NUMBERS[machine]["getpid"], [0] * 6) == KILL


def test_the_tables_name_the_same_calls_and_the_files_are_ours() -> None:
    assert isinstance(compiled, ModuleType)
    assert Path(str(compiled.__file__)).parent == Path(INSIDE)
    every = {name for numbers in compiled.NUMBERS.values() for name in numbers}
    assert set(compiled.ALLOWED) <= every
