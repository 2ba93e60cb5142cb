"""The tags of a reasoning completion, `<think>…</think> <answer>…</answer>`, and the three modes of reading them.

Tags are these four ASCII literals, letter for letter; anything else (`<Think>`, `<answer >`, `< /think>`) is text.
White space is ASCII white space: space, tab, line feed, carriage return, form feed, vertical tab.

- `strict`: the whole text is one `<think>…</think>`, white space, one `<answer>…</answer>`, in white space.  No other
  tag occurs.
- `lines`: `strict`, and each of the four is a line of its own, with a line, which may be empty, between those of a pair
  and none between `</think>` and `<answer>`.  Lines end in a line feed; what Python's `str.strip` takes off may stand
  around the whole.
- `last`: the last four tags of the text are those four in that order, with only white space (or nothing) between
  `</think>` and `<answer>`.  Text and tags before them are ignored, and text after them.

In all, a tag too many inside or after the four breaks the structure.  Reading takes a fixed number of plain
substring searches, so its time is linear in the text whatever the text holds.
"""

from posttrain.options.countdown import FormatMode

THINK, END_THINK, ANSWER, END_ANSWER = "<think>", "</think>", "<answer>", "</answer>"

WHITE_SPACE = " \t\n\r\f\v"

FIRST_LINE, LAST_LINE = f"{THINK}\n", f"\n{END_ANSWER}"
BETWEEN_LINES = f"\n{END_THINK}\n{ANSWER}\n"


def answer_text(text: str, mode: FormatMode) -> str | None:
    """What stands between the answer tags, as written; None where the text lacks the structure."""
    start = text.rfind(THINK)
    if start < 0:
        return None
    end_think = text.find(END_THINK, start)
    answer = text.find(ANSWER, start)
    end = text.find(END_ANSWER, start)
    if not start < end_think < answer < end:
        return None
    # Each was the first of its kind after `start`; a second one anywhere behind breaks the structure.
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
    """The lines between those of the answer tags; None where the text lacks the structure on lines of its own.

    It is what `<think>\\n…\\n</think>\\n<answer>\\n…\\n</answer>` matches as a whole, less what holds another tag.
    """
    stripped = text.strip()
    middle = stripped.find(BETWEEN_LINES)
    opened = stripped.startswith(FIRST_LINE) and middle >= len(FIRST_LINE)
    answer = middle + len(BETWEEN_LINES)
    closed = stripped.endswith(LAST_LINE) and len(stripped) - len(LAST_LINE) >= answer
    if not (opened and closed) or answer_text(stripped, "strict") is None:
        return None
    return stripped[answer : -len(LAST_LINE)]


def gives_answer(text: str) -> bool:
    """Whether an `<answer>` is followed, anywhere later, by an `</answer>`."""
    answer = text.find(ANSWER)
    return answer >= 0 and text.find(END_ANSWER, answer) >= 0
