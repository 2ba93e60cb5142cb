"""Rows as a task: what is trained on and held out, mixtures, rows that generators make, and rows in the command."""

import importlib.util
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.options.dataset import DatasetOptions, GeneratedOptions, GeneratorOptions, MixtureSourceOptions
from posttrain.records import Prompt
from posttrain.runs.named_inputs import read_named_input, rows_of_task
from posttrain.tasks.dataset import DatasetTask, GeneratedTask
from posttrain.tasks.row_files.generator_rows import generated_rows, made_rows, rows_or_error
from posttrain.training.session import open_session
from posttrain.training.session_task import require_sound_rows
from tests.support.dataset_rows import RENDERER, SUMS, json_lines, task_of_rows as task
from tests.support.refusals import mentions, refused
from tests.support.runs import command, metrics_of, save_tiny_model, tiny_recipe


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
    assert "eval/sources/words/reward" in steps[1]
    after = json.loads((place / "run" / "summary.json").read_text())["after"]
    assert sum(each["num_problems"] for each in after["sources"].values()) == after["num_problems"]


def test_a_mixture_writes_its_column_and_overwrites_none(folder: Path) -> None:
    mixed = tuple(MixtureSourceOptions(**each) for each in sources(folder))  # type: ignore[arg-type]
    assert {str(row.columns["source"]) for row in task(sources=mixed).training_rows} == {"sums", "words"}
    assert {prompt.source for prompt in task(sources=mixed).prompts(1, range(40))} == {"sums", "words"}
    with refused("two are called sums"):
        task(sources=(mixed[0], mixed[0]))
    own = json_lines(folder / "own.jsonl", [{"prompt": "a", "source": "b"}])
    with refused("own.jsonl:1: mixtures write the column `source`"):
        task(sources=(MixtureSourceOptions(path=own, weight=1.0), mixed[0]))
    assert task(path=own).training_rows[0].columns["source"] == "b"  # alone it is a column like any other


def test_a_mixture_in_a_recipe_is_a_task_of_rows_whose_mistakes_are_told() -> None:
    made = posttrain.load_recipe(task={"sources": [{"path": "a.jsonl"}, {"path": "b.jsonl", "name": "b"}]}).task
    assert isinstance(made, DatasetOptions)
    assert [source.name for source in made.sources] == ["", "b"]
    for source, says in (
        ({"path": "a", "wieght": 1}, "task.sources.0.wieght: no such field.  Did you mean `weight`?"),
        ({"weight": 1}, "task.sources[0].path = '' is empty"),
        ({"path": "a", "weight": 0}, "task.sources[0].weight = 0.0: must be a finite number greater than 0"),
    ):
        with refused(says):
            posttrain.load_recipe(task={"sources": [source]})
    with refused("task.sources have weights for some"):
        posttrain.load_recipe(task={"sources": [{"path": "a", "weight": 1}, {"path": "b"}]})


def test_what_is_left_out_and_which_rows_were_bad_is_in_the_plan(folder: Path) -> None:
    place = folder / "long"
    place.mkdir()
    path = json_lines(place / "rows.jsonl", [*SUMS, {"prompt": "word " * 96, "answer": 1}, {"prompt": ""}])
    given = {"path": path, "over_long": "skip", "skip_bad_rows": 2, "held_out_share": 0.0, "name": "dataset"}
    recipe = tiny_recipe(place, task=given, run={"num_steps": 1})
    ended = command("rl", str(recipe), folder=folder)
    assert ended.code == 0, ended.err
    # The context of 96 tokens less the 6 of a completion.
    mentions(ended.out, "1 prompt of more than 90 tokens left out: rows.jsonl:41", "1 bad row left out:\n")
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
    with refused("held_out_rows = 4 rows is given, but the run was made with 3 rows"):
        posttrain.train(config, rows=SUMS, held_out_rows=SUMS[:4], rewards=digits, resume=True)
    with refused("held_out_rows: the task is countdown, which makes its own prompts"):
        posttrain.train(posttrain.Config(), held_out_rows=SUMS, rewards=digits)


def test_a_check_of_tests_finds_the_prompt_under_whatever_name_it_has(folder: Path) -> None:
    """The check of the code reward warns where a function that is asked for is not named in the prompt."""
    tests = {"kind": "calls", "entry": "add", "cases": [{"args": [1, 2], "expected": 3}]}
    place = folder / "code"
    place.mkdir()
    path = json_lines(place / "rows.jsonl", [{"question": "Sum two numbers.", "prompt": "add", "tests": tests}])
    given = {"name": "dataset", "path": path, "prompt_column": "question", "held_out_share": 0.0}
    config = posttrain.load_recipe(tiny_recipe(place, task=given, rewards=[{"name": "code"}]))
    with open_session(config) as session, pytest.warns(UserWarning, match=r"does not name.*\n  rows.jsonl:1: add"):
        require_sound_rows(session.task, session.rewards, session.resources)


