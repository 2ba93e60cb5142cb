"""A reward function for test runs, copied beside each: scores without meaning, so that any model gets all kinds."""

import sys
from zlib import crc32


def dice(completions: list[str], **columns: object) -> list[float]:
    """1 for a quarter of all texts.  Its calls can be told from outside: see `accidents.py`."""
    sys.audit("dice", "call")
    return [float(crc32(text.encode("utf-8", "surrogatepass")) % 4 == 0) for text in completions]
