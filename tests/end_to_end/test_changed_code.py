"""A run is not resumed with other code than it began with, in whatever form a recipe or a caller names it."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

import posttrain
from posttrain.binding import code_digest
from posttrain.cli import main
from posttrain.commands.comparison.cells import Cell, kept_result, recipe_digest
from posttrain.commands.phase_list import Phase
from posttrain.commands.phases import finished
from posttrain.runs.named_inputs import named_files
from posttrain.runs.run_inputs import RunInputs
from tests.closed_form.test_comparison import result
from tests.support.commands import printed, refusal
from tests.support.own_objects import OWN_CODE
from tests.support.refusals import refused
from tests.support.runs import tiny_recipe

REWARD = """from helper import SIZE


def score(completions, **columns):
    return [SIZE * len(each) for each in completions]
"""
FORMS = ["mine.py:{}", "./mine.py:{}", "inner/mine.py:{}", "{here}/mine.py:{}", "mine:{}", "inner.mine:{}", "inner:{}"]


@pytest.fixture
def place(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with code of each kind, alone and in a package, and a helper beside each."""
    place = tmp_path / "place"
    (place / "inner").mkdir(parents=True)
    for folder in (place, place / "inner"):
        (folder / "helper.py").write_text("SIZE = 1\n")
        (folder / "algorithms.py").write_text(OWN_CODE)
        (folder / "tasks.py").write_text(OWN_CODE)
    (place / "mine.py").write_text(REWARD)
    (place / "inner" / "mine.py").write_text(REWARD)
    (place / "inner" / "__init__.py").write_text("from .mine import score\n")
    monkeypatch.chdir(place)
    before, paths = set(sys.modules), [*sys.path]
    sys.path[:] = [each for each in paths if not each.startswith(str(tmp_path.parents[1]))]  # of other tests
    yield place
    sys.path[:] = paths
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("mine", "inner", "helper"):
            del sys.modules[name]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("changed", ["mine.py", "helper.py"])
def test_every_form_of_a_name_leads_to_its_files(form: str, changed: str, place: Path, model: Path) -> None:
    path = form.replace("{here}", str(place)).format("score")
    sections = posttrain.load_recipe(model={"path": str(model)}, rewards=[{"path": path}])
    began = named_files(sections)
    assert all(each.digest for each in began.values())
    folder = place / "inner" if "inner" in form else place
    (folder / changed).write_text((folder / changed).read_text() + "# another\n")
    now = named_files(sections)
    assert began.keys() == now.keys()
    assert any(now[name].differs(began[name]) for name in began)


@pytest.mark.parametrize(("added", "folder"), [("dirname(__file__) + '/lib'", "inner/lib"), ("'..'", ".")])
def test_a_folder_that_a_file_adds_to_the_path_is_looked_into(added: str, folder: str, place: Path) -> None:
    (place / folder).mkdir(exist_ok=True)
    code = f"import sys\nfrom os.path import dirname\n\nsys.path.insert(0, {added})\nimport elsewhere\n"
    (place / "inner" / "own.py").write_text(code)
    began = code_digest(place / "inner" / "own.py")
    (place / folder / "elsewhere.py").write_text("SIZE = 1\n")
    assert code_digest(place / "inner" / "own.py") != began


NAMED = {
    "rewards[0].path": "mine.py:score",
    "rewards[1].path": "inner.mine:score",
    "algorithm.path": "algorithms.py:mine",
    "task.path": "tasks.py:Mine",
}


def test_the_command_refuses_changed_code_that_is_named_in_the_working_folder(place: Path, model: Path, capsys) -> None:
    recipe = tiny_recipe(place, model={"path": str(model)}, run={"num_steps": 1, "folder": "run"})
    content = yaml.safe_load(recipe.read_text())
    rewards = [{"path": path} for option, path in NAMED.items() if option.startswith("rewards")]
    own = {name: {"path": NAMED[f"{name}.path"]} for name in ("algorithm", "task")}
    recipe.write_text(yaml.safe_dump({**content, **own, "rewards": rewards}))
    assert main(["rl", "recipe.yaml"]) == 0, capsys.readouterr().err
    resume = ["rl", "--resume", "run", "--run.num-steps", "2"]
    files = ["mine.py", "inner/mine.py", "algorithms.py", "tasks.py", "helper.py"]
    told = [*(f"{option} = {path} has" for option, path in NAMED.items()), "rewards[0].path, which imports helper.py"]
    for file, says in zip(files, told, strict=True):
        was = (place / file).read_text()
        (place / file).write_text(was + "\nCHANGED = True\n")
        assert says in refusal(*resume)
        if file != "helper.py":
            (place / file).write_text(was)
    (place / "inner" / "mine.py").rename(place / "inner" / "gone.py")
    assert "rewards[1].path: inner.mine:score: no such file" in refusal(*resume, "--accept-changes")
    (place / "inner" / "gone.py").rename(place / "inner" / "mine.py")
    assert main([*resume, "--accept-changes"]) == 0


