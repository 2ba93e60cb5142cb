"""Mixtures of data sets, rows that generators make, and rows the whole way through the command."""

import importlib.util
import json
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.models.loading.new_model import new_model, new_tokenizer
from posttrain.options.dataset import DatasetOptions, GeneratedOptions, GeneratorOptions, MixtureSourceOptions
from posttrain.runs.named_inputs import read_named_input, rows_of_task
from posttrain.runs.progress import Clock
from posttrain.tasks.dataset import GeneratedTask
from posttrain.tasks.row_files.generator_rows import generated_rows, row_maker_answer, rows_or_error
from posttrain.training.collector import no_journal
from posttrain.training.metrics import step_metrics
from posttrain.training.session import open_session, require_sound_rows
from tests.support.dataset_rows import RENDERER, SUMS, json_lines
from tests.support.dataset_rows import task_of_rows as task
from tests.support.refusals import mentions, refused
from tests.support.reward_models import reward_folder
from tests.support.runs import SHAPE, command, metrics_of, save_tiny_model, tiny_recipe


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
    row_maker_answer.cache_clear()
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
    monkeypatch.setattr("posttrain.tasks.row_files.generator_rows.row_maker_answer", lambda request: rows_here(**given))
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


SCIENCE = [
    {"prompt": f"Which has the symbol {symbol}? (A) {a} (B) {b}", "answer": answer}
    for symbol, a, b, answer in (
        ("H", "hydrogen", "iron", "A"),
        ("Fe", "hydrogen", "iron", "B"),
        ("O", "oxygen", "gold", "A"),
        ("Au", "oxygen", "gold", "B"),
    )
]
MATHS = [{"prompt": f"What is {a} + {a}?", "answer": 2 * a} for a in range(2, 8)]


def roomy_model(folder: Path) -> Path:
    """A random model that puzzles of several sentences fit into."""
    tokenizer = new_tokenizer()
    new_model(replace(SHAPE, max_positions=1024), tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def mixture(place: Path) -> dict[str, Any]:
    """Four kinds of rows, each with its reward by `where`, and a reward model over all."""
    json_lines(place / "science.jsonl", SCIENCE)
    json_lines(place / "maths.jsonl", MATHS)
    code = [
        {
            "prompt": f"Write `add{n}` that adds {n}.",
            "tests": {"kind": "calls", "entry": f"add{n}", "cases": [{"args": [1], "expected": 1 + n}]},
            "solution": f"def add{n}(x):\n    return x + {n}",
        }
        for n in range(4)
    ]
    json_lines(place / "code.jsonl", code)
    return {
        "model": {"path": str(roomy_model(place / "model"))},
        "task": {
            "name": "dataset",
            "held_out_share": 0.25,
            "sources": [
                {"path": str(place / "maths.jsonl"), "weight": 1},
                {"path": str(place / "science.jsonl"), "weight": 1},
                {"path": str(place / "code.jsonl"), "weight": 1},
                {"name": "logic", "generator": "knights_knaves", "generator_size": 8, "weight": 1},
            ],
        },
        "rewards": [
            {"name": "maths", "where": {"source": "maths"}},
            {"name": "exact_match", "where": {"source": "science"}},
            {"name": "code", "where": {"source": "code"}, "options": {"cpu_seconds": 0.5}},
            {"name": "generated", "where": {"source": "logic"}},
            {"model": str(reward_folder(place / "rm")), "weight": 0.1, "over_long": "cut_left"},
        ],
        "rollout": {"prompts_per_step": 8, "group_size": 2, "max_completion_tokens": 4},
        "update": {"tokens_per_microbatch": 4096},
        "evaluation": {"samples": 1, "every_steps": 0},
        "run": {"folder": str(place / "run"), "num_steps": 1, "threads": 1},
    }


def test_maths_science_code_and_logic_rows_share_a_step_with_a_reward_each(tmp_path: Path) -> None:
    config = posttrain.load_recipe("countdown-tiny", **mixture(tmp_path))
    with open_session(config) as session:
        require_sound_rows(session)  # each reward looks at the rows of its own source
        step = session.collector.collect(1, no_journal, Clock())
    assert not step.grades.rewards.isnan().any()  # of every row
    metrics = step_metrics(step.groups, step.grades, ~step.grades.rewards.isnan())
    sources = ("maths", "science", "code", "logic")
    counts = [metrics[f"sources/{source}/num_groups"] for source in sources]
    assert min(counts) >= 1
    assert sum(counts) == 8
    assert all(f"sources/{source}/reward" in metrics for source in sources)
    assert metrics["rewards/rm/std"] > 0
    scored = ~step.grades.scores[:, :, 0].isnan()  # [function prompt]
    for place, group in enumerate(step.groups):
        own = scored[:4, place].tolist()
        assert own == [group.prompt.source == source for source in sources]
        assert scored[4, place]
