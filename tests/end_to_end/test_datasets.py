"""Rows wherever they are, under whatever names, mixed; and what is said of each kind of bad row before any training."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.errors import RunError, UserError
from posttrain.models.loading.new_model import new_tokenizer
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.dataset import DatasetOptions
from posttrain.options.row_source import MixtureSourceOptions
from posttrain.tasks.dataset import DatasetTask
from posttrain.tasks.rows import read_rows, rows_digest
from posttrain.training.session import open_session, require_sound_rows
from tests.support.runs import command, metrics_of, save_tiny_model, tiny_recipe

RENDERER = TokenizerRenderer(new_tokenizer())
SUMS = [{"prompt": f"{i} + {i} = ", "answer": 2 * i} for i in range(40)]
ASK, YES, NO = (
    {"role": role, "content": text} for role, text in (("user", "Is it?"), ("assistant", "Yes."), ("assistant", "No."))
)


def task(
    rows: Sequence[Mapping[str, object]] | None = None, *, held_out_share: float = 0.0, **given: Any
) -> DatasetTask:
    own = {"held_out_rows": given.pop("held_out_rows", None)}
    options = DatasetOptions(held_out_share=held_out_share, **given)
    return DatasetTask(options, RENDERER, seed=0, prompts_per_step=8, rows=rows, **own)


def json_lines(path: Path, rows: Sequence[Mapping[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompts(mine: DatasetTask) -> list[object]:
    return [row.columns["prompt"] for row in mine.training_rows]


# Where rows are.


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
    with pytest.raises(UserError, match=r"no split dev. There are train, test; name one as `split`"):
        read_rows(str(tmp_path / "split"), split="dev")
    with pytest.raises(UserError, match="split = test, but the folder holds a single data set"):
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
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    pytest.importorskip("datasets")
    with pytest.raises(RunError, match=r"nobody/rows: is no file or folder here, .* `hf download nobody/rows"):
        read_rows("nobody/rows")
    monkeypatch.setattr("posttrain.tasks.row_files.tables.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"install the extra: `pip install posttrain\[data\]`"):
        read_rows("nobody/rows")


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


# What rows are called, and what formats they have.


def test_columns_get_the_names_that_rewards_and_prompts_have(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "rows.jsonl", [{"question": "a", "answer": "b", "prompt": "old", "kind": 1}])
    (prompt,) = task(path=path, columns={"prompt": "question", "ground_truth": "answer"}).prompts(1, range(1))
    assert (prompt.text, prompt.columns) == ("a", {"ground_truth": "b", "kind": 1})


def test_conversations_and_preferences_have_a_prompt_in_them() -> None:
    (row,) = task([{"messages": [ASK, YES]}]).training_rows
    assert row.columns == {"prompt": [ASK], "messages": [ASK, YES]}  # the answer goes to the rewards
    (row,) = task([{"chosen": [ASK, YES], "rejected": [ASK, NO]}]).training_rows
    assert row.columns["prompt"] == [ASK]
    (row,) = task([{"chosen": "Is it? Yes.", "rejected": "Is it? No."}]).training_rows
    assert row.columns["prompt"] == "Is it?"


def test_held_out_rows_from_memory_are_those_and_no_others() -> None:
    mine = task(SUMS, held_out_rows=[*SUMS[3:5], {"prompt": "other"}])
    assert [prompt.text for prompt in mine.held_out()] == ["3 + 3 = ", "4 + 4 = ", "other"]
    assert len(mine.training_rows) == 38


# Bad rows.


BAD = {
    "a missing column": ('{"question": "a"}', "no column `prompt`"),
    "a wrong type": ('{"prompt": 3}', "the column `prompt` must hold text or a list of messages"),
    "a message without text": ('{"prompt": [{"role": "user"}]}', "message 0 of the prompt: .* must have the texts"),
    "an empty prompt": ('{"prompt": ""}', "the column `prompt` is empty"),
    "a broken line": ('{"prompt": "a"', "not JSON at column 15"),
    "no object": ("[1]", "a row must be an object of named columns, not list"),
    "no UTF-8": (b'{"prompt": "\xff"}', "not UTF-8 at byte 12 of the line; save the file as UTF-8"),
    "half a character": ('{"prompt": "a\\ud83d"}', r"'a\\ud83d' holds half a character \(a lone surrogate\)"),
    "half a character elsewhere": ('{"prompt": "a", "x": {"y": ["\\udc00"]}}', "holds half a character"),
    "values without end": ('{"prompt": ' + "[" * 100_000, "its values lie too deep within each other"),
    "a long prompt": ('{"prompt": "' + "1 " * 30 + '"}', "the prompt has 60 tokens, and task.max_prompt_tokens = 40"),
}


@pytest.mark.parametrize(("line", "says"), BAD.values(), ids=BAD)
def test_a_bad_row_is_told_with_its_place_or_left_out_and_counted(tmp_path: Path, line: str | bytes, says: str) -> None:
    path = tmp_path / "rows.jsonl"
    good = json.dumps({"prompt": "a whole \U0001f600"}).encode()  # written as two halves, which belong together
    path.write_bytes(b"\n".join([good, line if isinstance(line, bytes) else line.encode(), good]))
    with pytest.raises(UserError, match=f"^rows.jsonl:2: .*{says}"):
        task(path=str(path), max_prompt_tokens=40)
    mine = task(path=str(path), max_prompt_tokens=40, skip_bad_rows=1)
    assert [row.where for row in mine.training_rows] == ["rows.jsonl:1", "rows.jsonl:3"]
    counted, fault = mine.notes()[1:]
    assert counted == "1 bad row left out:"
    assert fault.startswith("  rows.jsonl:2: ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prompt,answer\na,1\nb,2,3\n", r"rows.csv:3: 3 cells in a table of 2 columns \(prompt, answer\)"),
        (b"prompt,answer\na,1\nb,\xe9\n", "rows.csv:3: not UTF-8; save the file as UTF-8"),
        ('prompt,answer\na,1\n"b,2\n', "rows.csv:3: cannot be read as csv: unexpected end of data"),
        ("prompt,prompt\na,1\n", "two columns of one name: prompt, prompt"),
    ],
)
def test_a_table_that_is_not_one_is_told_with_its_line(tmp_path: Path, text: str | bytes, says: str) -> None:
    (tmp_path / "rows.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=says):
        task(path=str(tmp_path / "rows.csv"))


def test_of_too_many_bad_rows_the_first_are_listed() -> None:
    rows = [{"prompt": "good"}, *({"prompt": ""} for _ in range(9))]
    with pytest.raises(UserError) as caught:
        task(rows, skip_bad_rows=6)
    said = str(caught.value).splitlines()
    assert said[0] == (
        "at least 7 rows cannot be used, and task.skip_bad_rows = 6 allows 6. Mend them or allow more. The first:"
    )
    assert said[1] == "  rows:2: the column `prompt` is empty; fill it or drop the row"
    assert said[-1] == "  and 2 more"
    assert len(task(rows, skip_bad_rows=9).training_rows) == 1


def test_a_renamed_column_that_a_row_lacks_is_told(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "rows.jsonl", [{"question": "a", "n": "[1"}])
    with pytest.raises(UserError, match=r"rows.jsonl:1: no column `qestion`, which .* Did you mean `question`\?"):
        task(path=path, columns={"prompt": "qestion"})
    with pytest.raises(UserError, match=r"rows.jsonl:1: the column `n` is no JSON: .*Leave it out of json_columns"):
        task(path=path, columns={"prompt": "question"}, json_columns=("n",))


def test_a_check_of_tests_finds_the_prompt_under_whatever_name_it_has(folder: Path) -> None:
    """The check of the code reward warns where a function that is asked for is not named in the prompt."""
    tests = {"kind": "calls", "entry": "add", "cases": [{"args": [1, 2], "expected": 3}]}
    place = folder / "code"
    place.mkdir()
    path = json_lines(place / "rows.jsonl", [{"question": "Sum two numbers.", "prompt": "add", "tests": tests}])
    given = {"name": "dataset", "path": path, "prompt_column": "question", "held_out_share": 0.0}
    config = posttrain.load_recipe(tiny_recipe(place, task=given, rewards=[{"name": "code"}]))
    with open_session(config) as session, pytest.warns(UserWarning, match=r"does not name.*\n  rows.jsonl:1: add"):
        require_sound_rows(session)


# Long prompts.


def test_long_prompts_are_left_out_or_cut_and_counted() -> None:
    rows = [{"prompt": "1 + 1 = "}, {"prompt": "words and " * 40 + "2 + 2 = "}]
    skipped = task(rows, over_long="skip", max_prompt_tokens=20)
    assert prompts(skipped) == ["1 + 1 = "]
    assert skipped.notes()[1] == "1 prompt of more than 20 tokens left out: rows:2"
    cut = task(rows, over_long="cut_left", max_prompt_tokens=20)
    assert str(prompts(cut)[1]).endswith("2 + 2 = ")
    longest = max(len(prompt.tokens) for prompt in cut.prompts(1, range(8)))
    assert 15 < longest <= 20
    assert cut.notes()[1] == "1 prompt of more than 20 tokens cut from their beginning: rows:2"


def test_the_side_of_a_prompt_that_is_cut_is_that_of_the_whole() -> None:
    rows = [{"prompt": f"{i} " * 30 + "= "} for i in range(60)]
    whole = {row.where for row in task(rows, held_out_share=0.3).held_out_rows}
    cut = task(rows, held_out_share=0.3, over_long="cut_left", max_prompt_tokens=9)
    assert {row.where for row in cut.held_out_rows} == whole


# Mixtures, and the whole way.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("datasets")
    save_tiny_model(made / "model")
    json_lines(made / "sums.jsonl", SUMS)
    json_lines(made / "words.jsonl", [{"question": f"Say {i}: ", "answer": i} for i in range(30)])
    (made / "mine.py").write_text(
        "def long(completions, source, **columns):\n"
        "    return [len(text) / 10 if of == 'sums' else -1.0 for text, of in zip(completions, source)]\n"
    )
    return made


def sources(folder: Path) -> list[dict[str, object]]:
    return [
        {"path": str(folder / "sums.jsonl"), "weight": 1.0},
        {"path": str(folder / "words.jsonl"), "weight": 3.0, "columns": {"prompt": "question"}},
    ]


def test_a_mixture_trains_with_its_metrics_apart(folder: Path) -> None:
    place = folder / "mixture"
    given = {"name": "dataset", "sources": sources(folder), "held_out_share": 0.3}
    recipe = tiny_recipe(place, task=given, rollout={"prompts_per_step": 8}, evaluation={"brief_problems": 40})
    content = recipe.read_text().replace(f"{place}/dice.py:dice", f"{folder}/mine.py:long")
    recipe.write_text(content)
    ended = command("rl", str(recipe), folder=folder)
    assert ended.code == 0, ended.err
    assert "rows to train on: sums 25.0% of the draws, words 75.0% of the draws" in ended.out
    begin, *steps, _ = metrics_of(place / "run")
    for step in steps:
        assert step["sources/words/reward"] == -1
        assert step["sources/sums/reward"] >= 0
        assert step["sources/sums/num_groups"] + step["sources/words/num_groups"] == 8
    assert begin["eval/sources/words/reward"] == -1
    assert begin["eval/sources/sums/reward"] >= 0
    assert "eval/sources/words/accuracy_sampled" in steps[1]
    after = json.loads((place / "run" / "summary.json").read_text())["after"]
    assert sum(each["num_problems"] for each in after["sources"].values()) == after["num_problems"]
    # Resumed as the run that never stopped goes on; refused where one of its files has changed.
    (folder / "words.jsonl").write_text((folder / "words.jsonl").read_text() + '{"question": "new", "answer": 1}\n')
    refused = command("rl", "--resume", str(place / "run"), "--run.num-steps", "6", folder=folder)
    assert refused.code == 2
    assert "task.sources[1].path" in refused.err
    assert "has changed since the run began" in refused.err


def test_a_mixture_writes_its_column_and_overwrites_none(folder: Path) -> None:
    mixed = tuple(MixtureSourceOptions(**each) for each in sources(folder))  # type: ignore[arg-type]
    assert {str(row.columns["source"]) for row in task(sources=mixed).training_rows} == {"sums", "words"}
    assert {prompt.source for prompt in task(sources=mixed).prompts(1, range(40))} == {"sums", "words"}
    with pytest.raises(UserError, match="two are called sums; give each a name of its own"):
        task(sources=(mixed[0], mixed[0]))
    own = json_lines(folder / "own.jsonl", [{"prompt": "a", "source": "b"}])
    with pytest.raises(UserError, match=r"own.jsonl:1: has a column `source` of its own"):
        task(sources=(MixtureSourceOptions(path=own, weight=1.0), mixed[0]))
    assert task(path=own).training_rows[0].columns["source"] == "b"  # alone it is a column like any other


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"path": "a", "sources": (MixtureSourceOptions(path="b"),)}, "path = a is given beside sources"),
        ({"sources": (MixtureSourceOptions(path="b"),), "held_out_split": "c"}, "held_out_split = c is of no one path"),
        ({"skip_bad_rows": -1}, "skip_bad_rows = -1 is no number of rows"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens = 0 leaves no prompt"),
        ({"delimiter": "::"}, "delimiter = :: must be a single character"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        DatasetOptions(**options)


def test_what_is_left_out_and_which_rows_were_bad_is_in_the_plan(folder: Path) -> None:
    place = folder / "long"
    place.mkdir()
    path = json_lines(place / "rows.jsonl", [*SUMS, {"prompt": "word " * 96, "answer": 1}, {"prompt": ""}])
    given = {"path": path, "over_long": "skip", "skip_bad_rows": 2, "held_out_share": 0.0, "name": "dataset"}
    recipe = tiny_recipe(place, task=given, run={"num_steps": 1})
    ended = command("rl", str(recipe), folder=folder)
    assert ended.code == 0, ended.err
    # The context of 96 tokens less the 6 of a completion.
    assert "1 prompt of more than 90 tokens left out: rows.jsonl:41" in ended.out
    assert "1 bad row left out:\n" in ended.out
    assert "rows.jsonl:42: the column `prompt` is empty" in ended.out


def test_held_out_rows_from_python_are_measured_and_belong_to_the_run(folder: Path) -> None:
    recipe = tiny_recipe(folder / "python", task={"name": "dataset"}, run={"num_steps": 1}, rewards=[])
    config = posttrain.load_recipe(recipe)

    def digits(completions: list[str], **columns: object) -> list[float]:
        return [float(text.isdigit()) for text in completions]

    run = posttrain.train(config, rows=SUMS, held_out_rows=SUMS[:3], rewards=digits)
    before = run.summary["before"]
    assert isinstance(before, Mapping)
    assert before["num_problems"] == 3
    with pytest.raises(UserError, match="held_out_rows = 4 rows is given, and the run was made with 3 rows"):
        posttrain.train(config, rows=SUMS, held_out_rows=SUMS[:4], rewards=digits, resume=True)
    with pytest.raises(UserError, match="held_out_rows: the task is countdown, which makes its own prompts"):
        posttrain.train(posttrain.Config(), held_out_rows=SUMS, rewards=digits)
