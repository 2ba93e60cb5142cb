"""What `pip install .` brings along, and what is released."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from venv import EnvBuilder

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, WHEEL = SETTINGS["project"], SETTINGS["tool"]["hatch"]["build"]["targets"]["wheel"]


@dataclass(frozen=True)
class Built:
    """What a release holds."""

    wheel: Path
    source: Path


def build(where: Path, into: Path) -> Built:
    done = run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d", str(into)], where)
    assert done.returncode == 0, done.stderr
    (wheel,), (source,) = into.glob("*.whl"), into.glob("*.tar.gz")
    return Built(wheel, source)


def run(command: Sequence[str], where: Path) -> subprocess.CompletedProcess[str]:
    """A command that sees nothing of the checkout but the folder that it is run in."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(command, cwd=where, env=clean, capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(ROOT, tmp_path_factory.mktemp("built"))


def packed(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as content:
        return {name: content.read(name) for name in content.namelist() if ".dist-info/" not in name}


def test_no_release_of_transformers_is_allowed_that_is_older_than_the_one_that_is_tested() -> None:
    """5.5 to 5.22 lack `transformers.cache_utils.DummyLayer`: there every command that loads a model ended in an
    ImportError."""
    (bound,) = (each for each in PROJECT["dependencies"] if each.startswith("transformers"))
    (tested,) = re.findall(r"^transformers==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert bound == f"transformers>={tested},<6"
    assert f"transformers {tested} or newer" in (ROOT / "README.md").read_text()


def test_the_wheel_holds_the_code_the_bundled_model_the_recipes_and_no_more(built: Built) -> None:
    folders = {"src/posttrain": "posttrain"} | WHEEL["force-include"]
    expected = {
        f"{place}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, place in folders.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = packed(built.wheel).keys()
    assert names == expected

    assets = {Path(name).name for name in names if name.startswith("posttrain/assets/")}
    assert {"config.json", "model.safetensors", "tokenizer.json", "reward.py.template"} <= assets
    assert {"posttrain/py.typed", "posttrain/recipes/countdown-tiny.yaml"} <= names
    assert built.wheel.stat().st_size < 15e6  # the model is at most 12 MB


def test_the_source_distribution_makes_the_same_wheel(built: Built, tmp_path: Path) -> None:
    with tarfile.open(built.source) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    for needed in ("LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "pyproject.toml", "tests/test_packaging.py"):
        assert (folder / needed).is_file(), needed
    assert not [path for path in folder.iterdir() if path.name in (".venv", ".git", "runs", "dist", ".mypy_cache")]
    assert packed(build(folder, tmp_path / "again").wheel) == packed(built.wheel)


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs `posttrain` of the wheel, in an environment that has only its dependencies, and returns what it prints.

    They are those of the tests' environment, by a path: none of its .pth files is read there, so an editable install
    of this checkout is not seen.
    """
    place = tmp_path_factory.mktemp("installed")
    EnvBuilder(with_pip=False, symlinks=True).create(place / "env")
    python = str(place / "env" / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "-q"]
    done = run([*pip, "--no-deps", "--no-index", str(built.wheel)], place)
    assert done.returncode == 0, done.stderr
    (libraries,) = (place / "env").glob("lib/python*/site-packages")
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    (libraries / "dependencies.pth").write_text("\n".join(dependencies))

    def posttrain(*arguments: str) -> str:
        done = run([str(place / "env" / "bin" / "posttrain"), *arguments], place)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return posttrain


def test_an_installed_wheel_has_its_commands_recipes_and_templates(installed: Callable[..., str]) -> None:
    assert installed("--version") == f"posttrain {PROJECT['version']}\n"
    assert "recipe.yaml, reward.py, rows.jsonl" in installed("new", "problem")
    recipe = yaml.safe_load(installed("config", "problem/recipe.yaml"))
    assert recipe["rewards"][0]["path"] == "reward.py:right"
    assert yaml.safe_load(installed("config", "countdown-tiny"))["task"]["name"] == "countdown"
    assert "usage: posttrain view" in installed("view", "--help")
    assert "every answer got what it deserves" in installed("check-task", "countdown")


def test_a_release_has_one_version_and_the_changelog_has_a_place_for_it() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert citation["title"] == PROJECT["name"]
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()
