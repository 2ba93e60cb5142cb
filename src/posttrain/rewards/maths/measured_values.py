r"""Exact values with what may stand around them: a unit, a sign in words, a `\text{…}` around all of it.

`5 \text{ cm}`, `60 km/h`, `90^\circ`, `\text{5}`, `negative 5` and `5 million` are read.  A unit is of the list of
posttrain.rewards.maths.units; another word makes no value, unless a gold answer has it.  `percent` is no unit
but a percent sign, on either side: `5 percent` is 1/20, and neither 5 nor the answer to a row whose own is 5.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from posttrain.rewards.maths.exact_numbers import MAX_CHARACTERS, ExactValue, exact
from posttrain.rewards.maths.units import unit_of

SET_AS_TEXT = r"\\(?:text|mathrm|textrm|mbox|textbf|mathbf|textit|mathit|textsf|texttt|emph)\s*\{"
WORDS = re.compile(SET_AS_TEXT + r"([^{}]*)\}")
DEGREE = re.compile(r"\^?\s*\\degree(?![a-zA-Z])|\^\s*(?:\\circ|\{\s*\\circ\s*\})")
SIGN_IN_WORDS = re.compile(r"\s*(?:negative|minus|neg\b\.?)\s+(?=[\d.\\$(])", re.IGNORECASE)
SPACES = re.compile(r"\\[,;:! ]|~")
UNIT_START = re.compile(rf"(?P<unit>{SET_AS_TEXT}|(?<!\\)[°¢])|\\[a-zA-Z]+|(?P<letter>[^\W\d_])")
COEFFICIENT = re.compile(r"[\d)}][a-zA-Z]\s*$", re.ASCII)
"""`3m`: as a gold answer three times a letter."""
UNKNOWN_UNIT = re.compile(
    rf"[\d)}}%]\$?(?:\s+[a-zA-Z]{{3,}}[a-zA-Z ]*\}}?|(?:(?:\s|~|\\[,;:! ])*{SET_AS_TEXT}[^{{}}\d]*\}})+)[\s.$]*$",
    re.ASCII,
)
"""Words behind a gold answer's number, which may be a unit that is on no list; `3x + \\sqrt{y}` has none."""
ANOTHER_NUMBER = re.compile(r"(?<![\^_{\d])\d")
"""A digit behind words that is no power: `5 feet 3 inches`."""
PERCENT = re.compile(r"(?:per\s?cent\b|pct\b\.?|\\?%)\s*", re.IGNORECASE)
DIGITS = re.compile(r"\d[\d.,/]*")
MULTIPLIERS = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
NO_UNIT = re.compile(
    r"\b(?:hundred|thousand|million|billion|trillion|quadrillion|dozen|lakh|crore|score|gross|half|halve|third|quarter"
    r"|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|\w+teen|twentie|hundred|thousand|million)th|over|times"
    r"|more|less|fewer|least|most|or|and|not|plus|minus|root|mod|base|factorial|k|bn|mil|mio)s?\b",
    re.IGNORECASE,
)
"""Words of a gold answer that make another number of the one before them, which then is no answer without them."""


@dataclass(frozen=True, slots=True)
class Measured:
    """An exact value and its unit."""

    value: ExactValue
    unit: str = ""
    known: bool = True
    """Whether the unit is one that an answer may add."""

    @property
    def has_another_number(self) -> bool:
        """Whether the unit is none, since a number stands in it."""
        return not self.known and ANOTHER_NUMBER.search(self.unit) is not None

    def same(self, answer: "Measured") -> bool | None:
        """Whether an answer says the same; None where its words are not known and not these."""
        if answer.unit and answer.unit != self.unit:
            if not answer.known:
                return None
            if self.unit:
                return False
        return self.value.same(answer.value)


def measured(text: str) -> Measured | None:
    """The value of an answer with its unit, or None where it is not one of these."""
    value = exact(text)
    if value is not None:
        return Measured(value)
    if len(text) > MAX_CHARACTERS:
        return None
    plain = text.strip().strip("$").strip()
    whole = WORDS.fullmatch(plain)
    plain = SIGN_IN_WORDS.sub("-", whole[1] if whole else WORDS.sub(sign_as_text, plain, count=1), count=1)
    return value_with_unit(DEGREE.sub(" ° ", plain))


def sign_as_text(found: "re.Match[str]") -> str:
    r"""`\text{negative }` as words; other words as they are."""
    return f"{found[1]} " if found[1].strip().casefold() in ("negative", "minus", "neg", "neg.") else found[0]


def value_with_unit(plain: str) -> Measured | None:
    """What stands before the first letter that belongs to no command, and the unit from there on."""
    at = unit_start(plain)
    value = exact(plain[:at])
    if value is None:
        return None
    phrase = SPACES.sub(" ", WORDS.sub(r" \1 ", plain[at:])).strip()
    percent = PERCENT.match(phrase)
    if percent is not None and value.shape == "value" and "%" not in plain[:at]:
        value, phrase = ExactValue("value", (value.numbers[0] / 100,)), phrase[percent.end() :]
    if phrase.casefold() in MULTIPLIERS and value.shape == "value":
        return Measured(ExactValue("value", (value.numbers[0] * MULTIPLIERS[phrase.casefold()],)))
    unit = unit_of(phrase)
    if unit is not None:
        return Measured(value, unit)
    return Measured(value, " ".join(phrase.casefold().split()), known=False)


def unit_start(plain: str) -> int:
    """Where the unit begins; the end of the text where there is none."""
    starts = (found.start() for found in UNIT_START.finditer(plain) if found.lastgroup)
    return next(starts, len(plain))


@lru_cache(maxsize=4096)
def gold_value(gold: str) -> Measured | None:
    """A gold answer's value, which is asked about once for every completion of its group.

    Its words need not be on the list, for it is trusted; those that make another number of it are no unit of it.
    """
    found = measured(gold)
    if found is None or not found.unit:
        return found
    if NO_UNIT.search(found.unit) or COEFFICIENT.search(gold) or found.has_another_number:
        return None
    return found if found.known or UNKNOWN_UNIT.search(gold) else None


def plain_words(text: str) -> str:
    """A text with single blanks between words, digits and signs, and nothing of LaTeX around words."""
    return " ".join(SPACES.sub(" ", WORDS.sub(r" \1 ", text.strip().strip("$"))).split())


def is_compound(text: str) -> bool:
    """Whether a text is several numbers with units of the list between them: `1 hour 30 minutes`, `5 feet 4`."""
    sign, *phrases = DIGITS.split(plain_words(text))
    return (
        len(phrases) > 1
        and sign in ("", "-")
        and all(unit_of(phrase) for phrase in phrases[:-1])
        and (unit_of(phrases[-1]) is not None)
    )
