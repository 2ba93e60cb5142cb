"""The corpus of mathematical answers, graded by the reward and by bare math-verify.

    python benchmarks/maths_against_math_verify.py [--seconds 10]

math-verify is called as its own documentation says, `verify(parse(gold), parse(completion))` with its time limits, in a
process that is killed when one answer takes longer than `--seconds`.  What deserves pay is what
tests/attacks/README.md says: the corpus was written against the reward, so it holds what the reward was mended for.
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

from posttrain.rewards.maths import MathsReward

CORPUS = Path(__file__).parents[1] / "tests" / "attacks" / "maths.jsonl"
SHOWN = 12
WORKER = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from math_verify import parse, verify
print("ready", flush=True)
for line in sys.stdin:
    gold, text = json.loads(line)
    try:
        said = "right" if verify(parse(f"${gold}$"), parse(text)) else "wrong"
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

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.start()

    def start(self) -> None:
        """A new process, ready to be asked."""
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
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


def bare(items: list[Item], limit: float) -> tuple[list[str], list[float]]:
    """math-verify's answers and the seconds of each."""
    worker, said, seconds = Worker(limit), [], []
    for item in items:
        began = time.perf_counter()
        said.append(worker.ask(item))
        seconds.append(time.perf_counter() - began)
    worker.end()
    return said, seconds


def ours(items: list[Item]) -> tuple[list[str], float]:
    """The reward's answers, and the seconds of all."""
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
    return ["right" if each == "correct" else str(each) for each in said], time.perf_counter() - began


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
    limit = parser.parse_args().seconds
    items = corpus()
    right = sum(item.verdict == "right" for item in items)
    print(f"{len(items)} answers, {right} that deserve pay and {len(items) - right} that do not")
    said, seconds = bare(items, limit)
    report("bare math-verify", items, said)
    slow = sum(each >= 4 for each in seconds)
    print(f"  {sum(seconds):.0f} s in all, {slow} of 4 s and more, {said.count('killed')} killed after {limit:g} s")
    told, whole = ours(items)
    report("the reward", items, told)
    print(f"  {whole:.1f} s in all")


if __name__ == "__main__":
    main()
