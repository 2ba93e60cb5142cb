"""Texts that come near to tags on lines of their own: each gets its verdict, in linear time."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.rewards.parsing.tags import answer_lines
from posttrain.rewards.shaping import line_format

GOOD = "<think>\na\n</think>\n<answer>\n7\n</answer>"
ACCEPTED = {
    "as it is asked": GOOD,
    "white space around the whole": f" \n\t{GOOD} \r\n\u3000",
    "several lines": "<think>\na\n\nb\n</think>\n<answer>\n7\nor so\n</answer>",
    "nothing said": "<think>\n\n</think>\n<answer>\n\n</answer>",
    "white space within lines": "<think>\n \n</think>\n<answer>\n\t7 \n</answer>",
    "what looks like a tag and is none": "<think>\n<Think> < answer>\n</think>\n<answer>\n</ answer>\n</answer>",
    "carriage returns inside": "<think>\na\r\n</think>\n<answer>\n7\r\n</answer>",
}
REFUSED = {
    "nothing": "",
    "white space": "\n\n",
    "prose": "57 plus 8 is 65.",
    "one line": "<think>a</think> <answer>7</answer>",
    "no line feed behind <think>": GOOD.replace("<think>\n", "<think>"),
    "no line feed before </think>": GOOD.replace("\n</think>", "</think>"),
    "a space between the blocks": GOOD.replace("</think>\n<answer>", "</think> <answer>"),
    "an empty line between the blocks": GOOD.replace("</think>\n", "</think>\n\n"),
    "no line feed behind <answer>": GOOD.replace("<answer>\n", "<answer>"),
    "no line feed before </answer>": GOOD.replace("\n</answer>", "</answer>"),
    "carriage returns behind tags": GOOD.replace(">\n", ">\r\n"),
    "one line feed between <think> and </think>": GOOD.replace("\na\n", "\n"),
    "one line feed between <answer> and </answer>": GOOD.replace("\n7\n", "\n"),
    "capitals": GOOD.upper(),
    "text before": f"Well.\n{GOOD}",
    "text behind": f"{GOOD}\nDone.",
    "text behind on the line": f"{GOOD} Done.",
    "not closed": GOOD.removesuffix("</answer>"),
    "only thoughts": "<think>\na\n</think>",
    "only an answer": "<answer>\n7\n</answer>",
    "the blocks the other way round": "<answer>\n7\n</answer>\n<think>\na\n</think>",
    "twice": f"{GOOD}\n{GOOD}",
    "two answers": f"{GOOD}\n<answer>\n8\n</answer>",
    "thoughts within thoughts": GOOD.replace("a", "<think>\na\n</think>"),
    "a template repeated as a thought": GOOD.replace("a", GOOD),
    "an answer within the answer": GOOD.replace("7", "<answer>\n7\n</answer>"),
    "a tag in the answer": GOOD.replace("7", "<think>"),
    "full-width brackets": GOOD.replace("<", "\uff1c").replace(">", "\uff1e"),
    "a vertical tab for a line feed": GOOD.replace("\n", "\v"),
    "Unicode's line separator": GOOD.replace("\n", "\u2028"),
    "a null before the first tag": f"\0{GOOD}",
    "a zero-width space before the first tag": f"\u200b{GOOD}",
}
LONG = {
    "a million line feeds": "\n" * 1_000_000,
    "many openings": "<think>\n" * 100_000,
    "many middles": "<think>\n" + "\n</think>\n<answer>\n" * 50_000,
    "many endings": "<think>\na\n</think>\n<answer>\n" + "\n</answer>" * 90_000,
    "many beginnings of the middle": "<think>\n" + "\n</think>\n<answer>" * 50_000,
    "white space at the end": GOOD + " " * 1_000_000 + ".",
}


def score(text: str, finish: str = "stop") -> tuple[float, str]:
    [graded] = line_format(completions=[text], finish_reasons=[finish])
    return graded.score, str(graded.outcome)


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_form_is_paid(name: str) -> None:
    assert score(ACCEPTED[name]) == (1.0, "formatted")


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_comes_near_is_not(name: str) -> None:
    assert score(REFUSED[name]) == (0.0, "unformatted")


def test_a_completion_that_the_limit_cut_off_is_told_apart_unless_the_form_is_complete() -> None:
    assert score(GOOD.removesuffix("answer>"), "length") == (0.0, "truncated")
    assert score(GOOD, "length") == (1.0, "formatted")


def test_the_answer_is_what_stands_between_its_lines() -> None:
    assert answer_lines(GOOD) == "7"
    assert answer_lines(ACCEPTED["several lines"]) == "7\nor so"
    assert answer_lines(ACCEPTED["nothing said"]) == ""


PIECES = st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "\n", "\n", "\n", "a", " ", "\r"])
PATTERN = re.compile(r"<think>\n[\s\S]*\n</think>\n<answer>\n[\s\S]*\n</answer>")
SKELETON = re.split(r"(\n|7|a)", GOOD)


@given(st.one_of(st.lists(PIECES, max_size=16), st.permutations(SKELETON), st.lists(st.sampled_from(SKELETON))))
def test_it_is_the_courses_pattern_over_the_whole_text_with_each_tag_once(pieces: list[str]) -> None:
    text = "".join(pieces)
    once = all(text.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    assert (answer_lines(text) is not None) == (once and PATTERN.fullmatch(text.strip()) is not None)


@given(st.integers(0, len(GOOD) - 1), PIECES)
def test_one_piece_more_or_a_character_less_keeps_to_the_pattern_too(place: int, piece: str) -> None:
    for text in (GOOD[:place] + piece + GOOD[place:], GOOD[:place] + GOOD[place + 1 :]):
        once = all(text.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
        assert (answer_lines(text) is not None) == (once and PATTERN.fullmatch(text.strip()) is not None)


# Trap: `^…$` under MULTILINE also matches where only a line ends, so that text behind the form is paid.
def test_text_behind_the_form_is_what_the_courses_own_pattern_lets_through() -> None:
    course = re.compile(f"^{PATTERN.pattern}$", re.MULTILINE)
    assert course.match(REFUSED["text behind"])
    assert score(REFUSED["text behind"]) == (0.0, "unformatted")


@pytest.mark.parametrize("name", LONG)
def test_a_long_text_is_read_in_a_millisecond_per_ten_kilobytes(name: str) -> None:
    def seconds() -> float:
        began = time.process_time()
        assert score(LONG[name])[0] == 0.0
        return time.process_time() - began

    assert min(seconds() for _ in range(3)) < 1e-7 * len(LONG[name])
