"""Many programs through one sandbox, and many completions through a function in workers, and what they leave behind:
no process, no descriptor, no file, no growth.

python -m tests.soak --items 100000
"""

import argparse
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.options.reward import RewardOptions
from posttrain.records import Finish, Group, Prompt, Rollout, TokenSequence
from posttrain.rewards.code.code_reward import CodeReward
from posttrain.rewards.grading.answers import Graded, Score
from posttrain.rewards.grading.calls import Bounds, Call, RolloutRow, calls_for, read_result
from posttrain.rewards.grading.dispatch import dispatch
from posttrain.rewards.grading.function import RewardFunction, keywords
from posttrain.rewards.grading.resources import default_resources
from posttrain.rewards.reward_registry import load_reward
from posttrain.sandbox.execution import ServerOptions

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

FUNCTION = """
import os, subprocess, sys, time

def mine(response):
    match response:
        case "raises":
            raise ValueError("no")
        case "prints":
            print("x" * 100_000, file=open(os.devnull, "w"))
        case "starts":
            subprocess.Popen(["sleep", "600.PARENT"])
        case "ends":
            os._exit(1)
        case "hangs":
            time.sleep(600)
    return float(len(response))
"""
# How often each completion comes in five hundred; "starts" leaves a process behind, which goes with its worker.
COMPLETIONS = {"good": 480, "raises": 10, "prints": 5, "starts": 2, "ends": 2, "hangs": 1}
WORKERS = 2


@contextmanager
def temporary_files_apart() -> Iterator[None]:
    """Have temporary files of ours, and of what we start, made in a folder where nobody else makes any."""
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = None
            os.environ.pop("TMPDIR")
            os.environ |= {} if before is None else {"TMPDIR": before}


@temporary_files_apart()
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
    require_no_growth(before, state(), {"our MiB": 64, "server MiB": 16})
    return dict(outcomes)


def require_no_growth(before: dict[str, int], after: dict[str, int], allowed: dict[str, int]) -> None:
    """Fail where something has grown by more than is allowed, which is 0 for what is not named."""
    grown = {name for name in after if after[name] > before[name] + allowed.get(name, 0)}
    assert not grown, (grown, before, after)


def grade(reward: CodeReward, programs: list[tuple[str, dict[str, object]]], outcomes: Counter[str]) -> None:
    found = reward(
        completions=[f"```python\n{source}\n```" for source, _ in programs],
        finish_reasons=["stop"] * len(programs),
        tests=[tests for _, tests in programs],
    )
    outcomes.update(str(one.outcome) if isinstance(one, Graded) else "failure" for one in found)


def state() -> dict[str, int]:
    """What could grow."""
    server = default_resources().sandboxes.started_with(ServerOptions()).opened().process.pid
    return {
        "our descriptors": len(os.listdir("/proc/self/fd")),
        "server descriptors": len(os.listdir(f"/proc/{server}/fd")) if os.getuid() == 0 else 0,
        "children": len(Path(f"/proc/{server}/task/{server}/children").read_text().split()),
        "temporary files": len(os.listdir(tempfile.gettempdir())),
        "our MiB": resident("self"),
        "server MiB": resident(server),
    }


def resident(process: object) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


@temporary_files_apart()
def soak_workers(items: int, *, say: bool = False) -> dict[str, int]:
    """Ask a function in workers about so many completions, good and bad, and return how often each outcome came.

    Raises AssertionError where something is left behind.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mine.py"
        file.write_text(FUNCTION.replace("PARENT", str(os.getpid())), encoding="utf-8")
        function = load_reward(RewardOptions(path=f"{file}:mine", workers=WORKERS, item_seconds=0.25))
        five_hundred = [text for text, count in COMPLETIONS.items() for _ in range(count)]
        outcomes: Counter[str] = Counter()
        children = len(children_of_ours())
        ask(function, ["good", "ends", "hangs", "raises"] * 2, outcomes)  # what is opened once is open now
        outcomes.clear()
        before = state_of_workers(function)
        began = time.monotonic()
        for start in range(0, items, BATCH):
            ask(function, [five_hundred[i % 500] for i in range(start, min(start + BATCH, items))], outcomes)
            if say and start % (20 * BATCH) == 0:
                rate = (start + BATCH) / (time.monotonic() - began)
                print(f"{start + BATCH:>8} completions, {rate:.0f}/s, {state_of_workers(function)}", flush=True)
        ask(function, ["good"] * 100, outcomes)  # by workers that live, and are then asked much more
        alive = state_of_workers(function)
        ask(function, ["good"] * (items // 2), outcomes)
        after = state_of_workers(function)
        default_resources().pool_for(function).close()
        time.sleep(0.2)
        assert len(children_of_ours()) <= children, (children, children_of_ours())
        assert not [pid for pid in os.listdir("/proc") if pid.isdecimal() and asleep(pid)], "a process is left"
    of_workers = ("worker descriptors", "worker MiB")
    require_no_growth(before, {name: after[name] for name in after if name not in of_workers}, {"our MiB": 64})
    require_no_growth(alive, {name: after[name] for name in of_workers}, {"worker MiB": 4})
    assert min(after[name] for name in of_workers) > 0, after
    return dict(outcomes)


def ask(function: RewardFunction, texts: list[str], outcomes: Counter[str]) -> None:
    """Once about each, without the second and third try that grading would make."""
    prompt = Prompt(id="p", text="?", tokens=(1,))
    rollouts = tuple(
        Rollout(sample=i, sequence=TokenSequence.one_turn((1,), logprobs=(0.0,), finish=Finish.STOP), text=text)
        for i, text in enumerate(texts)
    )
    group = Group(prompt=prompt, draw=0, rollouts=rollouts)
    rows = tuple(RolloutRow(group, rollout) for rollout in rollouts)
    calls = calls_for(Call(function, rows, keywords(function), Bounds(may_lose=len(texts))))
    for call, result in zip(calls, dispatch(calls, default_resources()), strict=True):
        verdicts = read_result(call, result)
        one = verdicts[0] if isinstance(verdicts, list) else verdicts
        outcomes[str(one.value) if isinstance(one, Score) else type(one).__name__] += 1


def state_of_workers(function: RewardFunction) -> dict[str, int]:
    """What could grow; the workers have been replaced many times, and the number of them has not."""
    workers = [worker.process.pid for worker in default_resources().pool_for(function).workers]
    return {
        "our descriptors": len(os.listdir("/proc/self/fd")) - len(workers),
        "children": len(children_of_ours()) - len(workers),
        "temporary files": len(os.listdir(tempfile.gettempdir())),
        "our MiB": resident("self"),
        "worker descriptors": max(len(os.listdir(f"/proc/{pid}/fd")) for pid in workers) if workers else 0,
        "worker MiB": max(map(resident, workers), default=0),
    }


def children_of_ours() -> list[str]:
    """Processes that this one has started, zombies too."""
    return [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def asleep(pid: str) -> bool:
    """Whether this is a process that the function has started, whoever has taken it over since."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() == f"sleep\x00600.{os.getpid()}\x00".encode()
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=100_000)
    items = parser.parse_args().items
    print(soak(items, say=True))
    print(soak_workers(items, say=True))
    print("nothing is left behind")


if __name__ == "__main__":
    main()
