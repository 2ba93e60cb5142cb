"""Rows wherever they are, under whatever names, mixed; and what is said of each kind of bad row before any training."""

import gzip
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pyarrow as pa
import pytest
from huggingface_hub import constants
from pyarrow import parquet

from posttrain.errors import RunError, UserError
from posttrain.options.dataset import DatasetOptions
from posttrain.tasks.dataset import DatasetTask
from posttrain.tasks.row_files.rows import read_rows, rows_digest
from tests.support.dataset_rows import SUMS, json_lines, task_of_rows as task
from tests.support.refusals import refused

ASK, YES, NO = (
    {"role": role, "content": text} for role, text in (("user", "Is it?"), ("assistant", "Yes."), ("assistant", "No."))
)


def prompts(mine: DatasetTask) -> list[object]:
    return [row.columns["prompt"] for row in mine.training_rows]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_of_a_table_is_found(tmp_path: Path, delimiter: str) -> None:
    (tmp_path / "rows.csv").write_text(delimiter.join(["prompt", "answer"]) + f'\n"a{delimiter} b"{delimiter}007\n')
    (row,) = read_rows(str(tmp_path / "rows.csv"))
    assert row.columns == {"prompt": f"a{delimiter} b", "answer": "007"}  # a cell is text: no number, no null


def test_a_delimiter_that_is_told_is_the_one(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b;prompt,c\n1,2;3,4\n")
    (mine,) = task(path=str(tmp_path / "rows.csv"), delimiter=";", columns={"prompt": "prompt,c"}).training_rows
    assert mine.columns == {"a,b": "1,2", "prompt": "3,4"}


def test_cells_that_are_named_are_read_as_json_and_lines_are_counted_over_quotes(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('prompt,nums\n"one\ntwo","[3, 4]"\nthree,5\n')
    first, second = task(path=str(tmp_path / "rows.csv"), json_columns=("nums",)).training_rows
    assert (first.where, first.columns) == ("rows.csv:2", {"prompt": "one\ntwo", "nums": [3, 4]})
    assert (second.where, second.columns) == ("rows.csv:4", {"prompt": "three", "nums": 5})


def test_a_pattern_is_its_files_by_name(tmp_path: Path) -> None:
    json_lines(tmp_path / "b.jsonl", SUMS[2:4])
    json_lines(tmp_path / "a.jsonl", SUMS[:2])
    mine = task(path=str(tmp_path / "*.jsonl"))
    assert [row.where for row in mine.training_rows] == ["a.jsonl:1", "a.jsonl:2", "b.jsonl:1", "b.jsonl:2"]


@pytest.mark.parametrize("kind", ["stream.arrow", "file.arrow", "rows.parquet"])
def test_tables_of_arrow_are_read(tmp_path: Path, kind: str) -> None:
    table, path = pa.Table.from_pylist(SUMS[:3]), tmp_path / kind
    if kind == "rows.parquet":
        parquet.write_table(table, path)
    else:
        with (pa.ipc.new_stream if kind == "stream.arrow" else pa.ipc.new_file)(path, table.schema) as writer:
            writer.write_table(table)
    assert [(row.where, row.columns) for row in read_rows(str(path))] == [
        (f"{kind}:{number}", row) for number, row in enumerate(SUMS[:3], start=1)
    ]
    path.write_bytes(b"nothing")
    with refused(f"{kind}: cannot be read as {path.suffix[1:]}"):
        read_rows(str(path))


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv"])
def test_files_of_text_are_read_from_gzip_too(tmp_path: Path, suffix: str) -> None:
    texts = {
        ".jsonl": '{"prompt": "a"}\n',
        ".json": '[{"prompt": "a"}]',
        ".csv": "prompt,x\na,1\n",
        ".tsv": "prompt\tx\na\t1\n",
    }
    path = tmp_path / f"rows{suffix}.gz"
    path.write_bytes(gzip.compress(texts[suffix].encode()))
    [row] = read_rows(str(path))
    assert (row.where.partition(":")[0], row.columns["prompt"]) == (path.name, "a")
    path.write_bytes(path.read_bytes()[:12])
    with refused(".gz: … gzip"):
        read_rows(str(path))


def test_folders_that_datasets_saved_are_read_with_their_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list([{"prompt": [ASK], "answer": i} for i in range(6)])
    rows.select([4, 2]).save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"train": rows, "test": rows.select([5])}).save_to_disk(tmp_path / "split")
    chosen = task(path=str(tmp_path / "plain")).training_rows
    assert [(row.where, row.columns["answer"]) for row in chosen] == [("plain:1", 4), ("plain:2", 2)]
    assert len(read_rows(str(tmp_path / "split"))) == 6
    assert len(read_rows(str(tmp_path / "split"), split="test")) == 1
    with refused("no split dev. There are train, test; name one as `split`"):
        read_rows(str(tmp_path / "split"), split="dev")
    with refused("split = test … leave the split out"):
        read_rows(str(tmp_path / "plain"), split="test")


