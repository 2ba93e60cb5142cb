"""The tutorials say what is so: their blocks are one program, which prints what stands under them."""

import re
import shlex
from pathlib import Path

import pytest

from posttrain import irl
from tests.support.pages import blocks, commands, posttrain, programs, python

ROOT = Path(__file__).parents[1]
HAS_ITS_OWN_TESTS = {"rewards.md", "course.md", "run_folder.md"}
TUTORIALS = sorted(
    path
    for path in (ROOT / "docs").glob("*.md")
    if path.name not in HAS_ITS_OWN_TESTS and "```python" in path.read_text(encoding="utf-8")
)
BETWEEN = "\x1e"
"""Printed after each block, to tell what came from which."""

COMMANDS = [command for path in TUTORIALS for command in commands(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_the_blocks_of_a_tutorial_print_what_stands_under_them(path: Path, tmp_path: Path) -> None:
    found = blocks(path.read_text(encoding="utf-8"))
    expected = [
        after if next_language == "text" else ""
        for (language, _, _), (next_language, _, after) in zip(found, [*found[1:], ("", "", "")], strict=True)
        if language == "python"
    ]
    assert sum(map(bool, expected)) >= 5
    done = python(f"\nprint({BETWEEN!r}, end='')\n".join(programs(found)), tmp_path)
    assert done.code == 0, done.err
    for text, printed, stands in zip(programs(found), done.out.split(BETWEEN), expected, strict=True):
        assert printed == stands, text


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_a_tutorial_resolves(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)
    assert words[0] == "posttrain"
    if "--help" in words:
        done = posttrain(words[1:], tmp_path)
    else:  # what it would run
        done = posttrain(["config", *words[2:]], tmp_path)
    assert done.code == 0, done.err


def test_every_picture_and_file_of_a_tutorial_is_there() -> None:
    for path in TUTORIALS:
        for name in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / name).is_file(), f"{path.name}: {name}"


def test_the_page_of_inverse_rl_s_api_has_every_public_name() -> None:
    page = (ROOT / "docs" / "irl_api.md").read_text(encoding="utf-8")
    assert set(irl.__all__) <= set(re.findall(r"\w+", page))
