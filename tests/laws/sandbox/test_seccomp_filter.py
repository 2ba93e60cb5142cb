"""The compiled filter says of every call what the plain rules say, on both machines."""

import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

from posttrain.sandbox import inside

INSIDE = str(Path(inside.__file__).parent)
sys.path.insert(0, INSIDE)  # these files import each other as the server does
import filter as compiled  # noqa: E402
import syscalls  # noqa: E402

sys.path.remove(INSIDE)

ALLOW, REFUSE, ABSENT, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
OWN = 4711
VALUES = [0, 1, 2, 3, 4, 9, OWN, 0x5401, 0x5421, 1030, 0x10000, 0x3D0F00, 0x10000000, 1 << 32, (1 << 32) + 1, OWN << 32]


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
    names = {given: name for name, given in syscalls.NUMBERS[machine].items()}
    if machine == "x86_64" and number >= compiled.X32_BIT:
        return ABSENT
    name = names.get(number, "")
    low = [argument & 0xFFFFFFFF for argument in arguments]
    if name == "clone3":
        return ABSENT
    checks = {
        "ioctl": low[1] in compiled.TERMINAL_QUERIES,
        "fcntl": low[1] in compiled.DESCRIPTOR_COMMANDS,
        "kill": low[0] == OWN,
        "tgkill": low[0] == OWN,
        "socketpair": low[0] == compiled.AF_UNIX,
        "sendto": arguments[4] == 0,
        "prlimit64": low[0] == 0 and arguments[2] == 0,
        "clone": not low[0] & compiled.NAMESPACES and bool(low[0] & compiled.CLONE_THREAD),
    }
    allowed = checks.get(name, name in syscalls.ALLOWED)
    return ALLOW if allowed else REFUSE


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_call_gets_the_verdict_of_the_rules(machine: str) -> None:
    steps, draw = compiled.filter_program(machine), random.Random(5)
    seen = set()
    for number in [*range(600), 0x40000000, 0x40000001, 0x7FFFFFFF, 0xFFFFFFFF]:
        for _ in range(60):
            arguments = [draw.choice(VALUES) for _ in range(6)]
            said = verdict(steps, syscalls.ARCHITECTURES[machine], number, arguments)
            assert said == rule(machine, number, arguments), (number, arguments)
            seen.add(said)
    assert seen == {ALLOW, REFUSE, ABSENT}
    assert len(steps) < 200  # its length is paid for in every child


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_call_of_another_machine_kills(machine: str) -> None:
    steps = compiled.filter_program(machine)
    for other in (0, 0x40000003, 0xC0000028, 0xC00000B7 if machine == "x86_64" else 0xC000003E):
        assert verdict(steps, other, syscalls.NUMBERS[machine]["getpid"], [0] * 6) == KILL


def test_the_tables_name_the_same_calls_and_the_files_are_ours() -> None:
    assert isinstance(compiled, ModuleType)
    assert Path(str(compiled.__file__)).parent == Path(INSIDE)
    every = {name for numbers in syscalls.NUMBERS.values() for name in numbers}
    assert set(syscalls.ALLOWED) <= every