def test_a_split_of_its_own_is_evaluated_on(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list(SUMS)
    datasets.DatasetDict({"train": rows, "test": rows.select([3, 5])}).save_to_disk(tmp_path / "split")
    mine = task(path=str(tmp_path / "split"), held_out_split="test")
    assert [row.columns["answer"] for row in mine.held_out_rows] == [6, 10]
    assert len(mine.training_rows) == 38


def test_a_hub_that_cannot_be_reached_is_one_message_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    pytest.importorskip("datasets")
    with refused("nobody/rows: no such file or folder … `hf download", error=RunError):
        read_rows("nobody/rows")
    monkeypatch.setattr("posttrain.tasks.row_files.file_rows.find_spec", lambda name: None)
    with refused("`pip install posttrain[data]`"):
        read_rows("nobody/rows")


class Hub(BaseHTTPRequestHandler):
    """Knows the branch `v2` of one data set."""

    def do_GET(self) -> None:
        known = self.path == "/api/datasets/some/sums/revision/v2"
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(b'{"sha": "abc123"}' if known else b"{}")

    def log_message(self, *_: object) -> None:
        pass


def test_a_data_set_of_the_hub_is_loaded_at_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[object] = []

    def load(*place: object, **named: object) -> list[dict[str, object]]:
        asked.append((place, named))
        return SUMS

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *place, **named: ["train", "test"])
    monkeypatch.setattr(datasets, "load_dataset", load)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    try:
        mine = task(path="some/sums", subset="main", split="test", revision="v2")
        assert asked == [(("some/sums", "main"), {"split": "test", "revision": "abc123"})]
        assert mine.training_rows[0].where == "some/sums:1"
        assert (rows_digest("some/sums", "v2"), rows_digest("some/sums")) == ("abc123", "")
        with refused("no split dev"):
            task(path="some/sums", split="dev", revision="v2")
    finally:
        server.shutdown()
        server.server_close()


def test_files_are_known_by_what_is_in_them(tmp_path: Path) -> None:
    """So that a run is not resumed with others: a single one, several of a pattern, and a folder."""
    pattern, folder = str(tmp_path / "*.jsonl"), tmp_path / "saved"
    folder.mkdir()
    (folder / "state.json").write_text("{}")
    (folder / "data.arrow").write_text("rows")
    single = json_lines(tmp_path / "a.jsonl", SUMS[:2])
    json_lines(tmp_path / "b.jsonl", SUMS[2:])
    before = [rows_digest(path) for path in (single, pattern, str(folder))]
    assert before == [rows_digest(path) for path in (single, pattern, str(folder))]
    assert len({*before, ""}) == 4
    json_lines(tmp_path / "b.jsonl", SUMS[3:])
    (folder / "data.arrow").write_text("swor")
    after = [rows_digest(path) for path in (single, pattern, str(folder))]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, False]


def test_columns_get_the_names_that_rewards_and_prompts_have(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "rows.jsonl", [{"question": "a", "answer": "b", "prompt": "old", "kind": 1}])
    (prompt,) = task(path=path, columns={"prompt": "question", "ground_truth": "answer"}).prompts(1, range(1))
    assert (prompt.text, prompt.columns) == ("a", {"ground_truth": "b", "kind": 1})


def test_an_input_that_belongs_to_a_renamed_instruction_is_not_lost(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "rows.jsonl", [{"instruction": "Add.", "input": "1 and 2", "output": "3"}])
    with refused("rows.jsonl:1: `columns` renames the instruction … whose `input` would not"):
        read_rows(path, DatasetOptions(columns={"prompt": "instruction", "completion": "output"}))
    [row] = read_rows(path, DatasetOptions(columns={"ground_truth": "output"}))
    assert row.columns["input"] == "1 and 2"


