r"""Finds the final answer of a completion: in the last box, in the last `<answer>`, or the last number.

**The last number of a text**, unless it is part of something else, as in `2^5`, `x_5`, `1e5`, `sqrt 2`, `1,234,56`,
`5 million`, `≠ 5`, `at most 5`, `1 over 5`, `5 squared`, `5!!`, `5 k`, the end of a sum, `-(5)`.  No earlier number is
taken in its place.  Any of Unicode's minus signs right before a number belongs to it, and so does `negative` or `minus`
if it is not a subtraction; `5 1/2` is a mixed number.  A unit (`5 dollars`, `5cm`), a degree sign and asterisks
(`**5**`) may be next to it.  Other words may too, unless they make it another number: these are listed (`WORD_BEFORE`,
`WORD_BEHIND`), since what people write after a number has no end.
"""

import re

from posttrain.rewards.parsing.exact_numbers import DECIMAL, unit_of
from posttrain.rewards.parsing.tags import after_thinking, last_answer

BOXED = "\\boxed"


def answer_in(text: str, *, cut_off: bool = False) -> str | None:
    """The final answer of a text, or None; if the text was cut off, its last number may be part of another."""
    text = after_thinking(text)
    boxed = last_boxed(text)
    if boxed is None:
        boxed = last_answer(text)
    return boxed if boxed is not None or cut_off else last_number(text)


def last_boxed(text: str) -> str | None:
    r"""The content of the last balanced `\boxed{…}`; braces are counted once."""
    ends: dict[int, int] = {}
    opened: list[int] = []
    for place in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if place[0] == "{":
            opened.append(place.start())
        elif place[0] == "}" and opened:
            ends[opened.pop()] = place.start()
    at = len(text)
    while (at := text.rfind(BOXED, 0, at)) >= 0:
        brace = at + len(BOXED)
        while text[brace : brace + 1] == " ":
            brace += 1
        if brace in ends:
            return text[brace + 1 : ends[brace]]
    return None


