"""A file of the user's that calls `sys.exit` ends no command in silence, and none well."""

import sys
from pathlib import Path

import pytest
import yaml

from posttrain.cli import main
from tests.support.runs import save_tiny_model, tiny_recipe

CODE = """
import sys
{at_import}
from dataclasses import replace
from posttrain.algorithms.table import grpo
from posttrain.tasks.base import Task

def score(completions, **columns):
    return [1.0] * len(completions)

def left(evidence):
    sys.exit({code})

def quits():
    sys.exit({code})

def credits():
    return replace(grpo(), credit=left)

class Quits(Task):
    name = "quits"

    def __init__(self, renderer, *, seed):
        sys.exit({code})

class Stops(Task):
    name = "stops"

    def __init__(self, renderer, *, seed):
        self.reward_functions = (score,)

    def prompts(self, step, draws):
        sys.exit({code})

    def held_out(self):
        sys.exit({code})
"""
PLACES = {
    "a reward when it is imported": {"rewards": [{"path": "quits.py:score"}]},
    "a module when it is imported": {"rewards": [{"path": "quits:score"}]},
    "an algorithm when it is imported": {"algorithm": {"path": "quits.py:credits"}},
    "an algorithm when it is called": {"algorithm": {"path": "quits.py:quits"}},
    "a rule of credit": {"algorithm": {"path": "quits.py:credits"}},
    "a task when it is made": {"task": {"path": "quits.py:Quits"}},
    "a task when it is asked": {"task": {"path": "quits.py:Stops"}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("exits") / "model")


@pytest.mark.parametrize(
    ("place", "code"),
    [
        *((place, "'needs another machine'") for place in PLACES),
        *((place, code) for place in ("a reward when it is imported", "a task when it is asked") for code in ("", "0")),
    ],
)
def test_a_file_that_leaves_is_an_error_with_its_text(
    place: str,
    code: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    recipe = tiny_recipe(tmp_path, model={"path": str(model)})
    recipe.write_text(yaml.safe_dump(yaml.safe_load(recipe.read_text()) | PLACES[place]))
    at_import = f"sys.exit({code})" if "imported" in place else ""
    (tmp_path / "quits.py").write_text(CODE.format(at_import=at_import, code=code))
    assert main(["rl", "recipe.yaml"]) != 0
    told = capsys.readouterr().err
    assert f"calls sys.exit({code})" in told
    assert "quits" in told


def test_help_is_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rl", "--help"]) == 0
    assert "--rollout.group-size" in capsys.readouterr().out
