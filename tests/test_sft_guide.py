"""The guide to supervised fine-tuning says what is so: its rows, commands, program and masks."""

import json
import shlex
from pathlib import Path

import pytest

from tests.support.conversations import save_chat_model
from tests.support.pages import blocks, commands, documented, posttrain, programs, python, write_files

PAGE = (Path(__file__).parents[1] / "docs" / "guides" / "sft.md").read_text(encoding="utf-8")
BLOCKS = blocks(PAGE)
SMALL = ["--run.threads", "1"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the rows of the page and a tiny model by the name that it has there."""
    write_files(BLOCKS, tmp_path)
    save_chat_model(tmp_path / "MODEL")
    return tmp_path


def test_the_commands_show_the_masks_of_the_page_and_train(folder: Path) -> None:
    look, train = (shlex.split(line)[1:] for line in commands(PAGE))
    (mask,) = (text for language, _, text in BLOCKS if language == "text")
    looked = posttrain([*look, *SMALL], folder)
    assert looked.code == 0, looked.err
    assert mask in looked.out
    trained = posttrain([*train, *SMALL], folder)
    assert trained.code == 0, trained.err
    lines = [json.loads(line) for line in (folder / "runs/own-sft/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(documented(name) for line in lines for name in line)


def test_the_program_trains_on_rows_in_memory(folder: Path) -> None:
    (program,) = programs(BLOCKS)
    ended = python(program, folder)
    assert ended.code == 0, ended.err
    last = ended.out.splitlines()[-1]
    counts = "{'trained': 4, 'held_out': 0, 'skipped': [], 'cut': [], 'empty_answers': [], 'bad': []}"
    assert last.endswith(f"runs/own-sft/model {counts}")
