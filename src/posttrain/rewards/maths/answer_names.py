r"""Gold answers that are names: `\text{Monday}`, `Paris`, `ABC`.  They are compared as text, letter case aside.

So are several numbers with their units, `1 hour 30 minutes`, of which the first alone is another answer.

To a reader of mathematics letters side by side are a product, in which order does not count: `act` would be `cat`.
"""

import re
from functools import lru_cache

from posttrain.rewards.maths.measured_values import WORDS, is_compound, plain_words

SET_NAME = re.compile(r"[^\d\\^_=<>+*/$|{}]*[^\W\d_][^\d\\^_=<>+*/$|{}]*")
BARE_NAME = re.compile(r"[^\W\d_]+(?:[ -][^\W\d_]+)*")
LONG_WORD = re.compile(r"[^\W\d_]{3,}|[A-Z]{2,}|^[A-Z]$|[^\W\d_a-zA-Z]{2,}")
LETTERS_ALONE = re.compile(r"(?:[^\W\d_]|[\s~.()]|\\[,;:! ])*")


@lru_cache(maxsize=4096)
def gold_name(gold: str) -> tuple[str, bool] | None:
    r"""A gold answer's name, and whether it is set as text; None where it is no name.

    Bare letters are one from three on, or where they are capitals: `xy` is a product, `B` the second choice.
    """
    text = gold.strip().strip("$").strip()
    if is_compound(text):
        return plain_name_of(text), True
    whole = WORDS.fullmatch(text)
    if whole is not None:
        return (plain_name_of(text), True) if SET_NAME.fullmatch(whole[1]) else None
    if BARE_NAME.fullmatch(text) and ("-" not in text or len(text) > len("a-b-c")) and LONG_WORD.search(text):
        return plain_name_of(text), False
    return None


def plain_name_of(text: str) -> str:
    """A name without what may stand around it, and a longer one without letter case."""
    plain = text.strip().strip("$*").strip()
    name = " ".join(plain_words(plain).strip(" .()").split())
    return name.casefold() if len(name) > 1 else name


def same_name(answer: str, gold: str) -> bool | None:
    """Whether an answer is the gold answer's name; None where that has none, or the answer may say it otherwise."""
    name = gold_name(gold)
    if name is None:
        whole = WORDS.fullmatch(answer.strip())
        return True if whole and whole[1].strip() == gold.strip() else None
    said = plain_name_of(answer)
    if said == name[0]:
        return True
    if name[1]:
        return False
    if LETTERS_ALONE.fullmatch(answer.strip().strip("$*")) or WORDS.fullmatch(answer.strip()):
        return said.replace(" ", "") == name[0].replace(" ", "")
    return None
