"""Where the parts of a completion are: `<think>…</think> <answer>…</answer>`, its program and its final answer.

**Tags** are exactly these four ASCII literals; anything else (`<Think>`, `<answer >`) is text.  White space is ASCII.

- `strict`: the whole text is one `<think>…</think>`, white space, one `<answer>…</answer>`, in white space.
- `lines`: `strict`, and each of the four is on its own line, with at least one line, perhaps empty, between those of a
  pair and none between `</think>` and `<answer>`.  Lines end in a line feed; the whole may be padded with anything that
  Python's `str.strip` removes.
- `last`: the last four tags of the text are those four in that order, with only white space (or nothing) between
  `</think>` and `<answer>`.  Text and tags before them are ignored, and text after them.

In every mode, an extra tag inside or after the four breaks the structure.

**A program** is the last closed Python fence, or `<code>…</code>`, outside of the thinking.  A fence opens with a line
of three or more backticks and `python`, `py` or `python3`, and closes with a line of at least as many backticks and
nothing else.  Without such a fence or `<code>`, the last closed fence that names no language may count
(`fences="any"`): next to a program it is more likely the program's output.  Text before a first `</think>` without a
`<think>`, which was part of the prompt, and after a `<think>` that is not closed is thinking.

**A final answer** is in the last box, in the last `<answer>`, or the last number of a text.  A number is not read if it
is part of something else, as in `2^5`, `x_5`, `1e5`, `sqrt 2`, `1,234,56`, `5 million`, `≠ 5`, `at most 5`, `1 over 5`,
`5 squared`, `5!!`, `5 k`, the end of a sum, `-(5)`.  No earlier number is taken in its place.  Any minus sign right
before a number belongs to it, and so does `negative` or `minus` if it is not a subtraction; `5 1/2` is a mixed number.
A unit (`5 dollars`, `5cm`), a degree sign and asterisks (`**5**`) may be next to it.  Other words may too, unless they
make it another number: these are listed (`WORD_BEFORE`, `WORD_BEHIND`), since what people write after a number has no
end.

Reading takes time linear in any text.
"""

import re
from collections.abc import Iterator
from typing import Literal

from posttrain.options.task import FormatMode
from posttrain.rewards.parsing.exact_numbers import DECIMAL, unit_of

THINK, END_THINK, ANSWER, END_ANSWER = "<think>", "</think>", "<answer>", "</answer>"

WHITE_SPACE = " \t\n\r\f\v"

FIRST_LINE, LAST_LINE = f"{THINK}\n", f"\n{END_ANSWER}"
BETWEEN_LINES = f"\n{END_THINK}\n{ANSWER}\n"


def answer_text(text: str, mode: FormatMode) -> str | None:
    """The text between the answer tags; None without the structure."""
    start = text.rfind(THINK)
    if start < 0:
        return None
    end_think = text.find(END_THINK, start)
    answer = text.find(ANSWER, start)
    end = text.find(END_ANSWER, start)
    if not start < end_think < answer < end:
        return None
    # Each was the first of its kind after `start`; a second one anywhere after breaks the structure.
    if (
        text.find(END_THINK, end_think + 1) >= 0
        or text.find(ANSWER, answer + 1) >= 0
        or text.find(END_ANSWER, end + 1) >= 0
        or text[end_think + len(END_THINK) : answer].strip(WHITE_SPACE)
    ):
        return None
    if mode == "strict" and (text[:start].strip(WHITE_SPACE) or text[end + len(END_ANSWER) :].strip(WHITE_SPACE)):
        return None
    return text[answer + len(ANSWER) : end]


def answer_lines(text: str) -> str | None:
    """The lines between those of the answer tags; None without the structure in mode `lines`.

    The structure is a full match of `<think>\\n…\\n</think>\\n<answer>\\n…\\n</answer>` without another tag.
    """
    stripped = text.strip()
    middle = stripped.find(BETWEEN_LINES)
    opened = stripped.startswith(FIRST_LINE) and middle >= len(FIRST_LINE)
    answer = middle + len(BETWEEN_LINES)
    closed = stripped.endswith(LAST_LINE) and len(stripped) - len(LAST_LINE) >= answer
    if not (opened and closed) or answer_text(stripped, "strict") is None:
        return None
    return stripped[answer : -len(LAST_LINE)]


def after_thinking(text: str) -> str:
    """The text after the last `</think>` and before a `<think>` that is not closed."""
    return text[text.rfind(END_THINK) + len(END_THINK) if END_THINK in text else 0 :].partition(THINK)[0]


def last_answer(text: str) -> str | None:
    end = text.rfind(END_ANSWER)
    start = text.rfind(ANSWER, 0, end) if end >= 0 else -1
    return text[start + len(ANSWER) : end] if start >= 0 else None


CODE, END_CODE = "<code>", "</code>"
THOUGHT = re.compile(f"{THINK}.*?{END_THINK}|{THINK}.*", re.DOTALL)
"""The second, of one that is not closed, keeps it linear: no later one is tried."""
FENCE = re.compile(r"^ {0,3}(`{3,}+)[ \t]*+([^\s`]*+)[^\n`]*+$", re.MULTILINE)
LANGUAGES = {"python", "py", "python3"}
MAX_CHARACTERS = 100_000
"""Longest program that is run."""

Fences = Literal["any", "python"]


def program_in(text: str, fences: Fences = "any") -> str | None:
    """The program's source, if any."""
    named: str | None = None
    nameless: str | None = None
    for part in outside_thinking(text):
        closed = list(closed_fences(part))
        programs = [*((end, held) for end, language, held in closed if language in LANGUAGES), *tagged(part)]
        if programs:
            named = max(programs)[1]  # the one that ends last
        nameless = next((held for _, language, held in reversed(closed) if not language), nameless)
    return nameless if named is None and fences == "any" else named


def outside_thinking(text: str) -> list[str]:
    """The parts of a text that are not thinking, in order."""
    start, end = text.find(THINK), text.find(END_THINK)
    if end >= 0 and (start < 0 or end < start):
        text = text[end + len(END_THINK) :]
    return THOUGHT.split(text)


def closed_fences(text: str) -> Iterator[tuple[int, str, str]]:
    opened: re.Match[str] | None = None
    for fence in FENCE.finditer(text):
        ticks, language = fence.groups()
        if opened is None:
            opened = fence
        elif not language and len(ticks) >= len(opened[1]) and fence[0].strip(" \t") == ticks:
            yield fence.end(), opened[2].lower(), text[opened.end() + 1 : fence.start()]
            opened = None


def tagged(text: str) -> Iterator[tuple[int, str]]:
    at = 0
    while True:
        start = text.find(CODE, at)
        end = text.find(END_CODE, start) if start >= 0 else -1
        if end < 0:
            return
        at = end + len(END_CODE)
        yield at, text[start + len(CODE) : end]


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
