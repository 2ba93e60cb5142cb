"""The page on prompts says what is so: its commands print what stands under them, and its rows are read as it tells."""

import re
import shlex
from pathlib import Path

import pytest

from tests.support.pages import blocks, posttrain, write_files

PAGE = (Path(__file__).parents[1] / "docs" / "guides" / "prompts.md").read_text(encoding="utf-8")
BLOCKS = blocks(PAGE)
SAID = [
    (typed, said)
    for language, _, text in BLOCKS
    if language == "console"
    for typed, said in re.findall(r"^\$ posttrain (.*)\n((?:(?!\$ ).*\n)*)", text, flags=re.MULTILINE)
]


def test_there_are_commands_to_try() -> None:
    assert len(SAID) == 3


@pytest.mark.parametrize(("typed", "said"), SAID, ids=range(len(SAID)))
def test_a_command_prints_what_stands_under_it(typed: str, said: str, tmp_path: Path) -> None:
    write_files(BLOCKS, tmp_path)
    done = posttrain(shlex.split(typed), tmp_path)
    is_mistake = said.startswith("posttrain: ")
    assert done.code == (2 if is_mistake else 0), done.err
    assert (done.err if is_mistake else done.out) == said
    assert {file.name for file in tmp_path.iterdir()} == {"questions.jsonl", "turns.jinja"}