def test_a_run_that_kept_no_digest_of_its_code_is_resumed_with_a_word(place: Path, model: Path) -> None:
    """As those of earlier versions are, which looked for the module `py` of a package `mine`."""
    run, reward = {"num_steps": 1, "folder": "run"}, [{"path": "mine.py:score"}]
    recipe = tiny_recipe(place, model={"path": str(model)}, run=run, rewards=reward)
    assert main(["rl", str(recipe)]) == 0
    inputs = json.loads((place / "run" / "inputs.json").read_text())
    inputs["files"]["rewards[0].path"]["sha256"] = ""
    (place / "run" / "inputs.json").write_text(json.dumps(inputs))
    said = printed("rl", "--resume", "run", "--run.num-steps", "2")
    assert "rewards[0].path = mine.py:score cannot be compared" in said
    (place / "mine.py").write_text((place / "mine.py").read_text().replace("len", "2 * len"))
    assert main(["rl", "--resume", "run", "--run.num-steps", "3"]) == 2


def test_digests_of_code_that_an_earlier_version_kept_are_not_compared(place: Path, model: Path, capsys) -> None:
    def run(num_steps: int) -> None:
        rollout = {"prompts_per_step": 2, "group_size": 2, "max_completion_tokens": 4}
        task = {"name": "dataset", "held_out_share": 0}
        run = {"num_steps": num_steps, "folder": "run"}
        config = posttrain.load_recipe(model={"path": str(model)}, task=task, rollout=rollout, run=run)
        posttrain.train(config, rows=[{"prompt": "a"}], rewards=[scored], resume=num_steps > 1)

    def scored(completions: list[str], **columns: object) -> list[float]:
        return [float(len(each)) for each in completions]

    run(1)
    file = place / "run" / "inputs.json"
    inputs = json.loads(file.read_text())
    assert inputs.pop("format") == 3
    inputs["objects"]["rewards[0]"]["sha256"] = "of another kind"
    file.write_text(json.dumps(inputs))
    run(2)
    assert "rewards[0] = scored cannot be compared" in capsys.readouterr().out
    inputs = json.loads(file.read_text())
    assert inputs["objects"]["rewards[0]"]["sha256"] not in ("", "of another kind")  # and from now on it is compared
    inputs["objects"]["rewards[0]"]["sha256"] = "of another kind"
    file.write_text(json.dumps(inputs))
    with refused("rewards[0] = scored has changed"):
        run(3)
    rows = inputs["objects"]["rows"]
    inputs["objects"] |= {"rewards[0]": {"is": "scored", "sha256": ""}, "rows": {**rows, "sha256": "of other rows"}}
    file.write_text(json.dumps({name: each for name, each in inputs.items() if name != "format"}))
    with refused("rows = 1 rows has changed"):  # which was the same digest then
        run(3)


def test_a_finished_phase_and_a_finished_cell_are_not_taken_for_those_of_other_code(place: Path, model: Path) -> None:
    config = posttrain.load_recipe(rewards=[{"path": "mine.py:score"}], run={"folder": "cells/a"})
    folder = place / "cells" / "a"
    folder.mkdir(parents=True)
    (folder / "inputs.json").write_text(RunInputs(files=named_files(config)).as_json())
    cell = Cell(variant="a", seed=0, config=config)
    (folder.parent / "a.yaml").write_text(cell.recipe)
    made = asdict(result("a", 0, 0.5)) | {"recipe_digest": recipe_digest(cell)}
    (folder / "cell.json").write_text(json.dumps(made))
    (folder / "summary.json").write_text("{}")
    phase = Phase(name="a", number=1, layers=[], folder=folder)
    assert kept_result(cell) is not None
    assert finished(phase, config)
    (place / "mine.py").write_text("def score(completions, **columns):\n    return [0.0] * len(completions)\n")
    for of_now in (lambda: kept_result(cell), lambda: finished(phase, config)):
        with refused("is finished, and rewards[0].path = mine.py:score has changed"):
            of_now()
