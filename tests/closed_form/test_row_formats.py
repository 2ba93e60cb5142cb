"""Rows in each of the usual formats, rows of none, and prompts that are too long."""

from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, strategies as st

from posttrain.tasks.prompt_content import LengthLimit
from posttrain.tasks.row_files.row_formats import (
    CompletionRow,
    ConversationRow,
    PreferenceRow,
    RowFormat,
    detected_format,
    formatted,
)
from posttrain.tasks.row_files.rows import DatasetRow
from tests.support.conversations import turns
from tests.support.refusals import refused

SYSTEM, ASK, YES, OTHER, NO = turns("Is it?", "Yes.", "And that?", "No.", system="Be brief.")
SHAREGPT = [{"from": "human", "value": "Is it?"}, {"from": "gpt", "value": "Yes."}]


def record(columns: Mapping[str, object], **accepted: Any) -> Any:
    rows = [DatasetRow("rows.jsonl:7", columns)]
    return formatted(rows, detected_format(rows, **accepted))[0]


def test_the_columns_tell_the_format() -> None:
    place = {"where": "rows.jsonl:7", "columns": {"answer": 3}}
    assert record({"prompt": "a", "completion": "b", "answer": 3}) == CompletionRow(prompt="a", completion="b", **place)
    assert record({"messages": [ASK, YES], "answer": 3}) == ConversationRow(messages=(ASK, YES), **place)
    pair = {"prompt": "a", "chosen": "b", "rejected": "c", "answer": 3}
    assert record(pair) == PreferenceRow(prompt="a", chosen="b", rejected="c", **place)


def test_a_method_takes_the_first_format_of_its_own_that_the_columns_allow() -> None:
    columns = {"prompt": "a", "messages": [ASK, YES], "chosen": [ASK, YES], "rejected": [ASK, NO]}
    assert isinstance(record(columns), PreferenceRow)
    assert isinstance(record(columns, accepted=[RowFormat.PROMPT_COMPLETION, RowFormat.MESSAGES]), ConversationRow)


def test_text_beside_messages_becomes_a_message() -> None:
    for columns in ({"prompt": "Is it?", "completion": [YES]}, {"prompt": [ASK], "completion": "Yes."}):
        mixed = record(columns)
        assert (mixed.prompt, mixed.completion) == ((ASK,), (YES,))


def test_an_implicit_prompt_of_messages_is_all_that_both_begin_with() -> None:
    pair = record({"chosen": [ASK, YES, OTHER, YES], "rejected": [ASK, YES, OTHER, NO]})
    assert (pair.prompt, pair.chosen, pair.rejected) == ((ASK, YES, OTHER), (YES,), (NO,))


def test_completions_that_repeat_their_prompt_lose_it() -> None:
    for prompt in ("Is it?", [ASK]):  # as UltraFeedback gives it, and as a conversation
        pair = record({"prompt": prompt, "chosen": [ASK, YES], "rejected": [ASK, NO]})
        assert (pair.prompt, pair.chosen, pair.rejected) == ((ASK,), (YES,), (NO,))


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("Q: 6? A: 12", "Q: 6? A: 13", "Q: 6? A:"),  # the common "1" belongs to the numbers
        ("Q: 6? A: yes it is", "Q: 6? A: yes it was", "Q: 6? A: yes it"),
        ("Q: 6?\n\nYes", "Q: 6?\n\nNo", "Q: 6?"),  # the whole of the white space goes with the completions
        ("Q: 6? yes", "Q: 6?\nno", "Q: 6?"),
        ("答案是三", "答案是四", "答案是"),  # no white space anywhere
        ("a b", "a b", "a"),  # equal answers teach nothing, but they are answers
    ],
)
def test_an_implicit_prompt_of_text_splits_no_word(chosen: str, rejected: str, prompt: str) -> None:
    pair = record({"chosen": chosen, "rejected": rejected})
    assert pair.prompt == prompt
    assert (pair.prompt + pair.chosen, pair.prompt + pair.rejected) == (chosen, rejected)


def test_rows_of_sharegpt_are_conversations() -> None:
    whole = record({"conversations": SHAREGPT, "system": "Be brief.", "answer": 3})
    assert whole == ConversationRow(where="rows.jsonl:7", messages=(SYSTEM, ASK, YES), columns={"answer": 3})
    assert record({"messages": SHAREGPT}).messages == (ASK, YES)


def test_the_input_of_an_alpaca_row_is_below_its_instruction() -> None:
    made = record({"instruction": "Add.", "input": "1 and 2", "output": "3", "system": "Be brief."})
    assert [*made.prompt, *made.completion] == turns("Add.\n\n1 and 2", "3", system="Be brief.")
    for nothing in ("", None):
        assert record({"instruction": "Is it?", "input": nothing, "output": "Yes."}).prompt == (ASK,)