def test_conversations_and_preferences_have_a_prompt_in_them() -> None:
    mine = task([{"messages": [ASK, YES]}])
    assert mine.notes()[1:] == ["prompts are `messages` without the assistant's last turn"]
    (row,) = mine.training_rows
    assert row.columns == {"prompt": [ASK], "messages": [ASK, YES]}  # the answer goes to the rewards
    (row,) = task([{"chosen": [ASK, YES], "rejected": [ASK, NO]}]).training_rows
    assert row.columns["prompt"] == [ASK]
    (row,) = task([{"chosen": "Is it? Yes.", "rejected": "Is it? No."}]).training_rows
    assert row.columns["prompt"] == "Is it?"
    talk = [{"from": "human", "value": "Is it?"}, {"from": "gpt", "value": "Yes."}]
    (row,) = task([{"conversations": talk}]).training_rows
    assert row.columns == {"prompt": [ASK], "conversations": talk}
    (row,) = task([{"instruction": "Is", "input": "it?", "output": "Yes."}]).training_rows
    assert (row.columns["prompt"], row.columns["output"]) == ([{"role": "user", "content": "Is\n\nit?"}], "Yes.")
    begun = task([{"prompt": [ASK, YES]}, {"prompt": [ASK]}], last_assistant_message="prefill")
    assert begun.notes()[1:] == ["1 prompt whose last message is the assistant's, which begins the answer"]
    assert task([{"prompt": [ASK]}], last_assistant_message="prefill").notes()[1:] == []


def test_held_out_rows_from_memory_are_those_and_no_others() -> None:
    mine = task(SUMS, held_out_rows=[*SUMS[3:5], {"prompt": "other"}])
    assert [prompt.text for prompt in mine.held_out()] == ["3 + 3 = ", "4 + 4 = ", "other"]
    assert len(mine.training_rows) == 38


BAD = {
    "a missing column": ('{"question": "a"}', "no column `prompt`"),
    "a wrong type": ('{"prompt": 3}', "the column `prompt` must hold text or a list of messages"),
    "a message without text": ('{"prompt": [{"role": "user"}]}', "message 0 of the prompt: … must have the texts"),
    "an empty prompt": ('{"prompt": ""}', "the column `prompt` is empty"),
    "a broken line": ('{"prompt": "a"', "not JSON at column 15"),
    "no object": ("[1]", "a row must be an object of named columns, not list"),
    "no UTF-8": (b'{"prompt": "\xff"}', "not UTF-8 at byte 12 of the line; save the file as UTF-8"),
    "half a character": ('{"prompt": "a\\ud83d"}', "half a character"),
    "half a character elsewhere": ('{"prompt": "a", "x": {"y": ["\\udc00"]}}', "holds half a character"),
    "values without end": ('{"prompt": ' + "[" * 100_000, "nested more than 100 deep"),
    "values that end deep": ('{"prompt": "a", "x": ' + "[" * 500 + "]" * 500 + "}", "nested more than 100 deep"),
    "a long integer": ('{"prompt": "a", "x": ' + "9" * 10_000 + "}", "more than 4,200 digits; write it as text"),
    "a long prompt": ('{"prompt": "' + "1 " * 30 + '"}', "the prompt has 60 tokens, and task.max_prompt_tokens = 40"),
}


