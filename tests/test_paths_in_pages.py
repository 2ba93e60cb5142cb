"""A page that names a file or a module names one that is there; CHANGELOG.md alone may name what was."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from posttrain.commands.completion import completed
from tests.support.pages import attribute, blocks, commands, one_test_of

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "posttrain"
PROSE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("benchmarks/*.md"), *ROOT.glob("tests/**/*.md")]
DOCS = [path for path in (*ROOT.glob("docs/*.md"), *ROOT.glob("docs/*/*.md")) if path.name != "changelog.md"]
LESSONS = ROOT.glob("docs/learn/*.py")
PAGES = sorted(
    [*PROSE, *DOCS, *LESSONS, ROOT / "docs" / "api.rst", *ROOT.glob("recipes/**/*.yaml"), *SOURCE.rglob("*.py")]
)

PATH = re.compile(r"(?<![\w./*{-])((?:[\w.-]+/)*[\w-]+\.(?:py|md|yaml|png|safetensors))(?![\w*])")
FOLDER = re.compile(r"(?<![\w./])((?:src|tests|docs|recipes|benchmarks)/(?:[\w.-]+/)*)(?![\w*])")
DOTTED = re.compile(r"\bposttrain(?:\.[A-Za-z_]\w*)+")
EXAMPLE = re.compile(r"(?:^|/)(?:FILE|RECIPE|mine|my_\w+|program)\.(?:py|yaml)$")
OF_A_RUN = re.compile(
    r"(?:config\.yaml|(?:model|policy|value_head)\.safetensors|(?:behaviours|curves|calibration|convergence|policy|rewards|visits)\.png|comparison\.(?:md|png)|README\.md|posttrain\.lock)$"
)
"""Files of a run folder or of a model."""
MADE = {
    f"{before}reference/{name}.md" for before in ("", "../", "docs/") for name in ("options", "commands", "trl_fields")
}
"""Made with the documentation, and kept nowhere."""

FOLDERS = [ROOT / name for name in ("src", "tests", "docs", "recipes", "benchmarks")]
NAMES = {path.name for path in (*ROOT.iterdir(), *(path for folder in FOLDERS for path in folder.rglob("*")))}
each_page = one_test_of(PAGES)


@each_page
def test_a_file_that_is_named_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    given = {name for _, name, _ in blocks(text)}
    for path in PATH.findall(text):
        if path not in given | MADE and not OF_A_RUN.search(path) and not EXAMPLE.search(path):
            bases = (ROOT, ROOT / "docs", ROOT / "src", SOURCE, page.parent)
            assert any((base / path).exists() for base in bases) if "/" in path else path in NAMES, path


def test_a_page_is_plain_markdown_that_reads_well_in_a_checkout() -> None:
    """Roles and directives of Sphinx would show as text; docs/conf.py makes references of links to the source."""
    marked = {
        path.name: re.findall(r"\{(?:py:\w+|toctree|ref|doc)\}", path.read_text(encoding="utf-8")) for path in DOCS
    }
    assert {name: found for name, found in marked.items() if found} == {}


@each_page
def test_a_folder_that_is_named_is_there(page: Path) -> None:
    for path in FOLDER.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / path).is_dir(), path


@each_page
def test_a_module_that_is_named_is_there(page: Path) -> None:
    for name in DOTTED.findall(page.read_text(encoding="utf-8")):
        assert OF_A_RUN.search(name) or attribute(name) is not None


def test_what_the_changelog_says_a_module_is_called_now_is_there() -> None:
    """The first column is what was, and only the first name of a cell is written in full."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    rows = [line.split("|")[2:3] for line in text.splitlines() if line.startswith("  | `posttrain")]
    assert len(rows) > 10
    for (now,) in rows:
        package = ""
        for name in re.findall(r"`([\w.]+)`", now):
            package = package if name.startswith(".") else name.rpartition(".")[0]
            assert attribute(package + name if name.startswith(".") else name) is not None


def test_what_was_moved_is_found_missing() -> None:
    """Else the patterns might match nothing at all."""
    text = "training/gone.py beside `src/posttrain/gone/`, docs/algorithms/gone.md and {py:mod}`posttrain.gone.module`"
    assert PATH.findall(text) == ["training/gone.py", "docs/algorithms/gone.md"]
    assert FOLDER.findall(text) == ["src/posttrain/gone/"]
    assert DOTTED.findall(text) == ["posttrain.gone.module"]
    with pytest.raises((AssertionError, AttributeError)):
        attribute("posttrain.gone.module")


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/decisions/013-layout-and-contracts.md"])
def test_the_order_of_packages_is_the_one_that_imports_are_held_to(page: str) -> None:
    """`LAYERS` of test_architecture.py, but for what is not there yet; "" is `__init__`."""
    (printed,) = (text for _, _, text in blocks((ROOT / page).read_text(encoding="utf-8")) if " > errors" in text)
    rules = ast.parse((ROOT / "tests" / "test_architecture.py").read_text(encoding="utf-8"))
    (layers,) = (node.value for node in rules.body if ast.unparse(node).startswith("LAYERS = "))
    rows = [{name or "__init__" for name in names} for names in ast.literal_eval(layers)]
    there = {path.stem for path in SOURCE.iterdir()}
    assert [set(re.findall(r"\w+", row)) for row in printed.split(">")] == [row & there for row in rows]


BY_RECIPE = {"algorithm", "model", "task", "world"}
"""Sections whose options depend on the recipe, so that a list of flags cannot hold them all."""


def joined(page: Path) -> str:
    """The page, its commands without line ends."""
    return page.read_text(encoding="utf-8").replace("\\\n", "")


def test_a_command_that_a_page_has_typed_exists_with_its_flags_and_recipes() -> None:
    flags = {each.name: {*each.flags} for each in completed().commands} | {"--version": set[str]()}
    typed = [(page, line) for page in (*PROSE, *DOCS) for line in commands(joined(page))]
    ours = [(page, shlex.split(line, comments=True)[1:]) for page, line in typed if line.startswith("posttrain ")]
    assert len(ours) > 90
    for page, words in ours:
        name = next((name for name in (" ".join(words[:2]), words[0]) if name in flags), "")
        assert name, f"{page}: posttrain {words[0]}: no such command"
        given = [word.split("=")[0] for word in words if word.startswith("--") and word != name]
        unknown = [flag for flag in given if flag not in flags[name] and flag[2:].split(".")[0] not in BY_RECIPE]
        assert unknown == [], f"{page}: posttrain {' '.join(words)}"
        assert all((ROOT / word).is_file() for word in words if word.startswith("recipes/")), f"{page}: {words}"
