"""A page that names a file or a module names one that is there; CHANGELOG.md alone may name what was."""

import re
from pathlib import Path

import pytest

from tests.support.pages import attribute, blocks

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "posttrain"
PROSE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("benchmarks/*.md"), *ROOT.glob("tests/**/*.md")]
DOCS = [path for path in (*ROOT.glob("docs/*.md"), *ROOT.glob("docs/*/*.md")) if path.name != "changelog.md"]
PAGES = sorted([*PROSE, *DOCS, ROOT / "docs" / "api.rst", *ROOT.glob("recipes/*.yaml"), *SOURCE.rglob("*.py")])

PATH = re.compile(r"(?<![\w./*{-])((?:[\w.-]+/)*[\w-]+\.(?:py|md|yaml|png|safetensors))(?![\w*])")
FOLDER = re.compile(r"(?<![\w./])((?:src|tests|docs|recipes|benchmarks)/(?:[\w.-]+/)*)(?![\w*])")
DOTTED = re.compile(r"\bposttrain(?:\.[A-Za-z_]\w*)+")
OF_A_RUN = {"config.yaml", "model.safetensors", "policy.safetensors", "curves.png", "README.md", "SKILL.md"}
"""Files of a run folder or of a model."""
EXAMPLE = re.compile(r"(?:^|/)(?:FILE|mine|my_\w+|recipe|a|b|x)\.(?:py|yaml)$")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
NAMES = {path.name for folder in ("src", "tests", "docs", "recipes", "benchmarks") for path in (ROOT / folder).rglob("*")}


def said(page: Path) -> str:
    """The page's text; of a program its comments and docstrings are enough, and code does no harm."""
    return page.read_text(encoding="utf-8")


@each_page
def test_a_file_that_is_named_is_there(page: Path) -> None:
    text = said(page)
    given = {name for _, name, _ in blocks(text)} if page.suffix == ".md" else set()
    for path in PATH.findall(text):
        if path in given or path in OF_A_RUN or EXAMPLE.search(path):
            continue
        bases = (ROOT, ROOT / "docs", ROOT / "src", SOURCE, page.parent)
        there = any((base / path).exists() for base in bases) if "/" in path else path in NAMES
        assert there, path


@each_page
def test_a_folder_that_is_named_is_there(page: Path) -> None:
    for path in FOLDER.findall(said(page)):
        assert (ROOT / path).is_dir(), path


@each_page
def test_a_module_that_is_named_is_there(page: Path) -> None:
    for name in DOTTED.findall(said(page)):
        assert attribute(name) is not None