SPACE = r"(?:[^\S\n]|~|\\[,;:! ])"
LAST_NUMBER = re.compile(rf"{DECIMAL}(?:/\d+)?(?:{SPACE}?\\?%)?", re.ASCII)
TAIL = 4000
"""Characters at the end of a text that are searched for a last number."""
NEAR = 40
"""Characters around it that can make it part of something else."""
BESIDE = 20
"""Characters before it that are searched for signs."""
MINUS = "-\N{MINUS SIGN}\N{EN DASH}\N{SMALL HYPHEN-MINUS}\N{FULLWIDTH HYPHEN-MINUS}"
DASHES = "\N{HYPHEN}\N{NON-BREAKING HYPHEN}\N{FIGURE DASH}\N{EM DASH}\N{HORIZONTAL BAR}"
AS_HYPHEN = str.maketrans(dict.fromkeys(MINUS, "-"))
SIGNED = re.compile(rf"(?:(?<=[=:(\[{{$*])|(?<![^\s])){SPACE}*(-){SPACE}*\Z")
"""A minus that is a sign: it has no left operand."""
MARKS = r"(?:[\s$*~({[\"'“‘]|\\[,;:! (\[]|\\(?:text|textrm|textbf|mathrm|mathbf|mbox)\s*\{|\})*"
"""What may be between a word and a number."""
SIGN_WORD = re.compile(rf"(?<![\w-])(?:negative|minus|neg\.?)(?!\w){MARKS}\Z", re.IGNORECASE)
OPERAND = re.compile(
    r"(?:[\d\]}!%²³]|(?<![\w'’\\])(?!a\s)[a-z]|\([^()]*[+*/^-][^()]*\)|\\(?:pi|infty|theta))[^\S\n$*]*\$?[^\S\n]*\Z",
    re.ASCII,
)
"""The left operand of a minus."""
OPERATION = r"(?:[-+*/×·÷±∓⋅∗∘⊕⊗]|\*\*|\\(?:times|cdot|div|pm|mp|ast|star))"
FUNCTION = (
    r"(?:sqrt|cbrt|log|ln|lg|exp|(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|frac|dfrac|tfrac|cfrac|binom|bar|overline"
    r"|(?:root|square|cube|half|third|quarter|inverse|reciprocal|opposite|negation|negative|factorial|power|multiple"
    r"|factor|divisor|double|triple|logarithm|complement|fraction|log|co?sine|tangent) of|min|max|floor|ceil)"
)
RELATION = (
    r"(?:[<>≤≥≠≮≯≰≱≪≫⩽⩾≦≧∉∤≢≄≇≉]|[!/~]=|\\(?:leq?(?:slant)?|geq?(?:slant)?|neq?|not|lt|gt|ll|gg|nmid|notin)(?![a-z]))"
)
TAG = re.compile(r"(?<![\w)\]}])</?[a-zA-Z|][^<>\n]{0,30}>\s*\Z", re.ASCII)
WORD_BEFORE = (
    r"(?:negative|minus|plus|times|over|under|above|below|beyond|than|least|most|exceeds?|exceeding|approaches|not|never"
    r"|cannot|isn[’']?t|except|excluding|without|unless|nor|neither|twice|double|triple|thrice|half|squared|cubed"
    r"|modulo|mod|base|choose|up\s+to|to\s+the|(?:divided|multiplied|divisible|raised)\s+by"
    r"|(?<!\w)(?:one|two|three|four|five|six|seven|eight|nine|ten|twenty|thirty|forty|fifty)(?:\s+(?:and|over|by|in|of))?"
    r"|moins|menos|meno)"
)
"""Words that make the number after them another number, a bound, or no number."""
PAIRED_BEFORE = re.compile(
    rf"(?:\d[\s$*]*(?:to|through|out\s+of|of|in|by|per|or|vs\.?|x)|\d{SPACE}+:|between\s+\S+\s+and){MARKS}\Z"
    rf"|[(\[{{]\s*[-+]?[\d./]+(?:\s*,\s*[-+]?[\d./]+)*\s*,\s*[-+]?{MARKS}\Z",
    re.ASCII | re.IGNORECASE,
)
"""A first number that makes it a ratio, a range, a choice or a tuple."""
AND_BEFORE = re.compile(rf"\band{MARKS}\Z", re.IGNORECASE)
"""`5 and 1/2`."""
PART_BEFORE = re.compile(
    rf"[\wͰ-Ͽ^/√∛∜∑∏∫¬×·÷±∓⋅⁰-₟²³¹¼-¾⅐-⅟{DASHES}-]\Z"  # `x5`, `2^5`
    rf"|\.\Z|\d[,:]\Z|(?:^|\s)!\Z"  # `1.2.3`, `1,234,56`, `5:30`
    rf"|[\w)\]}}!%]{OPERATION}[({{\[]*\Z|[\w)\]}}!%]\s+{OPERATION}\s+[({{\[]*\Z"  # `2**5`, `3 - 10`
    rf"|-{SPACE}*[({{\[]+{SPACE}*\Z|\w\(\Z|[\^_}}\]]\{{\Z"  # `-(5)`, `f(5)`, `2^{{5}}`
    rf"|(?<![=-]){RELATION}=?{MARKS}\Z|=<{MARKS}\Z|[√∛∜∑∏∫¬Ͱ-Ͽ²³¼-¾⅐-⅟]{MARKS}\Z|(?:负|負|减|減|マイナス|分の|分之){MARKS}\Z",
    re.ASCII,
)
WORDS_BEFORE = re.compile(
    rf"(?<![a-zA-Z])(?:{FUNCTION}(?:_\w|_\{{\w+\}})?{MARKS}|{WORD_BEFORE}(?!\w){MARKS})\Z"
    rf"|non-?(?:negative|zero)\b{MARKS}\Z",
    re.ASCII | re.IGNORECASE,
)
GROUP_BEFORE = re.compile(rf"\d(?:{SPACE}|['’])\Z")
WHOLE_BEFORE = re.compile(r"(?:(?<=[\s=:([{$*-])|^)(\d{1,9})(?:[^\S\n]|\\[,;: ])\Z", re.ASCII)
"""The whole part of a mixed number."""
FILLER = r"(?:[^\S\n]|[$*~]|\\[,;:! ]|\\(?:text|textrm|textbf|mathrm|mbox)\s*\{)*"
MULTIPLIERS = (
    r"hundred|thousand|million|billion|trillion|quadrillion|dozen|score|gross|lakh|crore|mille|milliards?|mil|mio|bn"
    r"|tausend|millionen|milliarden|millones|milh(?:ão|ões)"
)
FRACTIONS = (
    r"half|halve|third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth|\w+teenth|\w+tieth"
    r"|hundredth|thousandth|millionth|billionth"
)
WORD_BEHIND = (
    rf"(?:{MULTIPLIERS}|{FRACTIONS})s?\b|(?:squared|cubed|factorial|doubled|tripled|halved|inverted|negated|choose|mod|modulo"
    r"|plus|minus|divided|multiplied|to\s+the\s+(?:power|\w+th|minus|negative)|raised|over\s+(?:\w\b|\\|the\s+square)"
    r"|times\s+(?:\w\b(?!\s*\w{2})|\\|ten\b|the\s+(?:square|cube|number))|and\s+(?:a|an|one|two|three|more|above|up)\b|or\s+(?:more|less|fewer"
    r"|greater|higher|lower|above|below|under|over|so|not)|(?:at|or)\s+(?:least|most)|per\s*(?:mille|thousand|million)"
    r"|pi|tau|reciprocal|inverse|opposite|(?:degrees?\s+)?(?:\w+\s+)?(?:below|under)\s+zero"
    r"|less\s+than|more\s+than|in\s+base|base)\b|,?\s*(?:is|was|are)(?:\s+(?:not|wrong|incorrect|false|impossible|too)\b|n[’']t\b)"
)
"""Words that make the number before them another number, a bound, or no number."""
LETTER_BEHIND = rf"(?:{SPACE}|\$)+(?!(?-i:[msghdtlLNJWVACF])\b|(?-i:[aAI])\s+\w)[a-z](?![\w'’]|\.\w)"
"""`5 k` and `5 i`; units of one letter and the words `a` and `I` may follow."""
PART_BEHIND = re.compile(
    rf"(?:°|{SPACE})*[CF]?{SPACE}*(?:below|under)\s+zero|[\wͰ-Ͽ⁰-₟²³¹¼-¾⅐-⅟‰‱万萬亿億兆千百十만억천割成]|[.,]\d|[-+*/]+[\w(\\]|\^(?!\s*\{{?\s*\\circ)|!!|{FILLER}(?:{WORD_BEHIND})"
    rf"|{SPACE}*(?:[π√∛⅐-⅟¼-¾Α-Ωα-λν-ω]|\\(?:pi|sqrt|[dt]?frac|infty|log|ln|sin|cos|tan|pm|div)(?![a-zA-Z]))|\s+[+*/]\s+[a-z]\b"
    rf"|{SPACE}*(?:\\times|\\cdot|×|·){SPACE}*[\w(]|{SPACE}+\^|{LETTER_BEHIND}"
    rf"|{SPACE}*\$?{SPACE}*(?!<[/a-zA-Z|][^<>\n]{{0,30}}>){RELATION}(?![=-]?>)",
    re.IGNORECASE | re.ASCII,
)
PERCENT_BEHIND = re.compile(rf"{FILLER}(?:\\?%|(?:per\s?cent|pct)\b)", re.IGNORECASE)
PRIME = re.compile(r"['’′″]")
UNIT_POWER = re.compile(
    r"(\d\s?(?:\\[,;:! ]|\\(?:text|mathrm)\s?\{\s?)*([a-zA-Z]{1,12})\s?\}?)\s?\^\s?\{?[23]\}?(?![\w^])", re.ASCII
)
"""`12 cm^2`, whose 2 is not a last number."""
ATTACHED = re.compile(r"(?:µ|μ)?[a-zA-Z]{2,12}(?:/[a-zA-Z]{1,12})?(?![\w^/²³])", re.ASCII)


