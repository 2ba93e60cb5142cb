"""What graders read in a completion: the answer's span, the program with its failing test, marked spans.

For built-in reward functions, the same parsers read it again, without grading: the scores are the run's.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from posttrain.rewards.parsing.tags import (
    ANSWER,
    BOXED,
    END_ANSWER,
    END_THINK,
    THINK,
    after_thinking,
    answer_in,
    answer_lines,
    answer_text,
    last_answer,
    last_boxed,
    program_in,
)
from posttrain.runs.progress import visible
from posttrain.viewer.folder_files import json_number, mapping
from posttrain.viewer.rollout_responses import TextSpan

Place = tuple[int, int]
MOST_CHARACTERS = 200_000
"""Maximum characters of a completion that is read again."""
MOST_SAID = 2000


def answer_by_tags(text: str) -> Place | None:
    """The answer of the last `<think>…</think> <answer>…</answer>`; strict, by lines or with text around it."""
    found = answer_lines(text) or answer_text(text, "last")
    if found is None:
        return None
    start = text.find(ANSWER, text.rfind(THINK)) + len(ANSWER)
    return (start, text.find(END_ANSWER, start))


def final_answer(text: str) -> Place | None:
    """The last box, the last answer in tags, or the last number."""
    found = answer_in(text)
    if not found:
        return None
    framed = ((f"{{{found}}}", 1), (f"{ANSWER}{found}{END_ANSWER}", len(ANSWER)), (found, 0))
    for frame, before in framed if BOXED in text else framed[1:]:
        if (at := text.rfind(frame)) >= 0:
            return (at + before, at + before + len(found))
    return None


def closing_answer(text: str) -> Place | None:
    """After the thinking: the last answer in tags, else the last box, else everything."""
    start, after = text.rfind(END_THINK) + len(END_THINK) if END_THINK in text else 0, after_thinking(text)
    if (found := last_answer(after)) is not None:
        before, behind = ANSWER, END_ANSWER
    elif (found := last_boxed(after)) is not None:
        before, behind = "{", "}"
    else:
        found, before, behind = after, "", ""
    start += after.rfind(before + found + behind) + len(before) + len(found) - len(found.lstrip())
    return (start, start + len(found.strip())) if found.strip() else None


def program_place(text: str) -> Place | None:
    found = program_in(text)
    at = -1 if not found else text.rfind(found)
    return None if found is None or at < 0 else (at, at + len(found))


READS: dict[str, tuple[Literal["answer", "test"], Callable[[str], Place | None]]] = {
    **dict.fromkeys(("countdown", "countdown_last", "countdown_credit", "countdown_steps"), ("answer", answer_by_tags)),
    **dict.fromkeys(("strict_format", "last_format", "line_format", "graded_format"), ("answer", answer_by_tags)),
    **dict.fromkeys(("math", "maths"), ("answer", final_answer)),
    **dict.fromkeys(("exact_match", "generated"), ("answer", closing_answer)),
    **dict.fromkeys(("code", "code_course"), ("test", program_place)),
}
"""By reward function: what its span is, and where it is."""


def text_spans(graded: str, row: Mapping[str, Any], details: Mapping[str, object]) -> tuple[list[TextSpan], list[str]]:
    """Spans in the graded text, and notes without a position; `details` has what functions logged, by function."""
    spans: list[TextSpan] = []
    notes: list[str] = []
    functions = [name.partition("/")[2] for name in row if name.startswith(("score/", "outcome/"))]
    for function in dict.fromkeys(functions):
        outcome, said = row.get(f"outcome/{function}") or "", mapping(details.get(function))
        shown = [*([outcome.replace("_", " ")] if outcome else []), *details_lines(said, row.get("columns") or "")]
        read = READS.get(function)
        reads = read is not None and len(graded) <= MOST_CHARACTERS and outcome != "truncated"
        place = read[1](graded) if read is not None and reads else None
        if read is not None and place is not None:
            start, end = place
            says, value = "; ".join(shown) or "what it read", json_number(row.get(f"score/{function}"))
            spans.append(TextSpan(function=function, kind=read[0], start=start, end=end, says=says, value=value))
        elif shown:
            notes.append(f"{function}: {'; '.join(shown)}")
        spans += marked_spans(function, row.get(f"marks/{function}"))
        spans += quoted_spans(function, said, graded)
    return spans, notes


def details_lines(said: Mapping[str, object], columns: str) -> list[str]:
    """What a grader logged about a completion: failed tests, or a judge's words."""
    lines = []
    listed = said.get("tests")
    tests = listed if isinstance(listed, list) else []
    for at, test in enumerate(tests):
        outcome = mapping(test).get("outcome")
        if outcome != "passed":
            lines.append(f"test {at + 1} of {len(tests)}: {outcome}{of_test(columns, at)}")
    if isinstance(reply := said.get("reply"), str):
        lines.append(f"the judge: {reply[:MOST_SAID]}")
    others = {name: value for name, value in said.items() if name not in ("tests", "reply")}
    return [*lines, *(f"{name} = {json.dumps(value)[:200]}" for name, value in others.items())]


def of_test(columns: str, at: int) -> str:
    """The text of a test in the dataset's row, if any."""
    try:
        held = json.loads(columns).get("tests")
        held = json.loads(held) if isinstance(held, str) else held
        cases = held.get("tests") or held.get("cases")
        return f" in {visible(json.dumps(cases[at], ensure_ascii=False)[:300])}"
    except (ValueError, AttributeError, LookupError, TypeError, RecursionError):
        return ""


def marked_spans(function: str, marks: object) -> list[TextSpan]:
    """Spans that a function marked, from the JSON in its column; one of value 0 only shows what it read."""
    try:
        spans = json.loads(marks)["spans"] if isinstance(marks, str) else []
        return [
            TextSpan(
                function=function,
                kind="mark",
                start=int(start),
                end=int(end),
                says="" if value else "what it read",
                value=json_number(value) if value else None,
            )
            for start, end, value in spans
        ]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []


def quoted_spans(function: str, said: Mapping[str, object], graded: str) -> list[TextSpan]:
    """Quotes from the completion in a judge's words, marked in the completion."""
    reply = said.get("reply")
    if not isinstance(reply, str):
        return []
    spans = []
    for quote in reply[:MOST_SAID].replace("“", '"').replace("”", '"').split('"')[1::2]:
        at = graded.find(quote) if len(quote) >= 4 else -1
        if at >= 0:
            says = "the judge quotes it"
            spans.append(
                TextSpan(function=function, kind="judge", start=at, end=at + len(quote), says=says, value=None)
            )
    return spans


def details_at(record: Mapping[str, object], place: int) -> dict[str, object]:
    """What functions logged about a rollout, by its place in the group, from a line of scores.jsonl."""
    found: dict[str, object] = {}
    for function, rows in mapping(record.get("details")).items():
        if isinstance(rows, Sequence) and place < len(rows):
            found[function] = rows[place]
    return found
