"""Rows as examples: their formats, their order, how they fill batches, and what becomes of those that are too long."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.models.conversation_masks import Masking
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.dataset import DatasetOptions
from posttrain.options.training import SftOptions
from posttrain.tasks.row_files.rows import GivenRows
from posttrain.training.fit import marked
from posttrain.training.sft.learned_rows import RowExamples, row_examples
from tests.support.conversations import THOUGHTLESS, chat_tokenizer, turns
from tests.support.refusals import refused

SHAPES = True
ALL = DatasetOptions(held_out_share=0)
ASKED = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
AGAIN = ASKED.replace("a<", "c<")

IDS: list[int] = chat_tokenizer()("2+2=4", add_special_tokens=False)["input_ids"]


def examples(
    rows: Sequence[Mapping[str, Any]],
    options: SftOptions | None = None,
    task: DatasetOptions = ALL,
    *,
    longest: int = 200,
    template: str | None = None,
    seed: int = 0,
    held_out: Sequence[Mapping[str, Any]] | None = None,
) -> RowExamples:
    tokenizer = chat_tokenizer(*([template] if template else []))
    masking = Masking(
        renderer=TokenizerRenderer(tokenizer), stop_ids=(tokenizer.eos_token_id,), num_embeddings=len(tokenizer)
    )
    given = GivenRows(rows=rows, held_out=held_out)
    return row_examples(masking, task, options or SftOptions(), longest=longest, seed=seed, given=given)


def shown(found: RowExamples) -> list[str]:
    return [marked(chat_tokenizer(), each.unpacked()) for each in found.trained]


@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        ({"prompt": "2+2=", "completion": "4"}, {}, "2+2=⟪4<|im_end|>⟫"),
        ({"prompt": "2+2=", "completion": "4"}, {"loss_on": "all"}, "2⟪+2=4<|im_end|>⟫"),
        ({"text": "abc"}, {}, "a⟪bc<|im_end|>⟫"),
        ({"text": "abc"}, {"loss_on": "completion"}, "a⟪bc<|im_end|>⟫"),
        ({"input_ids": IDS}, {}, "2⟪+2=4⟫"),
        ({"input_ids": IDS, "labels": [-100] * 4 + IDS[4:], "text": "other"}, {}, "2+2=⟪4⟫"),
        ({"input_ids": IDS, "completion_mask": [0, 0, 0, 1, 1]}, {}, "2+2⟪=4⟫"),
        ({"input_ids": IDS, "completion_mask": [0, 0, 1, 1, 1], "assistant_masks": [1, 0, 1, 0, 1]}, {}, "2+⟪2⟫=⟪4⟫"),
        ({"input_ids": IDS, "completion_mask": [0, 0, 0, 1, 1]}, {"loss_on": "all"}, "2⟪+2=4⟫"),
        ({"input_ids": IDS, "labels": [*IDS[:3], -100, -100]}, {}, "2⟪+2⟫"),
        ({"messages": turns("a", "b", "c", "d")}, {}, f"{ASKED}⟪b<|im_end|>⟫\n{AGAIN}⟪d<|im_end|>⟫"),
        (
            {"messages": turns("a", "b", "c", "d")},
            {"loss_on": "completion"},
            f"{ASKED}b<|im_end|>\n{AGAIN}⟪d<|im_end|>⟫",
        ),
        (
            {"messages": turns("a", "b")},
            {"loss_on": "all"},
            "<|im_start|>⟪user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n⟫",
        ),
        (
            {"prompt": turns("a", "b", "c"), "completion": [{"role": "assistant", "content": "d"}]},
            {},
            f"{ASKED}b<|im_end|>\n{AGAIN}⟪d<|im_end|>⟫",
        ),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            {},
            f"{ASKED}⟪b<|im_end|>⟫",
        ),
        ({"instruction": "a", "input": "", "output": "b"}, {}, f"{ASKED}⟪b<|im_end|>⟫"),
    ],
)
def test_a_row_of_each_format_is_learned_as_the_options_say(
    row: Mapping[str, Any], options: Mapping[str, Any], expected: str
) -> None:
    assert shown(examples([row], SftOptions(**options))) == [expected]


def test_the_task_says_how_a_plain_prompt_is_put() -> None:
    found = examples([{"prompt": "a", "completion": "b"}], task=replace(ALL, system="S"))
    start = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert shown(found) == [f"{start}⟪b<|im_end|>⟫"]
    talk = examples([{"messages": turns("a", "b")}], task=replace(ALL, system="S"))
    assert shown(talk) == [f"{start}⟪b<|im_end|>⟫"]


def test_without_a_template_a_prompt_is_text() -> None:
    plain = replace(ALL, prompt_format="plain")
    row = {"prompt": turns("a"), "completion": [{"role": "assistant", "content": "b"}]}
    assert shown(examples([row], task=plain)) == ["a⟪b<|im_end|>⟫"]


def test_turns_that_a_template_rewrites_can_be_rows_of_their_own() -> None:
    said = ["<think>a</think>2", "<think>b</think>4"]
    row = {"messages": turns("1+1?", said[0], "2+2?", said[1])}
    with refused("rows:1, message 1:", "sft.split_turns: true"):
        examples([row], template=THOUGHTLESS)
    found = shown(examples([row], SftOptions(split_turns=True), template=THOUGHTLESS))
    assert [text.count("⟪") for text in found] == [1, 1]
    assert [text.rpartition("⟪")[2] for text in found] == [f"{each}<|im_end|>⟫" for each in said]
    assert "<think>a" not in found[1]


PLAIN = replace(ALL, prompt_format="plain")
MARKED = [{**message, "weight": 0} for message in turns("a", "b")]
ASKED_MARKED = [*turns("a"), {"role": "assistant", "content": "b", "weight": 1}, *turns("c")]
KEYS = ("training", "trainable", "masked", "loss_mask", "mask", "learn")
REFUSED: list[tuple[Mapping[str, Any], DatasetOptions, str]] = [
    ({"text": ""}, ALL, "rows:1: the column `text`…''"),
    ({"text": None}, ALL, "rows:1: the column `text`…None"),
    ({"prompt": "a"}, ALL, "rows:1: its columns (prompt) match no supported format"),
    ({"messages": turns("a")}, ALL, "rows:1: nothing to learn"),
    *[({"prompt": "a", "completion": "b", "weight": each}, ALL, f"`weight` = {each!r}") for each in (0, 0.5, "x")],
    *[
        ({"messages": [turns("a")[0], {**turns("a", "b")[1], key: 0}]}, ALL, f"the key `{key}`…`weight` or `train`")
        for key in KEYS
    ],
    ({"messages": turns("a", "b")}, PLAIN, "rows:1: task.prompt_format = plain leaves out roles"),
    ({"prompt": ASKED_MARKED, "completion": "d"}, ALL, "rows:1, message 1: is marked as learned…in the prompt"),
    ({"prompt": "a", "completion": MARKED[1:]}, PLAIN, "rows:1, message 0: is marked as not learned…prompt_format"),
    ({"input_ids": []}, ALL, "rows:1: the column `input_ids` is empty"),
    ({"input_ids": "2+2"}, ALL, "rows:1: the column `input_ids`…whole numbers, not '2+2'"),
    ({"input_ids": [1, 2.5]}, ALL, "whole numbers, not [1, 2.5]"),
    ({"input_ids": [1, 2, 99999]}, ALL, "rows:1: the tokenizer's token 99999 has no row"),
    ({"input_ids": [1, -1]}, ALL, "token -1 has no row"),
    ({"input_ids": [1, 2], "labels": [1]}, ALL, "1 numbers in `labels`, but 2 in `input_ids`"),
    ({"input_ids": [1, 2], "labels": [2, -100]}, ALL, "labels[0] = 2, but input_ids[0] = 1…Do not shift"),
    ({"input_ids": [1, 2], "attention_mask": [1, 0]}, ALL, "its attention_mask excludes tokens"),
    ({"input_ids": [1, 2], "labels": [-100, -100]}, ALL, "rows:1: nothing to learn"),
    ({"input_ids": [1]}, ALL, "rows:1: nothing to learn"),
]


@pytest.mark.parametrize(("row", "task", "words"), REFUSED, ids=lambda each: each if isinstance(each, str) else "")
def test_a_row_that_cannot_be_learned_is_named(row: Mapping[str, Any], task: DatasetOptions, words: str) -> None:
    with refused(words):
        examples([row], task=task)


def test_bad_rows_are_left_out_and_counted_where_some_may_be() -> None:
    rows = [{"messages": turns("a", "b")}, {"messages": turns("a")}, {"messages": "x"}]
    found = examples(rows, task=replace(ALL, skip_bad_rows=2))
    assert len(found.trained) == 1
    first, second, third = found.described()[2:]
    assert first == "invalid rows skipped:"
    assert second.strip().startswith("rows:3: the column `messages` must hold a list of messages")
    assert third.strip().startswith("rows:2: nothing to learn")
    assert len(found.summary()["rows"]["bad"]) == 2  # type: ignore[index]
    with refused("at least 2 rows cannot be used", "task.skip_bad_rows = 1"):
        examples(rows, task=replace(ALL, skip_bad_rows=1))


def test_the_plan_counts_empty_answers_and_keys_that_nothing_reads() -> None:
    named = [{**message, "reasoning_content": "x"} for message in turns("a", " ")]
    found = examples([{"messages": turns("a", "b")}, {"messages": named}])
    assert shown(found)[1].endswith("⟪ <|im_end|>⟫")
    assert found.described()[2:] == [
        "1 with an empty answer, for which only the stop token is learned: rows:2",
        "message keys that the chat template does not read: reasoning_content (2)",
    ]
    assert found.summary()["rows"]["empty_answers"] == ["rows:2"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"instruction": "a", "input": "", "output": "b", "text": "Below"}, "alpaca; columns that are not read: text"),
        ({"instruction": "a", "context": "x", "output": "b"}, "alpaca; columns that are not read: context"),
        (
            {"prompt": "a", "context": "x", "category": "y", "completion": "b", "none": None},
            "prompt_completion; columns that are not read: context, category",
        ),
        (
            {"text": "a b", "conversations": turns("a", "b"), "weight": 1},
            "text; columns that are not read: conversations",
        ),
        ({"conversations": turns("a", "b"), "system": "s", "tools": []}, "sharegpt"),
        ({"input_ids": IDS, "labels": IDS, "text": "a"}, "input_ids; columns that are not read: text"),
    ],
)
def test_the_plan_names_the_format_and_the_columns_that_nothing_reads(row: Mapping[str, Any], says: str) -> None:
    assert examples([row]).described()[1] == f"row format {says}"


def test_rows_without_anything_learned_are_bad_rows() -> None:
    rows = [{"messages": MARKED}, {"messages": turns("a", "b")}]
    assert len(examples(rows, task=replace(ALL, skip_bad_rows=1)).trained) == 1
    with refused("no row is valid", "rows:1: nothing to learn"):
        examples(rows[:1], task=replace(ALL, skip_bad_rows=1))


def test_rows_to_measure_on_can_be_given() -> None:
    found = examples(LENGTHS, task=DatasetOptions(), longest=99, held_out=LENGTHS[:2])
    assert (len(found.trained), len(found.apart)) == (5, 2)


LENGTHS = [{"prompt": "=" * n, "completion": "4"} for n in range(1, 8)]  # 3 to 9 tokens: prompt, answer, stop


def test_rows_that_are_too_long_are_counted_and_named_and_cut_or_skipped_where_that_is_asked_for() -> None:
    with refused("sft.max_length: 2 rows are longer than 7 tokens: rows:6 (8 tokens), rows:7"):
        examples(LENGTHS, longest=7)
    skipped = examples(LENGTHS, SftOptions(long_rows="skip"), longest=7)
    assert (len(skipped.trained), skipped.maker.skipped, skipped.maker.cut) == (5, ["rows:6", "rows:7"], [])
    first, _, second = skipped.described()
    assert (first, second) == ("5 rows of 25 tokens, 10 of them learned", "2 too long and skipped: rows:6, rows:7")
    cut = examples(LENGTHS, SftOptions(long_rows="cut"), longest=7)
    # The row of 8 tokens loses its stop token, that of 9 its whole answer and so is left out.
    assert (len(cut.trained), cut.maker.cut, cut.maker.skipped) == (6, ["rows:6"], ["rows:7"])
    kept = cut.trained[-1].unpacked()
    assert kept.tokens == (*[kept.tokens[0]] * 6, cut.trained[0].tokens[1])
    assert kept.sampled == (*[False] * 6, True)
    with refused("all rows are longer than 2 tokens"):
        examples(LENGTHS, SftOptions(long_rows="skip"), longest=2)


def test_each_epoch_has_every_row_once_in_an_order_of_its_own_that_seed_and_epoch_decide() -> None:
    found = examples(LENGTHS)
    epochs = [[found.row(index) for index in range(7 * epoch, 7 * epoch + 7)] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    whole = [number for epoch in epochs for number in epoch]
    assert [examples(LENGTHS).row(index) for index in range(28)] == whole
    assert [examples(LENGTHS, seed=1).row(index) for index in range(28)] != whole


@pytest.mark.parametrize(
    "limits", [{"rows_per_batch": 3}, {"rows_per_batch": 5}, {"tokens_per_batch": 12}, {"tokens_per_batch": 10**6}]
)
@pytest.mark.parametrize("epochs", [0.5, 1, 2.5])
def test_batches_of_some_epochs_have_every_row_that_often_and_none_twice(
    limits: Mapping[str, int], epochs: float
) -> None:
    found, options = examples(LENGTHS), SftOptions(num_epochs=epochs, **limits)
    numbers: list[int] = []
    batches = []
    for _ in range(found.num_steps(options) or 0):
        batches.append(found.batch_rows(len(numbers), options))
        numbers += batches[-1]
    assert numbers == [found.row(index) for index in range(round(7 * epochs))]
    assert all(batch and len(set(batch)) == len(batch) for batch in batches)
    if "rows_per_batch" in limits:
        assert max(map(len, batches)) == min(limits["rows_per_batch"], len(numbers))
    inputs = [[len(found.trained[number].tokens) - 1 for number in batch] for batch in batches]
    assert all(sum(batch[:-1]) < options.tokens_per_batch for batch in inputs)
    assert found.num_steps(replace(options, num_epochs=None)) is None


def test_equal_prompts_stay_on_one_side_whatever_is_said_to_them(tmp_path: Path) -> None:
    rows = [{"messages": turns(f"question {n % 20}", f"answer {n}")} for n in range(60)]
    found = examples(rows, task=DatasetOptions(held_out_share=0.3))
    sides = [
        {marked(chat_tokenizer(), each.unpacked()).partition("⟪")[0] for each in part}
        for part in (found.trained, found.apart)
    ]
    assert all(sides)
    assert not sides[0] & sides[1]
    assert len(found.trained) + len(found.apart) == 60
    file = tmp_path / "apart.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:5]))
    given = examples(rows, task=DatasetOptions(held_out_path=str(file)))
    assert (len(given.trained), len(given.apart)) == (45, 5)
