"""The sandbox works the same as root, as an ordinary user, and under a seccomp profile like Docker's default."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.sandbox import inside
from tests.support.sandboxes import needs_bubblewrap

ROOT = Path(__file__).parents[3]
INSIDE = Path(inside.__file__).parent

RUN = """
from posttrain.sandbox.process_pool import ProcessPool
from posttrain.sandbox.execution import Process
with ProcessPool() as pool:
    (execution,) = pool.run([Process(kind="program", source="import os; print(os.getuid(), sum(range(10)))")])
    print(execution.stdout.decode().strip(), all(finding.passed for finding in pool.found))
"""

IN_BUBBLEWRAP = """
from posttrain.sandbox.replay_sandbox import ReplaySandbox
from posttrain.sandbox.backends import Bubblewrap
from posttrain.sandbox.probes import SandboxUnavailable
with ReplaySandbox(Bubblewrap(), at_once=2) as there:
    try:
        there.probe()
    except SandboxUnavailable as unavailable:
        print("unavailable" if "Remedy: bubblewrap" in str(unavailable) else unavailable)
    else:
        print(len(there.found), all(finding.passed for finding in there.found))
"""

DOCKER_LIKE = """
import ctypes, errno, os, platform, sys
sys.path.insert(0, INSIDE)
import filter as bpf
import lockdown
from filter import ARCHITECTURES
sys.path.remove(INSIDE)
machine = platform.machine()
denied = {
    "x86_64": [165, 166, 155, 272, 308, 246, 320, 175, 313, 176, 250, 248, 249, 321, 298, 323, 310, 311, 169, 163],
    "aarch64": [40, 39, 41, 97, 268, 104, 294, 105, 273, 106, 219, 217, 218, 280, 241, 282, 270, 271, 142, 89],
}[machine]
clone, clone3 = {"x86_64": (56, 435), "aarch64": (220, 435)}[machine]
refuse = bpf.REFUSE | errno.EPERM
steps = [(bpf.LOAD, 0, 0, 4), (bpf.JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]), (bpf.RETURN, 0, 0, bpf.KILL)]
steps += [(bpf.LOAD, 0, 0, 0)]
for number in denied:
    steps += [(bpf.JUMP_EQUAL, 0, 1, number), (bpf.RETURN, 0, 0, refuse)]
steps += [(bpf.JUMP_EQUAL, 0, 1, clone3), (bpf.RETURN, 0, 0, bpf.REFUSE | errno.ENOSYS)]
steps += [(bpf.JUMP_EQUAL, 0, 3, clone), (bpf.LOAD, 0, 0, 16), (bpf.JUMP_BITS, 0, 1, bpf.NAMESPACES)]
steps += [(bpf.RETURN, 0, 0, refuse)]
steps += [(bpf.RETURN, 0, 0, bpf.ALLOW)]
code = (bpf.Instruction * len(steps))(*[bpf.Instruction(*step) for step in steps])
program = bpf.Program(len(steps), code)
lockdown.prctl(lockdown.PR_SET_NO_NEW_PRIVS, 1)
lockdown.prctl(lockdown.PR_SET_SECCOMP, lockdown.SECCOMP_MODE_FILTER, ctypes.addressof(program))
if lockdown.libc.unshare(0x10000000) == 0:
    raise SystemExit("the profile does not hold")
"""

ORDINARY_USER = """
import os
os.setgroups([]); os.setresgid(54321, 54321, 54321); os.setresuid(54321, 54321, 54321)
"""


def said(source: str, python: str = sys.executable, *, run: str = RUN) -> str:
    """What a fresh interpreter prints."""
    command = [python, "-B", "-c", f"INSIDE = {str(INSIDE)!r}\n{source}\n{run}"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


OWN_UID = 65534 if os.getuid() == 0 else os.getuid()


@pytest.mark.parametrize("profile", ["", DOCKER_LIKE], ids=["none", "like Docker's default"])
def test_as_whoever_runs_the_tests_under_any_profile(profile: str) -> None:
    assert said(profile) == f"{OWN_UID} 45 True"


def open_to_all(path: Path) -> bool:
    return path.exists() and all(folder.stat().st_mode & 0o001 for folder in path.resolve().parents)


@pytest.fixture
def python() -> str:
    """An interpreter that an ordinary user can read: root's own may lie in a folder of root's."""
    if os.getuid() != 0:
        pytest.skip("the tests run as an ordinary user already")
    version = "import sys; print(sys.version_info >= (3, 11))"
    for candidate in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        if open_to_all(Path(candidate)) and open_to_all(ROOT / "src"):
            told = subprocess.run([candidate, "-c", version], capture_output=True, text=True, check=True).stdout
            if told == "True\n":
                return candidate
    pytest.skip("no interpreter, or no source folder, that an ordinary user can read")


def test_as_an_ordinary_user(python: str) -> None:
    assert said(ORDINARY_USER, python) == "54321 45 True"


@needs_bubblewrap
def test_bubblewrap_as_an_ordinary_user(python: str) -> None:
    assert said(ORDINARY_USER + "os.chdir('/')\n", python, run=IN_BUBBLEWRAP) == "16 True"


@needs_bubblewrap
def test_bubblewrap_where_namespaces_are_refused_says_what_it_needs() -> None:
    assert said(DOCKER_LIKE, run=IN_BUBBLEWRAP) == "unavailable"
