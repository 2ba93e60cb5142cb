"""The same votes in a terminal: a pair, one above the other, and a key for what is better."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from posttrain.commands.collection.ballot import Ballot, ShownPair
from posttrain.runs.progress import visible

KEYS = {"1": "left", "2": "right", "t": "tie", "s": "skip"}
HELP = "1 A is better   2 B is better   t tie   s skip   u undo   q end"
AT_THE_END = "Every pair is judged.  u takes the last vote back; anything else ends."


def ask_in_terminal(ballot: Ballot, question: str) -> None:
    print(HELP)
    with ended_by_interrupt():
        while True:
            pair = ballot.current()
            progress = f"{ballot.num_done} of {ballot.num_pairs} judged by {ballot.rater}"
            print(AT_THE_END if pair is None else pair_text(pair, question, progress))
            key = typed_key()
            if key == "u":
                print("taken back" if ballot.undo() else "there is no vote to take back")
            elif key == "q" or pair is None:
                return
            elif key in KEYS:
                ballot.vote(pair.id, KEYS[key])
            else:
                print(f"{visible(key[:20])!r} is none of them: {HELP}")


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """Have Ctrl-C end the questions at once: no vote is lost, and waiting for a line would see no flag."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        print()
    finally:
        signal.signal(signal.SIGINT, before)


def typed_key() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip().lower()
    except EOFError:
        return "q"


def pair_text(pair: ShownPair, question: str, progress: str) -> str:
    """A pair as text that cannot steer the terminal: control characters and marks of direction are written out.

    Every line of a model's has a bar before it, so that none can pass for one of ours.
    """
    parts = (("Prompt", pair.question), ("A", pair.left), ("B", pair.right))
    shown = [line for name, text in parts for line in (name, *barred(text))]
    return "\n".join(["", progress, *shown, visible(question)])


def barred(text: str) -> list[str]:
    """The lines of a text, safe to print, each with a bar before it."""
    return [f"  | {line}" for line in visible(text).split("\n")]
