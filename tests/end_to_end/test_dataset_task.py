"""A user's own rows as a task: what is trained on and when, what is held out, and what is wrong with a file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from posttrain.models.loading.new_model import new_tokenizer
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.dataset import DatasetOptions
from posttrain.records import Prompt
from posttrain.tasks.dataset import DatasetTask
from tests.support.refusals import refused

TOKENIZER = new_tokenizer()
RENDERER = TokenizerRenderer(TOKENIZER)
SUMS = [{"prompt": f"{i} + {i} = ", "answer": str(2 * i)} for i in range(200)]


def task(
    rows: Sequence[Mapping[str, object]] | None = SUMS, *, seed: int = 0, prompts_per_step: int = 8, **options: Any
) -> DatasetTask:
    return DatasetTask(DatasetOptions(**options), RENDERER, seed=seed, prompts_per_step=prompts_per_step, rows=rows)


def texts(prompts: Sequence[Prompt]) -> list[str]:
    return [prompt.text for prompt in prompts]


def written(path: Path, rows: Sequence[Mapping[str, object]]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


# What is trained on.


def texts_of(rows: Sequence[Mapping[str, object]]) -> list[str]:
    return [str(row["prompt"]) for row in rows]


def test_a_prompt_is_a_function_of_seed_step_and_draw() -> None:
    whole = texts(task().prompts(5, range(12)))
    assert texts(task().prompts(5, range(3, 11))) == whole[3:11]  # a new task that never saw the steps before
    assert texts(task(seed=1).prompts(5, range(12))) != whole
    epoch = len(task().training_rows) // 8 + 1  # the order of the next epoch is another
    assert texts(task().prompts(epoch, range(8))) != texts(task().prompts(0, range(8)))


def test_a_prompt_carries_its_place_its_tokens_and_every_other_column() -> None:
    (prompt,) = task(SUMS[:1], held_out_share=0.0, prefill="<think>").prompts(0, range(1))
    assert (prompt.id, prompt.columns, prompt.prefill) == ("rows:1", {"answer": "0"}, "<think>")
    assert prompt.text == TOKENIZER.decode(prompt.tokens) == "0 + 0 = <think>"


def test_system_messages_and_chat_make_conversations() -> None:
    tokenizer = new_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    renderer = TokenizerRenderer(tokenizer)

    def first(rows: Sequence[Mapping[str, object]], **options: Any) -> str:
        settings = DatasetOptions(held_out_share=0.0, **options)
        return DatasetTask(settings, renderer, seed=0, prompts_per_step=1, rows=rows).prompts(0, range(1))[0].text

    plain, turns = [{"prompt": "hi"}], [{"prompt": [{"role": "user", "content": "hi"}]}]
    assert first(plain) == "hi"
    assert first(plain, prompt_format="chat") == first(turns) == "user: hi\nassistant: "
    assert first(plain, system="Be brief.") == first(turns, system="Be brief.")
    assert first(turns, system="Be brief.", prefill="So") == "system: Be brief.\nuser: hi\nassistant: So"
    own = [{"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}]}]
    with refused("rows:1: the prompt has a system message"):
        first(own, system="Be brief.")


# What is held out.


def test_held_out_prompts_are_a_share_that_no_seed_changes_and_no_step_trains_on() -> None:
    mine = task(held_out_share=0.2, prompts_per_step=50)
    held_out = texts(mine.held_out())
    # 200 draws of probability 0.2: 40, and four deviations of √(200 · 0.2 · 0.8) = 5.7 about it.
    assert 40 - 23 < len(held_out) < 40 + 23
    assert texts(task(held_out_share=0.2, seed=9).held_out()) == held_out
    trained = {text for step in range(8) for text in texts(mine.prompts(step, range(60)))}
    assert not trained & set(held_out)
    assert len(trained) + len(held_out) == 200


def test_equal_prompts_are_on_the_same_side_whatever_else_their_rows_hold() -> None:
    twice = [*SUMS, *({**row, "prompt": f" {row['prompt']}\n", "answer": "other"} for row in SUMS)]
    mine = task(twice)
    trained, held_out = (
        {str(row.columns["prompt"]).strip() for row in side} for side in (mine.training_rows, mine.held_out_rows)
    )
    assert not trained & held_out
    assert len(mine.held_out()) == 2 * len(task(SUMS).held_out())


def test_more_rows_are_held_out_than_are_evaluated_on() -> None:
    few, all_of_them = task(held_out_share=0.3, held_out_size=5), task(held_out_share=0.3)
    assert len(few.held_out()) == 5
    assert set(texts(few.held_out())) < set(texts(all_of_them.held_out()))
    assert len(few.training_rows) == len(all_of_them.training_rows)


def test_prompts_of_a_held_out_file_are_not_trained_on(tmp_path: Path) -> None:
    held_out = written(tmp_path / "test.jsonl", [*SUMS[:3], {"prompt": "other", "answer": "x"}])
    mine = task(SUMS[:10], held_out_path=held_out)
    assert texts(mine.held_out()) == [*texts_of(SUMS[:3]), "other"]
    assert [row.columns["prompt"] for row in mine.training_rows] == texts_of(SUMS[3:10])
    with refused("leaves 0 of 3 rows to train on and 4 to evaluate on"):
        task(SUMS[:3], held_out_path=held_out)


# Files.


def test_all_kinds_of_files_give_the_same_prompts(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(list(SUMS))
    parquet.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "rows.csv").write_text("prompt,answer\n" + "".join(f"{r['prompt']},{r['answer']}\n" for r in SUMS))
    (tmp_path / "rows.json").write_text(json.dumps(SUMS))
    written(tmp_path / "rows.jsonl", SUMS)
    wanted = texts(task().prompts(0, range(8)))
    for suffix in ("jsonl", "json", "csv", "parquet"):
        mine = task(None, path=str(tmp_path / f"rows.{suffix}"))
        prompts = mine.prompts(0, range(8))
        assert texts(prompts) == wanted
        assert prompts[0].id.startswith(f"rows.{suffix}:")


def test_blank_lines_byte_order_marks_and_odd_line_ends_inside_strings_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n\r\n{"prompt": "c"}'.encode())
    mine = task(None, path=str(path), held_out_share=0.0)
    assert [(row.where, row.columns["prompt"]) for row in mine.training_rows] == [
        ("rows.jsonl:1", "a\u2028b"),
        ("rows.jsonl:3", "c"),
    ]


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("rows.jsonl", "\n \n", "there are no rows"),
        ("rows.jsonl", '{"prompt": "a"}\n{"promt": "b"}\n', "rows.jsonl:2: no column `prompt`. Did you mean `promt`?"),
        ("rows.jsonl", '{"question": "a"}\n', "It has question. Set task.prompt_column"),
        ("rows.json", '{"prompt": "a"}', "must hold a list of objects, not dict"),
        ("rows.json", '{"prompt": "a"}\n{}', "rows.json:2: not JSON"),
        ("rows.parquet", "nonsense", "cannot be read as parquet"),
        ("rows.csv", "", "cannot be read as csv"),
        ("rows.txt", "a", "rows are read from .jsonl"),
    ],
)
def test_a_fault_of_a_file_is_told_with_its_place(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    (tmp_path / name).write_text(text)
    with refused(complaint):
        task(None, path=str(tmp_path / name), held_out_share=0.0)


def test_what_leaves_nothing_to_do_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "rows.jsonl", SUMS)
    for rows, options, words in (
        (None, {"path": str(tmp_path / "row.jsonl")}, "row.jsonl: no such file…rows.jsonl"),
        (None, {}, "task.path is missing"),
        ([], {}, "rows: there are no rows"),
        (SUMS[:20], {"held_out_share": 0.001}, "held_out_share = 0.001…0 to evaluate on"),
        (SUMS, {"held_out_share": 1.0}, "held_out_share"),
        (SUMS, {"held_out_size": 0}, "held_out_size"),
        (SUMS, {"prompt_column": ""}, "prompt_column"),
    ):
        with refused(words):
            task(rows, **options)
    assert task(SUMS[:20], held_out_share=0.0).held_out() == []