def last_number(text: str) -> str | None:
    """The last number as text, with its sign and percent sign; None if it is part of something else."""
    tail = text[-TAIL:].translate(AS_HYPHEN)
    if "^" in tail:
        tail = UNIT_POWER.sub(without_power, tail)
    numbers = list(LAST_NUMBER.finditer(tail))
    if not numbers or (numbers[-1].start() == 0 and len(text) > TAIL):
        return None
    found = numbers[-1]
    before, behind = tail[max(0, found.start() - NEAR) : found.start()], tail[found.end() : found.end() + NEAR]
    before = TAG.sub("", before) if before.rstrip().endswith(">") else before
    whole = WHOLE_BEFORE.search(before) if "/" in found[0] else None
    if whole is not None:
        before = before[: whole.start()]
    sign = SIGNED.search(before) or SIGN_WORD.search(before)
    if sign is not None:
        before = before[: sign.start()]
        if OPERAND.search(before):
            return None
    percent = None if found[0].endswith("%") else PERCENT_BEHIND.match(behind)
    if percent is not None:
        behind = behind[percent.end() :]
    if PART_BEFORE.search(before[-BESIDE:]) or WORDS_BEFORE.search(before) or PAIRED_BEFORE.search(before):
        return None
    unit = ATTACHED.match(behind)  # an attached unit makes it no part of something else
    start = unit.end() if unit is not None and unit_of(unit[0]) else 0
    if PART_BEHIND.match(behind[start:]) or ("/" in found[0] and AND_BEFORE.search(before)):
        return None
    if re.match(r"\d{3}", found[0]) and GROUP_BEFORE.search(before) and sign is None:
        return None
    if PRIME.match(behind) and not PRIME.search(before[-1:]):
        return None
    return ("-" if sign else "") + (f"{whole[1]} " if whole else "") + found[0] + ("%" if percent else "")


def without_power(found: "re.Match[str]") -> str:
    named = len(found[2]) > 1 or "{" in found[1]
    return found[1] if named and unit_of(found[2]) else found[0]
