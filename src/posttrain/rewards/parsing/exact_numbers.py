r"""Exact values of short mathematical answers: numbers, and tuples, sets and lists of numbers.

It reads integers (`12`, `-3`, `1,234`), decimals (`.5`, `1.50`), fractions (`3/4`, `\frac{3}{4}`), mixed numbers
(`1\frac{1}{2}`, `1 1/2`), percents (`50%` is 1/2), and these in `(…)`, `[…]`, `{…}` or separated by commas.  Currency
signs, `\left`, `\,` and the like count as blanks, and separate digits unless these come in groups of three.
Everything else is not read here.  Time is linear in the text.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

MAX_CHARACTERS = 1000
MAX_DIGITS = 300
"""Longest number that is read, so that no comparison is costly."""

Shape = Literal["value", "tuple", "set", "list", "closed", "left_open", "right_open"]


@dataclass(frozen=True, slots=True)
class ExactValue:
    """An answer's value: one number, or several in a shape."""

    shape: Shape
    numbers: tuple[Fraction, ...]

    def same(self, other: "ExactValue") -> bool:
        if self.shape != other.shape:
            return False
        if self.shape in ("set", "list"):
            return sorted(self.numbers) == sorted(other.numbers)
        return self.numbers == other.numbers


PASSED_OVER = re.compile(r"\\(?:left|right|displaystyle|quad|qquad)(?![a-zA-Z])|\\[,;!: ]|\\?\$|[~€£¥₹]")
"""Counts as a blank: `1\\quad2` is not 12."""
GAP = r"(?:\\[,;!: ]|~|\{,\}|\\!,|,\\!)"
GROUPED = re.compile(
    rf"(?<![\d.,])\d{{1,3}}(?:{GAP}\d{{3}})+(?!\d)|(?<=\d)\.\d{{3}}(?:{GAP}\d{{3}})*{GAP}\d{{1,3}}(?!\d)", re.ASCII
)
"""Digits in threes, with spaces or `{,}` between them."""
NO_DIGIT = re.compile(r"[^\d.]", re.ASCII)
DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
DECIMAL = rf"(?:{DIGITS}(?:\.\d*)?|\.\d+)"
BRACED = re.compile(r"\\[dt]?frac\s*(?:\{\s*(-?\d+)\s*\}\s*\{\s*(-?\d+)\s*\}|(\d)\s*(\d))")
NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:(?P<whole>\d+)?\s*(?P<frac>\\[dt]?frac\s*(?:\{{\s*-?\d+\s*\}}\s*\{{\s*-?\d+\s*\}}|\d\s*\d))"
    rf"|(?P<ones>\d+)\s+(?P<part>[1-9]\d*)\s*/\s*(?P<of>[1-9]\d*)"
    rf"|(?P<top>{DECIMAL})\s*/\s*(?P<bottom>{DECIMAL})|(?P<decimal>{DECIMAL}))\s*(?P<percent>\\?%)?",
    re.ASCII,
)
BRACKETS: dict[tuple[str, str], Shape] = {
    ("(", ")"): "tuple",
    ("[", "]"): "closed",
    ("(", "]"): "left_open",
    ("[", ")"): "right_open",
    ("{", "}"): "set",
}


def exact(text: str) -> ExactValue | None:
    """The value of an answer, if it is one of these."""
    if len(text) > MAX_CHARACTERS:
        return None
    plain = text
    if "\\" in text or "~" in text or "{" in text:
        plain = GROUPED.sub(lambda group: NO_DIGIT.sub("", group[0]), text)
    plain = PASSED_OVER.sub(" ", plain).strip()
    if plain.endswith(".") and not plain.endswith(".."):
        plain = plain[:-1].strip()
    value = exact_number(ungrouped(plain))
    if value is not None:
        return ExactValue("value", (value,))
    plain = plain.replace("\\{", "{").replace("\\}", "}")
    shape = BRACKETS.get((plain[:1], plain[-1:])) if len(plain) >= 2 else None
    inside = plain[1:-1] if shape else plain
    parts = [exact_number(part) for part in separated(inside)]
    if not parts or any(part is None for part in parts):
        return None
    found = tuple(part for part in parts if part is not None)
    if shape is None:
        return ExactValue("list", found)
    if len(found) == 1 and shape == "tuple":
        return ExactValue("value", found)
    return ExactValue(shape, tuple(sorted(set(found))) if shape == "set" else found)


def ungrouped(text: str) -> str:
    while len(text) >= 2 and text[0] == "{" and text[-1] == "}" and text[-2:] != "\\}":
        text = text[1:-1].strip()
    return text


def separated(text: str) -> list[str]:
    """The parts between commas with spaces or semicolons, else between any commas."""
    spaced = [part.strip() for part in re.split(r",\s+|;", text)]
    return spaced if len(spaced) > 1 else [part.strip() for part in text.split(",")]


def exact_number(text: str) -> Fraction | None:
    """The value of one number, if the text is one."""
    if len(text) > MAX_DIGITS:
        return None
    found = NUMBER.fullmatch(text.strip())
    if found is None:
        return None
    if found["frac"]:
        braced = BRACED.fullmatch(found["frac"])
        assert braced is not None, text
        top, bottom = int(braced[1] or braced[3]), int(braced[2] or braced[4])
        if bottom == 0 or (found["whole"] and (top < 0 or bottom < 0)):
            return None
        value = Fraction(int(found["whole"] or 0)) + Fraction(top, bottom)
    elif found["ones"]:
        if int(found["part"]) >= int(found["of"]):
            return None
        value = int(found["ones"]) + Fraction(int(found["part"]), int(found["of"]))
    elif found["top"]:
        bottom_value = decimal(found["bottom"])
        if bottom_value == 0:
            return None
        value = decimal(found["top"]) / bottom_value
    else:
        value = decimal(found["decimal"])
    if found["percent"]:
        value /= 100
    return -value if found["sign"] == "-" else value


def decimal(text: str) -> Fraction:
    digits = text.replace(",", "").rstrip(".") or "0"
    return Fraction(int(digits) if digits.isdecimal() else digits)  # from text it is slow