@pytest.mark.parametrize(("line", "says"), BAD.values(), ids=BAD)
def test_a_bad_row_is_told_with_its_place_or_left_out_and_counted(tmp_path: Path, line: str | bytes, says: str) -> None:
    path = tmp_path / "rows.jsonl"
    good = json.dumps({"prompt": "a whole \U0001f600"}).encode()  # written as two halves, which belong together
    path.write_bytes(b"\n".join([good, line if isinstance(line, bytes) else line.encode(), good]))
    with refused(f"rows.jsonl:2 … {says}"):
        task(path=str(path), max_prompt_tokens=40)
    mine = task(path=str(path), max_prompt_tokens=40, skip_bad_rows=1)
    assert [row.where for row in mine.training_rows] == ["rows.jsonl:1", "rows.jsonl:3"]
    counted, fault = mine.notes()[1:]
    assert counted == "1 bad row left out:"
    assert "rows.jsonl:2" in fault


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prompt,answer\na,1\nb,2,3\n", "rows.csv:3: 3 cells for 2 columns (prompt, answer)"),
        (b"prompt,answer\na,1\nb,\xe9\n", "rows.csv:3: not UTF-8; save the file as UTF-8"),
        ('prompt,answer\na,1\n"b,2\n', "rows.csv:3: cannot be read as csv: unexpected end of data"),
        ("prompt,prompt\na,1\n", "two columns are named alike: prompt, prompt"),
    ],
)
def test_a_table_that_is_not_one_is_told_with_its_line(tmp_path: Path, text: str | bytes, says: str) -> None:
    (tmp_path / "rows.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with refused(says):
        task(path=str(tmp_path / "rows.csv"))


def test_of_too_many_bad_rows_the_first_are_listed() -> None:
    rows = [{"prompt": "good"}, *({"prompt": ""} for _ in range(9))]
    with pytest.raises(UserError) as caught:
        task(rows, skip_bad_rows=6)
    said = str(caught.value).splitlines()
    assert said[0] == "at least 7 rows cannot be used; task.skip_bad_rows = 6. Correct them or allow more. The first:"
    assert said[1] == "  rows:2: the column `prompt` is empty; fill it or drop the row"
    assert said[-1] == "  and 2 more"
    assert len(task(rows, skip_bad_rows=9).training_rows) == 1


def test_a_renamed_column_that_a_row_lacks_is_told(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "rows.jsonl", [{"question": "a", "n": "[1"}])
    with refused("rows.jsonl:1: no column `qestion`, which … Did you mean `question`?"):
        task(path=path, columns={"prompt": "qestion"})
    with refused("rows.jsonl:1: the column `n`: not JSON … Leave it out of json_columns"):
        task(path=path, columns={"prompt": "question"}, json_columns=("n",))


def test_long_prompts_are_left_out_or_cut_and_counted() -> None:
    rows = [{"prompt": "1 + 1 = "}, {"prompt": "words and " * 40 + "2 + 2 = "}]
    skipped = task(rows, over_long="skip", max_prompt_tokens=20)
    assert prompts(skipped) == ["1 + 1 = "]
    assert skipped.notes()[1] == "1 prompt of more than 20 tokens left out: rows:2"
    cut = task(rows, over_long="cut_left", max_prompt_tokens=20)
    assert str(prompts(cut)[1]).endswith("2 + 2 = ")
    longest = max(len(prompt.tokens) for prompt in cut.prompts(1, range(8)))
    assert 15 < longest <= 20
    with refused("rows:1: nothing of the prompt fits into 3 tokens"):
        task(rows, over_long="cut_left", max_prompt_tokens=3, prefill="<think>abc")
    assert cut.notes()[1] == "1 prompt of more than 20 tokens cut from their beginning: rows:2"


def test_the_side_of_a_prompt_that_is_cut_is_that_of_the_whole() -> None:
    rows = [{"prompt": f"{i} " * 30 + "= "} for i in range(60)]
    whole = {row.where for row in task(rows, held_out_share=0.3).held_out_rows}
    cut = task(rows, held_out_share=0.3, over_long="cut_left", max_prompt_tokens=9)
    assert {row.where for row in cut.held_out_rows} == whole


@pytest.mark.parametrize(("value", "says"), [("[" * 500 + "]" * 500, "100 deep"), ("9" * 10_000, "4,200 digits")])
def test_values_that_no_row_can_hold_are_told_wherever_rows_are(tmp_path: Path, value: str, says: str) -> None:
    (tmp_path / "rows.json").write_text(f'[{{"prompt": "a"}}, {{"prompt": "b", "x": {value}}}]')
    (tmp_path / "rows.csv").write_text(f"prompt,x\na,1\nb,{value}\n")
    with refused(f"rows.json … {says}"):
        task(path=str(tmp_path / "rows.json"))
    with refused(f"rows.csv:3: the column `x`: … {says}"):
        task(path=str(tmp_path / "rows.csv"), json_columns=("x",))
    deep: list[object] = []
    deep.append(deep)
    with refused(f"rows:2: … {says}"):
        task([{"prompt": "a"}, {"prompt": "b", "x": deep if "[" in value else 10**10_000}])
