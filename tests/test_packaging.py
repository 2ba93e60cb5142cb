"""What `pip install .` brings along."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_no_release_of_transformers_is_allowed_that_is_older_than_the_one_that_is_tested() -> None:
    """5.5 to 5.22 lack `transformers.cache_utils.DummyLayer`: there every command that loads a model ended in an
    ImportError."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (bound,) = (each for each in dependencies if each.startswith("transformers"))
    (tested,) = re.findall(r"^transformers==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert bound == f"transformers>={tested},<6"
    assert f"transformers {tested} or newer" in (ROOT / "README.md").read_text()


def test_the_wheel_holds_the_code_the_bundled_model_the_recipes_and_no_more(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}

    source, learn = ROOT / "src", ROOT / "docs" / "learn"
    files = (path for path in (source / "posttrain").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    expected = {path.relative_to(source).as_posix() for path in files}
    expected |= {f"posttrain/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "recipes").rglob("*.yaml")}
    expected |= {f"posttrain/learn/{path.relative_to(learn).as_posix()}" for path in learn.rglob("*") if path.is_file()}
    assert packed == expected

    assets = {Path(name).name for name in packed if name.startswith("posttrain/assets/")}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= assets
    assert {"posttrain/py.typed", "posttrain/recipes/countdown-tiny.yaml"} <= packed
    assert wheel.stat().st_size < 15e6  # the model is at most 12 MB
