"""The corpus of mathematical answers, graded by the reward and by bare math-verify.

    python benchmarks/maths_against_math_verify.py [--seconds 10] [--only reward]

math-verify is called as its own documentation says, `verify(parse(gold), parse(completion))`, in a process that is
killed when one answer takes longer than `--seconds`: once with its time limits of 5 seconds, which need the main
thread, and once without, as anywhere else.  What deserves pay is what tests/attacks/README.md says.  The corpus was
written to find faults of this reward, which was mended until it had none left, so its score says little about other
answers; and it asks for more than math-verify promises, such as no tolerance and reading `<answer>`.
"""

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

from posttrain.rewards.math_reward import MathsReward

CORPUS = Path(__file__).parents[1] / "tests" / "attacks" / "maths.jsonl"
SHOWN = 12
SLOW_SECONDS = 4.0
WORKER = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from math_verify import parse, verify
print("ready", flush=True)
limits = sys.argv[1] == "limits"
reading, comparing = ({}, {}) if limits else ({"parsing_timeout": None}, {"timeout_seconds": None})
for line in sys.stdin:
    gold, text = json.loads(line)
    try:
        same = verify(parse(f"${gold}$", **reading), parse(text, **reading), **comparing)
        said = "right" if same else "wrong"
    except Exception as error:
        said = f"raised {type(error).__name__}"
    print(said, flush=True)
"""


@dataclass(frozen=True)
class Item:
    """One line of the corpus."""

    kind: str
    gold: str
    text: str
    finish: str
    verdict: str


def built(recipe: Any) -> str:
    """The text that a recipe stands for."""
    match recipe:
        case str():
            return recipe
        case {"repeat": [text, times]}:
            return str(text) * times
    return "".join(map(built, recipe))


def corpus() -> list[Item]:
    """All lines that have a verdict."""
    lines = [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()]
    texts = [built(line["text"]) if "text" in line else rf"\boxed{{{built(line['answer'])}}}" for line in lines]
    return [
        Item(line["kind"], line["gold"], text, line.get("finish", "stop"), line["verdict"])
        for line, text in zip(lines, texts, strict=True)
        if line["verdict"] != "unscored"
    ]


class Worker:
    """A process with math-verify in it, replaced when it was killed."""

    def __init__(self, limit: float, *, own_limits: bool) -> None:
        self.limit, self.own_limits = limit, own_limits
        self.start()

    def start(self) -> None:
        """A new process, ready to be asked."""
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, "limits" if self.own_limits else "none"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.said: Queue[str] = Queue()
        Thread(target=self.listen, args=(self.process, self.said), daemon=True).start()
        assert self.said.get(timeout=120) == "ready"

    @staticmethod
    def listen(process: "subprocess.Popen[str]", said: "Queue[str]") -> None:
        """Pass on what it says, and that it ended."""
        assert process.stdout is not None
        for line in process.stdout:
            said.put(line.strip())
        said.put("died")

    def ask(self, item: Item) -> str:
        """What math-verify says of an item: right, wrong, raised …, died, or killed."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([item.gold, item.text]) + "\n")
        self.process.stdin.flush()
        try:
            said = self.said.get(timeout=self.limit)
        except Empty:
            said = "killed"
        if said in ("killed", "died"):
            self.process.kill()
            self.process.wait()
            self.start()
        return said

    def end(self) -> None:
        """Let it go."""
        self.process.kill()
        self.process.wait()


def bare(items: list[Item], limit: float, *, own_limits: bool) -> None:
    """Report on math-verify's answers and the seconds of each."""
    worker, said, seconds = Worker(limit, own_limits=own_limits), [], []
    for item in items:
        began = time.perf_counter()
        said.append(worker.ask(item))
        seconds.append(time.perf_counter() - began)
    worker.end()
    report(f"bare math-verify {'with' if own_limits else 'without'} its time limits", items, said)
    slow = sum(each >= SLOW_SECONDS for each in seconds)
    print(f"  {sum(seconds):.0f} s in all, {slow} of {SLOW_SECONDS:g} s and more, {said.count('killed')} killed")


def ours(items: list[Item]) -> None:
    """Report on the reward's answers."""
    reward = MathsReward()
    reward(completions=[r"\boxed{\sqrt{8}}"], finish_reasons=["stop"], answer=[r"2\sqrt{2}"])  # starts the sandbox
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        grades = reward(
            completions=[item.text for item in items],
            finish_reasons=[item.finish for item in items],
            answer=[item.gold for item in items],
        )
    said = [getattr(graded, "outcome", "lost") for graded in grades]
    whole = time.perf_counter() - began
    report("the reward", items, ["right" if each == "correct" else str(each) for each in said])
    print(f"  {whole:.1f} s in all")


def report(name: str, items: list[Item], said: list[str]) -> None:
    """Counts, and the first wrong accepts."""
    accepted = [item for item, each in zip(items, said, strict=True) if each == "right" and item.verdict == "wrong"]
    missed = [item for item, each in zip(items, said, strict=True) if each != "right" and item.verdict == "right"]
    other = Counter(each for each in said if each not in ("right", "wrong"))
    print(f"\n{name}: {len(accepted)} wrong accepts, {len(missed)} wrong rejects; {dict(other.most_common())}")
    for title, found in (("wrong accepts", accepted), ("wrong rejects", missed)):
        kinds = Counter(item.kind for item in found)
        print(f"  {title} by kind: {dict(kinds.most_common())}")
        for item in found[:SHOWN]:
            print(f"    gold {item.gold[:40]}   {item.text[:70]!a}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="time for one answer in bare math-verify")
    parser.add_argument("--only", choices=["reward"], help="leave bare math-verify out")
    given = parser.parse_args()
    items = corpus()
    right = sum(item.verdict == "right" for item in items)
    print(f"{len(items)} answers, {right} that deserve pay and {len(items) - right} that do not")
    if given.only is None:
        for own_limits in (True, False):
            bare(items, given.seconds, own_limits=own_limits)
    ours(items)


if __name__ == "__main__":
    main()
