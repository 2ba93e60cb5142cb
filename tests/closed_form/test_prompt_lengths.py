"""Prompts that are too long: counted exactly, whatever the shortcut says, and cut to what fits."""

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from posttrain.tasks.prompt_content import LengthLimit
from tests.support.refusals import refused

WORDS = st.lists(st.sampled_from(["a", "bc", "é", "ﷺ", "答案", "\U0001f600"]), max_size=8).map(" ".join)


def num_bytes(prompt: str | Sequence[Mapping[str, str]]) -> int:
    """As the finest tokenizer counts: a token for each byte; and a frame around messages, as a template has."""
    if isinstance(prompt, str):
        return len(prompt.encode())
    return 3 + sum(4 + len(message["content"].encode()) for message in prompt)


def turns(*contents: str, system: str = "") -> list[dict[str, str]]:
    opening = [{"role": "system", "content": system}] if system else []
    return [*opening, *({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents))]


@given(texts=st.lists(WORDS, min_size=1, max_size=4), limit=st.integers(1, 60))
def test_no_prompt_is_let_through_that_is_too_long(texts: list[str], limit: int) -> None:
    for prompt in (texts[0], turns(*texts)):
        tokens = num_bytes(prompt)
        assert LengthLimit(limit, num_bytes).exceeded(prompt) == (str(tokens) if tokens > limit else "")


def test_short_texts_are_not_counted_one_by_one() -> None:
    counted: list[Any] = []

    def count(prompt: Any) -> int:
        counted.append(prompt)
        return num_bytes(prompt)

    limit = LengthLimit(100, count)
    assert [limit.exceeded(f"What is {i}?") for i in range(1000)] == [""] * 1000
    assert counted == ["a"]


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40), limit=st.integers(4, 20))
def test_the_end_of_a_text_stays_as_much_as_fits(text: str, limit: int) -> None:
    cut = LengthLimit(limit, num_bytes).cut(text)
    assert isinstance(cut, str)
    assert text.endswith(cut)
    assert num_bytes(cut) <= limit
    assert cut == text or num_bytes(text[-len(cut) - 1 :]) > limit


def test_the_oldest_turns_of_a_conversation_go_first() -> None:
    talk = turns("one", "two", "three", "four", "five", system="Be brief.")
    whole = num_bytes(talk)
    assert LengthLimit(whole - 1, num_bytes).cut(talk) == turns("three", "four", "five", system="Be brief.")
    assert LengthLimit(whole - 24, num_bytes).cut(talk) == turns("five", system="Be brief.")
    # 3 for the frame, 13 for the system message, 4 + 2 for what is left of the last.
    assert LengthLimit(22, num_bytes).cut(talk) == turns("ve", system="Be brief.")


def test_where_nothing_fits_that_is_said() -> None:
    with refused("nothing of the prompt fits into 16 tokens … task.max_prompt_tokens"):
        LengthLimit(16, num_bytes).cut(turns("one", system="Be brief."))
