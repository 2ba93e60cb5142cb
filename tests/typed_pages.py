"""Static types of what the pages show: each block of Python goes through mypy as a file of a user's would.

    python -m tests.typed_pages

`make types` runs it; in the suite it would take longer than all other tests of the pages together.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.pages import blocks

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "README.md"


def main() -> int:
    """Write the blocks as modules `page_1`, `page_2` ..., of which pyproject.toml demands no annotations, and check."""
    with tempfile.TemporaryDirectory() as folder:
        found = [text for language, _, text in blocks(PAGE.read_text(encoding="utf-8")) if language == "python"]
        files = [Path(folder, f"page_{number}.py") for number in range(1, len(found) + 1)]
        for file, text in zip(files, found, strict=True):
            file.write_text(text, encoding="utf-8")
        ours = {**os.environ, "MYPYPATH": str(ROOT / "src")}
        return subprocess.run([sys.executable, "-m", "mypy", *files], cwd=ROOT, env=ours, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
