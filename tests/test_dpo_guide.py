"""The guide to learning from pairs says what is so: its rows, commands, program and recipe."""

import json
import shlex
from pathlib import Path

import pytest
import yaml

from posttrain.config import load_recipe
from tests.support.pages import blocks, commands, documented, posttrain, programs, python, write_files
from tests.support.runs import save_tiny_model

PAGE = (Path(__file__).parents[1] / "docs" / "guides" / "dpo.md").read_text(encoding="utf-8")
BLOCKS = blocks(PAGE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the pairs of the page and a tiny model by the name that it has there."""
    write_files(BLOCKS, tmp_path)
    save_tiny_model(tmp_path / "MODEL")
    return tmp_path


def test_the_commands_show_the_pairs_and_train(folder: Path) -> None:
    look, train = (shlex.split(line)[1:] for line in commands(PAGE))
    looked = posttrain([*look, "--run.threads", "1"], folder)
    assert looked.code == 0, looked.err
    assert "\nrejected ⟪42<|end|>⟫\n" in looked.out
    trained = posttrain([*train, "--run.threads", "1"], folder)
    assert trained.code == 0, trained.err
    lines = [json.loads(line) for line in (folder / "runs/pairs/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert all(documented(name) for line in lines for name in line)
    assert (folder / "runs/pairs/model/model.safetensors").is_file()


def test_the_program_trains_on_pairs_in_memory(folder: Path) -> None:
    (program,) = programs(BLOCKS)
    ended = python(program, folder)
    assert ended.code == 0, ended.err
    assert "'trained': 4, 'held_out': 0" in ended.out.splitlines()[-1]


def test_the_recipe_of_rounds_is_one() -> None:
    (text,) = (text for language, _, text in BLOCKS if language == "yaml")
    config = load_recipe(**yaml.safe_load(text))
    assert config.num_steps == 32
