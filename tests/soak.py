"""Many programs through one sandbox, and what they leave behind: no process, no descriptor, no file, no growth.

python -m tests.soak --items 100000
"""

import argparse
import os
import tempfile
import time
from collections import Counter
from pathlib import Path

from posttrain.rewards.code import CodeReward
from posttrain.rewards.graded import Graded
from posttrain.rewards.sandbox.shared import sandbox_for

ADD = {"kind": "calls", "entry": "add", "cases": [{"args": [1, 2], "expected": 3}]}
SUM = {"kind": "stdio", "cases": [{"input": "1 2\n", "output": "3\n"}]}
CHECK = {"kind": "asserts", "entry": "add", "tests": ["assert add(1, 2) == 3"]}

# Each with its tests and how often it comes in a hundred.
PROGRAMS = (
    ("def add(a, b):\n    return a + b", ADD, 30),
    ("print(sum(map(int, input().split())))", SUM, 30),
    ("def add(a, b):\n    return a + b", CHECK, 15),
    ("def add(a, b):\n    return 1 / 0", ADD, 8),
    ("def add(a, b", ADD, 5),
    ("import os\nos.kill(os.getpid(), 9)", SUM, 4),
    ("import os\nos.fork()", SUM, 3),
    ("print('x' * 3_000_000)", SUM, 2),
    ("x = bytearray(1 << 34)", SUM, 2),
    ("while True: pass", ADD, 1),
)
BATCH = 500


def soak(items: int, *, say: bool = False) -> dict[str, int]:
    """Run them, and return how often each outcome came.  Raises AssertionError where something is left behind."""
    hundred = [(source, tests) for source, tests, count in PROGRAMS for _ in range(count)]
    reward = CodeReward(cpu_seconds=0.05)
    outcomes: Counter[str] = Counter()
    grade(reward, hundred, outcomes)  # what is opened once is open now
    outcomes.clear()
    before = state()
    began = time.monotonic()
    for start in range(0, items, BATCH):
        grade(reward, [hundred[i % 100] for i in range(start, min(start + BATCH, items))], outcomes)
        if say and start % (20 * BATCH) == 0:
            print(
                f"{start + BATCH:>8} programs, {(start + BATCH) / (time.monotonic() - began):.0f}/s, {state()}",
                flush=True,
            )
    after = state()
    assert after["our descriptors"] <= before["our descriptors"], (before, after)
    assert after["server descriptors"] <= before["server descriptors"], (before, after)
    assert after["children"] == 0, after
    assert after["temporary files"] <= before["temporary files"], (before, after)
    assert after["our MiB"] <= before["our MiB"] + 64, (before, after)
    assert after["server MiB"] <= before["server MiB"] + 16, (before, after)
    return dict(outcomes)


def grade(reward: CodeReward, programs: list[tuple[str, dict[str, object]]], outcomes: Counter[str]) -> None:
    found = reward(
        completions=[f"```python\n{source}\n```" for source, _ in programs],
        finish_reasons=["stop"] * len(programs),
        tests=[tests for _, tests in programs],
    )
    outcomes.update(str(one.outcome) if isinstance(one, Graded) else "failure" for one in found)


def state() -> dict[str, int]:
    """What could grow."""
    server = sandbox_for().opened().process.pid
    return {
        "our descriptors": len(os.listdir("/proc/self/fd")),
        "server descriptors": len(os.listdir(f"/proc/{server}/fd")) if os.getuid() == 0 else 0,
        "children": len(Path(f"/proc/{server}/task/{server}/children").read_text().split()),
        "temporary files": len(os.listdir(tempfile.gettempdir())) + len(os.listdir("/dev/shm")),
        "our MiB": resident("self"),
        "server MiB": resident(server),
    }


def resident(process: object) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=100_000)
    print(soak(parser.parse_args().items, say=True))
    print("nothing is left behind")


if __name__ == "__main__":
    main()
