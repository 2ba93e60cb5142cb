"""A reward function for test runs, copied beside each: scores without meaning, so that a random model gets all kinds.

It can also kill the process, as a power cut would, at a moment that the file `die_before` names: an event of Python's
audit hooks, the end of the path that is about to be touched, and which time it happens.
"""

import os
import signal
import sys
from pathlib import Path
from zlib import crc32

ORDERS = Path(__file__).with_name("die_before")


def kill_at_the_named_moment(event: str, arguments: tuple[object, ...]) -> None:
    """Die just before the moment."""
    if event == moment[0] and str(arguments[0]).endswith(moment[1]) and (event != "open" or writes(arguments)):
        moment[2] -= 1
        if moment[2] == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def writes(arguments: tuple[object, ...]) -> bool:
    return bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))


def dice(completions: list[str], **columns: object) -> list[float]:
    """1 for a quarter of all texts."""
    sys.audit("dice", "call")
    return [float(crc32(text.encode("utf-8", "surrogatepass")) % 4 == 0) for text in completions]


if ORDERS.exists():
    name, path, count = ORDERS.read_text().split()
    moment = [name, path, int(count)]
    sys.addaudithook(kill_at_the_named_moment)
