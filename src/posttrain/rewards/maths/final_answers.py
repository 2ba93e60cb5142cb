r"""Where the final answer of a completion is: in the last box, in the last `<answer>`, or the last number."""

import re

from posttrain.rewards.maths.last_number import last_number
from posttrain.rewards.tags import ANSWER, END_ANSWER, END_THINK, THINK

BOXED = "\\boxed"


def answer_in(text: str, *, cut_off: bool = False) -> str | None:
    """The final answer of a text, or None; of a text that was cut off the last number may be part of another."""
    text = text[text.rfind(END_THINK) + len(END_THINK) :] if END_THINK in text else text
    text = text.partition(THINK)[0]
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    end = text.rfind(END_ANSWER)
    start = text.rfind(ANSWER, 0, end) if end >= 0 else -1
    if start >= 0:
        return text[start + len(ANSWER) : end]
    return None if cut_off else last_number(text)


def last_boxed(text: str) -> str | None:
    r"""What the last balanced `\boxed{…}` holds; the braces of a text are counted once."""
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