def test_preferences_take_their_prompt_from_where_their_format_has_it() -> None:
    # As text the two answers begin alike, which is not what was asked.
    for asked in ({"instruction": "Is it?", "input": ""}, {"conversations": SHAREGPT[:1]}):
        pair = record({**asked, "chosen": "I say yes", "rejected": "I say no"})
        for answer, said in ((pair.chosen, "I say yes"), (pair.rejected, "I say no")):
            assert [*pair.prompt, *answer] == turns("Is it?", said)
    single = record({"conversations": SHAREGPT[:1], "chosen": SHAREGPT[1], "rejected": {"from": "gpt", "value": "No."}})
    assert (single.prompt, single.chosen, single.rejected) == ((ASK,), (YES,), (NO,))


def test_parts_of_text_are_joined_in_every_format() -> None:
    parts = {"role": "assistant", "content": [{"type": "text", "text": "Y"}, {"type": "text", "text": "es."}]}
    assert record({"messages": [ASK, parts]}).messages == (ASK, YES)
    assert record({"prompt": [ASK], "chosen": [parts], "rejected": [NO]}).chosen == (YES,)


def test_keys_that_parquet_fills_with_null_are_left_out() -> None:
    assert record({"messages": [{**ASK, "name": None}, YES]}).messages == (ASK, YES)


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"text": "a"}, "its columns (text) match no supported format … preference: "),
        ({"prompt": "a", "completion": ""}, "the column `completion` is empty; fill it or drop the row"),
        ({"prompt": None, "completion": "b"}, "the column `prompt` is empty"),
        ({"prompt": 3, "completion": "b"}, "the column `prompt` must hold text or a list of messages, not '3' (int)"),
        ({"messages": "hi"}, "the column `messages` must hold a list of messages, not text"),
        ({"messages": []}, "the column `messages` is empty"),
        ({"messages": [ASK, {"role": "user"}]}, "the column `messages`, message 1: … must have the texts `role`"),
        ({"messages": [{"from": "narrator", "value": "a"}]}, "message 0: from = 'narrator' is unknown"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "message 0, part 0: … is not text"),
        ({"instruction": "a", "output": ""}, "the column `output` is empty"),
        ({"instruction": "a", "input": 3, "output": "b"}, "the column `input` must hold text, not '3'"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "the column `history` is not read"),
        ({"conversations": [{"from": "system", "value": "a"}], "system": "b"}, "a system message … column `system`"),
        ({"chosen": "a", "rejected": [NO]}, "`chosen` and `rejected` must both be text or both be messages"),
        ({"chosen": "a", "rejected": "b"}, "`chosen` and `rejected` … add a column `prompt`"),
        ({"chosen": [ASK, YES], "rejected": [ASK]}, "`rejected` has nothing after the prompt"),
    ],
)
def test_a_row_of_no_format_is_told_with_its_place(columns: dict[str, object], complaint: str) -> None:
    with refused(f"rows.jsonl:7: … {complaint}"):
        record(columns)


def test_rows_after_the_first_are_of_its_format() -> None:
    columns = {"prompt": "a", "completion": "b"}, {"prompt": "a"}
    rows = [DatasetRow(f"rows.jsonl:{line}", given) for line, given in enumerate(columns, 7)]
    with refused("rows.jsonl:8: there is no column `completion`"):
        formatted(rows, detected_format(rows))


WORDS = st.lists(st.sampled_from(["a", "bc", "é", "ﷺ", "答案", "\U0001f600"]), max_size=8).map(" ".join)


def num_bytes(prompt: str | Sequence[Mapping[str, str]]) -> int:
    """As the finest tokenizer counts: a token for each byte; and a frame around messages, as a template has."""
    if isinstance(prompt, str):
        return len(prompt.encode())
    return 3 + sum(4 + len(message["content"].encode()) for message in prompt)


@given(texts=st.lists(WORDS, min_size=1, max_size=4), limit=st.integers(1, 60))
def test_no_prompt_is_let_through_that_is_too_long(texts: list[str], limit: int) -> None:
    for prompt in (texts[0], turns(*texts)):
        tokens = num_bytes(prompt)
        assert LengthLimit(limit, num_bytes).exceeded(prompt) == (str(tokens) if tokens > limit else "")


def test_short_texts_are_not_counted_one_by_one() -> None:
    count = Mock(side_effect=num_bytes)
    limit = LengthLimit(100, count)
    assert [limit.exceeded(f"What is {i}?") for i in range(1000)] == [""] * 1000
    count.assert_called_once_with("a")


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40), limit=st.integers(4, 20))
def test_the_end_of_a_text_stays_as_much_as_fits(text: str, limit: int) -> None:
    cut = LengthLimit(limit, num_bytes).cut(text)
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
