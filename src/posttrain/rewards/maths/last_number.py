r"""The last number of a text, where it stands by itself.

A number that is part of something else is no answer: `2^5`, `x_5`, `1e5`, `sqrt 2`, `1,234,56`, `5 million`, the end of
a sum, `-(5)`.  No earlier number is taken in its place.  A minus right before a number belongs to it, whichever of
Unicode's it is.  A unit (`5 dollars`), a degree sign and asterisks (`**5**`) may stand beside it.
"""

import re

from posttrain.rewards.maths.exact_numbers import DECIMAL

SPACE = r"(?:[^\S\n]|~|\\[,;:! ])"
LAST_NUMBER = re.compile(rf"{DECIMAL}(?:/\d+)?(?:{SPACE}?\\?%)?", re.ASCII)
TAIL = 4000
"""Characters at the end of a text in which a last number is looked for."""
NEAR = 60
"""Characters beside it that can make it part of something else."""
MINUS = "-\N{MINUS SIGN}\N{EN DASH}\N{SMALL HYPHEN-MINUS}\N{FULLWIDTH HYPHEN-MINUS}"
DASHES = "\N{HYPHEN}\N{NON-BREAKING HYPHEN}\N{FIGURE DASH}\N{EM DASH}\N{HORIZONTAL BAR}"
AS_HYPHEN = str.maketrans(dict.fromkeys(MINUS, "-"))
SIGNED = re.compile(rf"(?:(?<=[=:(\[{{$*])|(?<![^\s])){SPACE}*(-){SPACE}*\Z")
"""A minus that is no operation: nothing stands before it."""
OPERATION = r"(?:[-+*/×·÷±∓]|\*\*|\\(?:times|cdot|div|pm|mp))"
FUNCTION = r"(?:sqrt|log|ln|exp|sin|cos|tan|frac|dfrac|tfrac|binom|bar|overline|root of)"
PART_BEFORE = re.compile(
    rf"[\w^/√×·÷±∓{DASHES}-]\Z"  # `x5`, `2^5`
    rf"|\.\Z|\d[,:]\Z"  # `1.2.3`, `1,234,56`, `5:30`
    rf"|[\w)\]}}!%]{OPERATION}[({{\[]*\Z|[\w)\]}}!%]\s+{OPERATION}\s+[({{\[]*\Z"  # `2**5`, `3 - 10`
    rf"|-{SPACE}*[({{\[]+{SPACE}*\Z|\w\(\Z|[\^_}}\]]\{{\Z"  # `-(5)`, `f(5)`, `2^{{5}}`
    rf"|(?<![a-zA-Z]){FUNCTION}(?:_\w|_\{{\w+\}})?{SPACE}*[({{\[]?{SPACE}*\Z",
    re.ASCII,
)
GROUP_BEFORE = re.compile(rf"\d(?:{SPACE}|['’])\Z")
FILLER = r"(?:[\s$*~]|\\[,;:! ]|\\(?:text|textrm|textbf|mathrm|mbox)\s*\{)*"
MULTIPLIERS = "hundred|thousand|million|billion|trillion|dozen|lakh|crore"
PART_BEHIND = re.compile(
    rf"[\w⁰-₟²³¹¼-¾]|[.,]\d|[-+*/]+[\w(\\]|\^(?!\s*\{{?\s*\\circ)|{FILLER}(?:{MULTIPLIERS})s?\b"
    rf"|{SPACE}*(?:[π√]|\\(?:pi|sqrt|[dt]?frac|infty|log|ln|sin|cos|tan|pm|div)(?![a-zA-Z]))|\s+[+*/]\s+[a-z]\b"
    rf"|{SPACE}*(?:\\times|\\cdot|×|·){SPACE}*[\w(]|{SPACE}+\^",
    re.IGNORECASE | re.ASCII,
)
PRIME = re.compile(r"['’′″]")


def last_number(text: str) -> str | None:
    """The last number as text, with its sign and its percent sign; None where it is part of something else."""
    tail = text[-TAIL:].translate(AS_HYPHEN)
    numbers = list(LAST_NUMBER.finditer(tail))
    if not numbers or (numbers[-1].start() == 0 and len(text) > TAIL):
        return None
    found = numbers[-1]
    before, behind = tail[max(0, found.start() - NEAR) : found.start()], tail[found.end() : found.end() + NEAR]
    sign = SIGNED.search(before)
    if sign is not None:
        before = before[: sign.start()]
    if PART_BEFORE.search(before) or PART_BEHIND.match(behind):
        return None
    if re.match(r"\d{3}", found[0]) and GROUP_BEFORE.search(before) and sign is None:
        return None
    if PRIME.match(behind) and not PRIME.search(before[-1:]):
        return None
    return ("-" if sign else "") + found[0]
