"""Rows in each of the usual formats: which it is, what it holds, and what is said of a row that is none."""

from collections.abc import Mapping
from typing import Any

import pytest

from posttrain.tasks.row_files.row_formats import (
    CompletionRow,
    ConversationRow,
    PreferenceRow,
    RowFormat,
    detected_format,
    formatted,
)
from posttrain.tasks.row_files.rows import DatasetRow
from tests.support.refusals import refused

ASK, OTHER, YES, NO = (
    {"role": role, "content": text}
    for role, text in (("user", "Is it?"), ("user", "And that?"), ("assistant", "Yes."), ("assistant", "No."))
)


def row(columns: Mapping[str, object]) -> DatasetRow:
    return DatasetRow("rows.jsonl:7", columns)


def record(columns: Mapping[str, object], **accepted: Any) -> Any:
    rows = [row(columns)]
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
    mixed = record({"prompt": "Is it?", "completion": [YES]})
    assert (mixed.prompt, mixed.completion) == ((ASK,), (YES,))
    mixed = record({"prompt": [ASK], "completion": "Yes."})
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
    ],
)
def test_an_implicit_prompt_of_text_splits_no_word(chosen: str, rejected: str, prompt: str) -> None:
    pair = record({"chosen": chosen, "rejected": rejected})
    assert pair.prompt == prompt
    assert (pair.prompt + pair.chosen, pair.prompt + pair.rejected) == (chosen, rejected)


SHAREGPT = [{"from": "human", "value": "Is it?"}, {"from": "gpt", "value": "Yes."}]
SYSTEM = {"role": "system", "content": "Be brief."}


def test_rows_of_sharegpt_are_conversations() -> None:
    whole = record({"conversations": SHAREGPT, "system": "Be brief.", "answer": 3})
    assert whole == ConversationRow(where="rows.jsonl:7", messages=(SYSTEM, ASK, YES), columns={"answer": 3})
    assert record({"messages": SHAREGPT}).messages == (ASK, YES)


def test_the_input_of_an_alpaca_row_is_below_its_instruction() -> None:
    asked = [{"role": "user", "content": "Add.\n\n1 and 2"}]
    made = record({"instruction": "Add.", "input": "1 and 2", "output": "3", "system": "Be brief."})
    assert made.prompt == (SYSTEM, *asked)
    assert made.completion == ({"role": "assistant", "content": "3"},)
    for nothing in ("", None):
        assert record({"instruction": "Is it?", "input": nothing, "output": "Yes."}).prompt == (ASK,)


def test_preferences_take_their_prompt_from_where_their_format_has_it() -> None:
    # As text the two answers begin alike, which is not what was asked.
    for asked in ({"instruction": "Is it?", "input": ""}, {"conversations": SHAREGPT[:1]}):
        pair = record({**asked, "chosen": "I say yes", "rejected": "I say no"})
        assert (pair.prompt, pair.chosen[0]["content"], pair.rejected[0]["content"]) == (
            (ASK,),
            "I say yes",
            "I say no",
        )
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
        (
            {"prompt": 3, "completion": "b"},
            "the column `prompt` must hold text or a list of messages, not '3' (int)",
        ),
        ({"messages": "hi"}, "the column `messages` must hold a list of messages, not text"),
        ({"messages": []}, "the column `messages` is empty"),
        ({"messages": [ASK, {"role": "user"}]}, "the column `messages`, message 1: … must have the texts `role`"),
        ({"messages": [{"from": "narrator", "value": "a"}]}, "message 0: from = 'narrator' is unknown"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "message 0, part 0: … is not text"),
        ({"instruction": "a", "output": ""}, "the column `output` is empty"),
        ({"instruction": "a", "input": 3, "output": "b"}, "the column `input` must hold text, not '3'"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "the column `history` is not read"),
        (
            {"conversations": [{"from": "system", "value": "a"}], "system": "b"},
            "a system message … the column `system`",
        ),
        ({"chosen": "a", "rejected": [NO]}, "`chosen` and `rejected` must both be text or both be messages"),
        ({"chosen": "a", "rejected": "b"}, "`chosen` and `rejected` … add a column `prompt`"),
        ({"chosen": [ASK, YES], "rejected": [ASK]}, "`rejected` has nothing after the prompt"),
        ({"chosen": "a b", "rejected": "a b"}, None),
    ],
)
def test_a_row_of_no_format_is_told_with_its_place(columns: dict[str, object], complaint: str | None) -> None:
    if complaint is None:  # equal answers teach nothing, but they are answers
        assert record(columns).chosen == " b"
        return
    with refused(f"rows.jsonl:7: … {complaint}"):
        record(columns)


def test_rows_after_the_first_are_of_its_format() -> None:
    rows = [row({"prompt": "a", "completion": "b"}), DatasetRow("rows.jsonl:8", {"prompt": "a"})]
    with refused("rows.jsonl:8: there is no column `completion`"):
        formatted(rows, detected_format(rows))
