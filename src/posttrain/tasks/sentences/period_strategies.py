"""What the full stops of a text are for: which ways to more of them a policy has found.

Every ASCII full stop of a text is of the first of these kinds that fits:

| kind | the full stop | for instance |
|---|---|---|
| run | has another one beside it, nothing or white space between | `...`, `. . .` |
| decimal | stands between two digits | `3.5` |
| list | ends a number that counts on: 1, or one more than the list's last | `1. bread 2. milk` |
| abbreviation | ends a known abbreviation, one capital but I, or single letters with stops | `Dr.`, `U.S.`, `p.m.` |
| sentence | comes after a letter, a digit, a closing quote or bracket | `It rained.` |
| other | has nothing of that before it | `, .` |

At most `NEAR` characters on either side are looked at.  By form alone: in `I have 1. Then it rained.` the 1 looks like
a list's, and a sentence that ends in `etc.` ends unseen.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

ABBREVIATIONS = frozenset(
    {"dr", "mr", "mrs", "ms", "prof", "st", "mt", "jr", "sr", "vs", "etc", "no", "fig", "vol", "gen", "col", "capt"}
    | {"rev", "hon", "inc", "ltd", "co", "corp", "dept", "approx", "est"}
)
"""What may come before a full stop without ending a sentence, in lower case; `No.` is `no.` too."""
DOTTED = re.compile(r"(?<![A-Za-z])[A-Za-z](?:\.[A-Za-z])+\Z|(?<![A-Za-z.])[A-HJ-Z]\Z")
"""Single letters with stops between them, or one capital but I, before a full stop."""
FIRST_OF_TWO = re.compile(r"(?<![A-Za-z])[A-Za-z]\Z")
LAST_WORD = re.compile(r"[A-Za-z]+\Z")
NUMBER = re.compile(r"(?<![\d.])\d{1,2}\Z")
NEAR = 24
"""Characters, so that the time is linear in the text whatever it is."""
CLOSING = "\"')]”’"
WORD = re.compile(r"[A-Za-z0-9]+(?:['’-][A-Za-z]+)*")


class PeriodUse(StrEnum):
    """What a full stop is for."""

    RUN = "run"
    DECIMAL = "decimal"
    LIST = "list"
    ABBREVIATION = "abbreviation"
    SENTENCE = "sentence"
    OTHER = "other"


def period_uses(text: str) -> list[PeriodUse]:
    """What each full stop of a text is for, in order."""
    found: list[PeriodUse] = []
    listed = 0
    for match in re.finditer(r"\.", text):
        before, after = text[max(0, match.start() - NEAR) : match.start()], text[match.end() : match.end() + NEAR]
        found.append(period_use(before, after, listed))
        listed = last_number(before) if found[-1] is PeriodUse.LIST else listed
    return found


def period_use(before: str, after: str, listed: int) -> PeriodUse:
    """What the full stop between two texts is for, where the last item of a list had a number (0: there was none)."""
    if before.rstrip().endswith(".") or after.lstrip().startswith("."):
        return PeriodUse.RUN
    digit_before, digit_after = before[-1:].isdigit(), after[:1].isdigit()
    if digit_before and digit_after:
        return PeriodUse.DECIMAL
    if last_number(before) in (1, listed + 1):
        return PeriodUse.LIST
    if is_abbreviated(before, after):
        return PeriodUse.ABBREVIATION
    if before and (before[-1].isalnum() or before[-1] in CLOSING):
        return PeriodUse.SENTENCE
    return PeriodUse.OTHER


def last_number(before: str) -> int:
    """The whole number of one or two digits that a text ends in; 0 where there is none."""
    number = NUMBER.search(before)
    return int(number[0]) if number else 0


def is_abbreviated(before: str, after: str) -> bool:
    """Whether what comes before a full stop is cut short by it."""
    if DOTTED.search(before) or (FIRST_OF_TWO.search(before) and re.match(r"[A-Za-z](?![A-Za-z])", after)):
        return True
    word = LAST_WORD.search(before)
    return word is not None and word[0].lower() in ABBREVIATIONS and word[0] != "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodStrategies:
    """How some texts came to their full stops, each number a mean over the texts."""

    periods: float
    """Full stops of a text."""
    uses: dict[PeriodUse, float]
    """Those of each kind; together they are all."""
    words_per_sentence: float
    """Words per sentence that ended, over all texts together; those of a last one that did not end count too.  Where no
    sentence ended, all words."""


def period_strategies(texts: Sequence[str]) -> PeriodStrategies:
    """Count the full stops of some texts, at least one, by what they are for."""
    uses = [use for text in texts for use in period_uses(text)]
    words = sum(len(WORD.findall(text)) for text in texts)
    ended = uses.count(PeriodUse.SENTENCE)
    return PeriodStrategies(
        periods=len(uses) / len(texts),
        uses={use: uses.count(use) / len(texts) for use in PeriodUse},
        words_per_sentence=words / max(ended, 1),
    )