def generated(**given: Any) -> GeneratedTask:
    options = GeneratedOptions(**{"generator": "acre", "generator_size": 60, "held_out_share": 0.3, **given})
    return GeneratedTask(options, RENDERER, seed=0, prompts_per_step=4)


def rows_here(**given: Any) -> list[dict[str, Any]]:
    """Rows that are made in this process: what the other one does, without the time to start it."""
    return [*rows_or_error({"generator": "knights_knaves", "options": {}, "seed": 0, "size": 3, **given})]


def test_rows_are_a_function_of_generator_options_seed_and_size() -> None:
    rows = rows_here(options={"n_people": 3}, size=5)
    assert len(rows) == 5
    assert all(row["answer"].count(" is ") == 3 for row in rows)  # one for each of three people
    assert rows_here(options={"n_people": 3}, size=3) == rows[:3]
    assert rows_here(options={"n_people": 3}, seed=7, size=5)[0] != rows[0]


def test_rows_are_made_where_sets_of_texts_have_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some generators go through a set, whose order each process draws anew unless it is told the seed of hashes."""
    told, run = [], subprocess.run

    def watched(*arguments: Any, **given: Any) -> Any:
        told.append(given["env"]["PYTHONHASHSEED"])
        return run(*arguments, **given)

    monkeypatch.setattr(subprocess, "run", watched)
    made_rows.cache_clear()
    rows = generated_rows(GeneratorOptions(generator="acre", generator_size=60))
    assert told == ["0"]
    assert [row["generator"] for row in rows] == ["acre"] * 60
    assert rows == rows_here(generator="acre", size=60)  # which goes through none


def test_no_question_is_both_trained_on_and_held_out() -> None:
    found = generated()
    training, held_out = (
        {str(row.columns["prompt"]) for row in rows} for rows in (found.training_rows, found.held_out_rows)
    )
    assert training
    assert held_out
    assert not training & held_out
    other_run = GeneratedTask(found.options, RENDERER, seed=9, prompts_per_step=4)
    assert [row.columns for row in other_run.held_out_rows] == [row.columns for row in found.held_out_rows]


def test_a_prompt_is_the_question_and_its_row_has_what_the_reward_reads() -> None:
    (prompt,) = generated(system="Answer in <answer> tags.", prompt_format="plain").prompts(1, range(1))
    assert prompt.text.startswith("Answer in <answer> tags.\n\n")
    assert prompt.columns.keys() == {"answer", "generator", "scorer", "entry"}
    assert prompt.id.startswith("acre:")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"generator": "knight_knaves"}, "no generator of that name.  Did you mean"),
        ({"generator": "qqqq"}, "no generator of that name.  There are ab, acre, "),
        ({"generator": "composite"}, "no generator of that name"),
        ({"options": {"n_peeple": 3}}, "the generator knights_knaves has no option `n_peeple`.  Did you mean"),
        ({"options": {"n_people": -1}}, "the generator knights_knaves refuses them: AssertionError"),
    ],
)
def test_what_a_generator_lacks_is_named(given: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.tasks.row_files.generator_rows.made_rows", lambda request: rows_here(**given))
    options = {"generator": "knights_knaves", **given}
    asked = GeneratorOptions(generator=options["generator"], generator_options=options.get("options", {}))
    with refused(says):
        generated_rows(asked)


def test_without_the_extra_it_is_one_message_before_anything_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "reasoning_gym" else find(name))
    with refused("reasoning-gym, which is not installed … `pip install posttrain[gym]`"):
        generated(generator_seed=11)


def test_another_version_of_the_library_is_noticed_by_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    options = GeneratedOptions(generator="acre")
    (named,) = rows_of_task(options)
    began = read_named_input(named)["task.generator"]
    assert began.what == "acre of reasoning-gym"
    monkeypatch.setattr("posttrain.runs.named_inputs.generator_digest", lambda: "another")
    assert read_named_input(named)["task.generator"].differs(began)


MANY = [{"prompt": f"{i} + {i} = ", "answer": str(2 * i)} for i in range(200)]


def task_of(rows: Sequence[Mapping[str, object]] | None = MANY, **options: Any) -> DatasetTask:
    """A fifth of the rows is held out unless the options say otherwise."""
    return task(rows, **{"held_out_share": 0.2, **options})


OPENED = [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}]


def texts(prompts: Sequence[Prompt]) -> list[str]:
    return [prompt.text for prompt in prompts]


def texts_of(rows: Sequence[Mapping[str, object]]) -> list[str]:
    return [str(row["prompt"]) for row in rows]


def test_a_prompt_is_a_function_of_seed_step_and_draw() -> None:
    whole = texts(task_of().prompts(5, range(12)))
    assert texts(task_of().prompts(5, range(3, 11))) == whole[3:11]  # a new task that never saw the steps before
    assert texts(task_of(seed=1).prompts(5, range(12))) != whole
    epoch = len(task_of().training_rows) // 8 + 1  # the order of the next epoch is another
    assert texts(task_of().prompts(epoch, range(8))) != texts(task_of().prompts(0, range(8)))


def test_a_prompt_carries_its_place_its_tokens_and_every_other_column() -> None:
    (prompt,) = task_of(MANY[:1], held_out_share=0.0, prefill="<think>").prompts(0, range(1))
    assert (prompt.id, prompt.columns, prompt.prefill) == ("rows:1", {"answer": "0"}, "<think>")
    assert prompt.text == RENDERER.tokenizer.decode(prompt.tokens) == "0 + 0 = <think>"


def test_held_out_prompts_are_a_share_that_no_seed_changes_and_no_step_trains_on() -> None:
    mine = task_of(held_out_share=0.2, prompts_per_step=50)
    held_out = texts(mine.held_out())
    # 200 draws of probability 0.2: 40, and four deviations of √(200 · 0.2 · 0.8) = 5.7 about it.
    assert 40 - 23 < len(held_out) < 40 + 23
    assert texts(task_of(held_out_share=0.2, seed=9).held_out()) == held_out
    trained = {text for step in range(8) for text in texts(mine.prompts(step, range(60)))}
    assert not trained & set(held_out)
    assert len(trained) + len(held_out) == 200


def test_equal_prompts_are_on_the_same_side_whatever_else_their_rows_hold() -> None:
    twice = [*MANY, *({**row, "prompt": f" {row['prompt']}\n", "answer": "other"} for row in MANY)]
    mine = task_of(twice)
    trained, held_out = (
        {str(row.columns["prompt"]).strip() for row in side} for side in (mine.training_rows, mine.held_out_rows)
    )
    assert not trained & held_out
    assert len(mine.held_out()) == 2 * len(task_of(MANY).held_out())


def test_more_rows_are_held_out_than_are_evaluated_on() -> None:
    few, all_of_them = task_of(held_out_share=0.3, held_out_size=5), task_of(held_out_share=0.3)
    assert len(few.held_out()) == 5
    assert set(texts(few.held_out())) < set(texts(all_of_them.held_out()))
    assert len(few.training_rows) == len(all_of_them.training_rows)


def test_prompts_of_a_held_out_file_are_not_trained_on(tmp_path: Path) -> None:
    held_out = json_lines(tmp_path / "test.jsonl", [*MANY[:3], {"prompt": "other", "answer": "x"}])
    mine = task_of(MANY[:10], held_out_path=held_out)
    assert texts(mine.held_out()) == [*texts_of(MANY[:3]), "other"]
    assert [row.columns["prompt"] for row in mine.training_rows] == texts_of(MANY[3:10])
    with refused("leaves 0 of 3 rows to train on and 4 to evaluate on"):
        task_of(MANY[:3], held_out_path=held_out)


def test_blank_lines_byte_order_marks_and_odd_line_ends_inside_strings_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n\r\n{"prompt": "c"}'.encode())
    mine = task_of(None, path=str(path), held_out_share=0.0)
    assert [(row.where, row.columns["prompt"]) for row in mine.training_rows] == [
        ("rows.jsonl:1", "a\u2028b"),
        ("rows.jsonl:3", "c"),
    ]


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("rows.jsonl", "\n \n", "there are no rows"),
        ("rows.jsonl", '{"prompt": "a"}\n{"promt": "b"}\n', "rows.jsonl:2: no column `prompt`. Did you mean `promt`?"),
        ("rows.jsonl", '{"question": "a"}\n', "There are: question. Set task.prompt_column"),
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
        task_of(None, path=str(tmp_path / name), held_out_share=0.0)


def test_what_leaves_nothing_to_do_is_refused(tmp_path: Path) -> None:
    json_lines(tmp_path / "rows.jsonl", MANY)
    for rows, options, words in (
        (None, {"path": str(tmp_path / "row.jsonl")}, "row.jsonl: no such file…rows.jsonl"),
        (None, {}, "task.path is missing"),
        ([], {}, "rows: there are no rows"),
        (MANY[:20], {"held_out_share": 0.001}, "held_out_share = 0.001…0 to evaluate on"),
        (MANY, {"held_out_share": 1.0}, "held_out_share"),
        (MANY, {"held_out_size": 0}, "held_out_size"),
        (MANY, {"prompt_column": ""}, "prompt_column"),
        (
            [{"prompt": OPENED}],
            {"system": "Be brief.", "held_out_share": 0.0},
            "rows:1: the prompt has a system message",
        ),
    ):
        with refused(words):
            task_of(rows, **options)
    assert task_of(MANY[:20], held_out_share=0.0).held_out() == []
