"""Mixtures of data sets, and rows the whole way through the command: plans, metrics, resuming."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

import posttrain
from posttrain.options.dataset import DatasetOptions
from posttrain.options.row_source import MixtureSourceOptions
from posttrain.training.session import open_session, require_sound_rows
from tests.support.dataset_rows import SUMS, json_lines
from tests.support.dataset_rows import task_of_rows as task
from tests.support.refusals import refused
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
    with refused("two are called sums"):
        task(sources=(mixed[0], mixed[0]))
    own = json_lines(folder / "own.jsonl", [{"prompt": "a", "source": "b"}])
    with refused("own.jsonl:1: mixtures write the column `source`"):
        task(sources=(MixtureSourceOptions(path=own, weight=1.0), mixed[0]))
    assert task(path=own).training_rows[0].columns["source"] == "b"  # alone it is a column like any other


def test_a_mixture_in_a_recipe_is_a_task_of_rows_whose_mistakes_are_told() -> None:
    task_of = posttrain.load_recipe(task={"sources": [{"path": "a.jsonl"}, {"path": "b.jsonl", "name": "b"}]}).task
    assert isinstance(task_of, DatasetOptions)
    assert [source.name for source in task_of.sources] == ["", "b"]
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
    with refused("held_out_rows = 4 rows is given, and the run was made with 3 rows"):
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
        require_sound_rows(session)
