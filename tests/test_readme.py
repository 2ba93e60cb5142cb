"""README, the pages to start with, and tutorials: blocks run and print what is under them, commands and files exist."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from posttrain import irl
from posttrain.algorithms.table import ALGORITHMS
from tests.support.commands import printed
from tests.support.pages import blocks, commands, programs, python, write_files

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
START = sorted((ROOT / "docs" / "start").glob("*.md"))
PAGES = {"README.md": README} | {path.name: path.read_text(encoding="utf-8") for path in START}
COMMANDS = [
    command
    for page in (*PAGES.values(), ROOT.joinpath("CONTRIBUTING.md").read_text(encoding="utf-8"))
    for command in commands(page)
]
OUR_COMMANDS = [command for command in COMMANDS if command.startswith("posttrain ")]
TRAINING = [command for command in OUR_COMMANDS if re.match(r"posttrain (rl|sft|dpo|irl) \w", command)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the pages give, under the names they give them."""
    folder = tmp_path_factory.mktemp("readme")
    for page in PAGES.values():
        write_files(blocks(page), folder)
    return folder


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if programs(blocks(page))])
def test_the_python_blocks_run(name: str, folder: Path) -> None:
    for program in programs(blocks(PAGES[name])):
        done = python(program, folder)
        assert done.code == 0, done.err
    assert (folder / "runs/brief/model/model.safetensors").is_file()
    shutil.rmtree(folder / "runs")


def test_the_readme_is_short_and_begins_with_what_it_is_how_to_try_it_and_how_to_install_it() -> None:
    lines = README.splitlines()
    assert len(lines) <= 160
    assert lines.index("## Install") < 30
    assert lines.index("$ make demo") < 10
    own = next(program for program in programs(blocks(README)) if "train(" in program)
    assert len([line for line in own.splitlines() if line]) <= 15


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("make")])
def test_a_make_command_has_its_target(command: str) -> None:
    target = command.split("#")[0].split()[1]
    done = subprocess.run(["make", "-n", "-o", ".venv/.ok", target], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0


def test_nothing_but_make_and_posttrain_is_asked_for() -> None:
    assert {command.split()[0] for command in COMMANDS} == {"make", "posttrain"}


@pytest.mark.parametrize("command", TRAINING)
def test_a_training_command_resolves_to_a_config(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    words = [word for word in shlex.split(command)[2:] if word != "--dry-run"]
    printed("config", *("bundled" if word == "MODEL" else word for word in words))


@pytest.mark.parametrize("name", sorted({each for command in OUR_COMMANDS if (each := command.split()[1])[0] != "-"}))
def test_a_command_and_its_flags_are_in_its_help(name: str) -> None:
    told = printed(name, "--help")
    words = [word for command in OUR_COMMANDS if command.split()[1] == name for word in shlex.split(command)]
    for flag in (word for word in words if word.startswith("--") and "." not in word):
        assert flag in told, f"posttrain {name} has no {flag}"


def test_every_file_that_it_names_is_there() -> None:
    named = re.findall(r"`((?:src|tests|docs|recipes|benchmarks)/[^`]*|[A-Z]+\.md)`", README)
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_it_links_to_nothing_that_an_index_page_could_not_find() -> None:
    # The project has no address that pyproject.toml could give, so that a relative link would lead nowhere there.
    assert re.findall(r"(?<!!)\[[^\]]*\]\((?!https://)[^)]*\)", README) == []
    for picture in re.findall(r"!\[[^\]]+\]\(([^)]*)\)", README):
        assert (ROOT / picture).is_file()


def test_the_algorithm_table_is_the_table_of_the_code() -> None:
    rows = re.findall(r"^\| (\w+) \| `(\w+)` \|", README, flags=re.MULTILINE)
    assert [name for name, _ in rows] == list(ALGORITHMS)
    for name, function in rows:
        assert (ROOT / "docs" / "algorithms" / f"{name}.md").is_file()
        assert ALGORITHMS[name].__name__ == function


HAS_ITS_OWN_TESTS = {"rewards.md", "course.md", "run_folder.md"}
TUTORIALS = sorted(
    path
    for path in (ROOT / "docs").glob("*.md")
    if path.name not in HAS_ITS_OWN_TESTS and "```python" in path.read_text(encoding="utf-8")
)
BETWEEN = "\x1e"
"""Printed after each block, to tell what came from which."""

TYPED = [command for path in TUTORIALS for command in commands(path.read_text(encoding="utf-8"))]


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
    for text, told, stands in zip(programs(found), done.out.split(BETWEEN), expected, strict=True):
        assert told == stands, text


@pytest.mark.parametrize("command", TYPED)
def test_a_command_of_a_tutorial_resolves(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ours, *words = shlex.split(command)
    assert ours == "posttrain"
    printed(*words if "--help" in words else ["config", *words[1:]])  # what it would run


def test_every_picture_and_file_of_a_tutorial_is_there() -> None:
    for path in TUTORIALS:
        for name in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / name).is_file(), f"{path.name}: {name}"


def test_the_page_of_inverse_rl_s_api_has_every_public_name() -> None:
    page = (ROOT / "docs" / "irl_api.md").read_text(encoding="utf-8")
    assert set(irl.__all__) <= set(re.findall(r"\w+", page))
