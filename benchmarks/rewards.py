"""How many programs the sandbox runs and how many completions the graders grade in a second.

    python benchmarks/rewards.py

Every line is the best of three.  The sandbox is held against a fresh interpreter for each program, and against one
inside bubblewrap where that is installed; all of them run the same program with the same modules imported.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from time import perf_counter

from posttrain.rewards.countdown import countdown
from posttrain.rewards.math_reward import MathsReward
from posttrain.rewards.shaping import strict_format
from posttrain.sandbox.backends import Bubblewrap
from posttrain.sandbox.execution import FEW, MANY, Process, ServerOptions
from posttrain.sandbox.process_pool import ProcessPool
from posttrain.sandbox.replay_sandbox import ReplaySandbox

PROGRAM = "a, b = map(int, input().split())\nprint(a + b)\n"
GIVEN = b"19 23\n"
BUBBLEWRAP = ["bwrap", "--ro-bind", "/", "/", "--unshare-all", "--die-with-parent", "--proc", "/proc", "--dev", "/dev"]
REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000, help="programs in each repetition of the sandbox")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}")
    rates = {}
    for name, modules in ((f"{len(FEW)} modules", FEW), (f"{len(MANY)} modules", MANY)):
        for cores in (1, os.cpu_count() or 1):
            rates[name, cores] = sandbox(modules, cores, options.programs)
            print(f"sandbox, {name}, {cores} core(s): {rates[name, cores]:,.0f} programs/s")
    few = f"{len(FEW)} modules"
    fresh = [sys.executable, "-I", "-S", "-B", "-c", f"import {', '.join(FEW)}\n{PROGRAM}"]
    beside(rates[few, 1], "a fresh interpreter", fresh)
    if not shutil.which("bwrap"):
        print("bubblewrap is not installed: not compared")
    else:
        beside(rates[few, 1], "a fresh interpreter in bubblewrap", [*BUBBLEWRAP, *fresh])
        whole = os.cpu_count() or 1
        print(f"sandbox.kind: bubblewrap, {whole} core(s): {in_bubblewrap(whole):,.0f} programs/s")
    graders()


def in_bubblewrap(cores: int) -> float:
    """Programs in a second where every one gets a small system of its own; nothing is imported beforehand."""
    with ReplaySandbox(Bubblewrap(), at_once=cores) as there:
        there.probe()
        asked = [Process(kind="program", source=PROGRAM, stdin=GIVEN)] * 40
        return best(lambda: there.run(asked), len(asked))


def sandbox(modules: tuple[str, ...], cores: int, count: int) -> float:
    """Programs in a second on so many cores, the pool's own work included."""
    whole = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(whole)[:cores]))
    try:
        with ProcessPool(ServerOptions(modules=modules), at_once=2 * cores) as pool:
            asked = [Process(kind="program", source=PROGRAM, stdin=GIVEN)] * count
            outputs = {execution.stdout for execution in pool.run(asked)}
            assert outputs == {b"42\n"}, outputs
            return best(lambda: pool.run(asked), count)
    finally:
        os.sched_setaffinity(0, whole)


def beside(rate: float, name: str, command: list[str]) -> None:
    """The same program by another way, one at a time on one core."""
    whole = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(whole)})
    try:
        other = best(lambda: subprocess.run(command, input=GIVEN, stdout=subprocess.DEVNULL, check=True), 1, repeats=20)
    finally:
        os.sched_setaffinity(0, whole)
    print(f"{name}: {other:,.0f} programs/s; the sandbox runs {rate / other:.1f} times as many")


def graders() -> None:
    """Countdown, format and exact maths, per second on one core."""
    thought = "<think>" + "12 + 7 = 19, and 19 - 4 = 15 . " * 8 + "</think> <answer>12 + 7 - 4</answer>"
    count = 10_000
    finish = ["stop"] * count
    columns = {"numbers": [[12, 7, 4]] * count, "target": [15] * count}
    rate = best(lambda: countdown(completions=[thought] * count, finish_reasons=finish, **columns), count)
    print(f"countdown: {rate:,.0f}/s")
    rate = best(lambda: strict_format(completions=[thought] * count, finish_reasons=finish), count)
    print(f"format: {rate:,.0f}/s")
    boxed = "So the probability is $\\boxed{\\frac{3}{4}}$."
    maths = MathsReward(symbolic=False)
    rate = best(lambda: maths(completions=[boxed] * count, finish_reasons=finish, answer=["0.75"] * count), count)
    print(f"maths, exact: {rate:,.0f}/s")
    slow = MathsReward()
    hard = [f"\\boxed{{\\sqrt{{{number}}} + x}}" for number in range(100)]
    golds = [f"x + \\sqrt{{{number}}}" for number in range(100)]
    try:
        rate = best(lambda: slow(completions=hard, finish_reasons=finish[:100], answer=golds), 100)
    except ValueError as error:
        print(f"maths, symbolic: not measured ({str(error).splitlines()[0]})")
    else:
        print(f"maths, symbolic, in the sandbox: {rate:,.0f}/s on all cores")


def best(call: Callable[[], object], count: int, *, repeats: int = REPEATS) -> float:
    """Items in a second, in the best repetition."""
    seconds = []
    for _ in range(repeats):
        start = perf_counter()
        call()
        seconds.append(perf_counter() - start)
    return count / min(seconds)


if __name__ == "__main__":
    main()
