"""TRL's own tests of its GRPO trainer through posttrain.trl, as a table: passed, refused, failed.

python benchmarks/trl/trl_tests.py                          # the tests of TRL 0.23.1, which its archive on PyPI has
python benchmarks/trl/trl_tests.py --trl ~/src/trl          # those of a checkout
python benchmarks/trl/trl_tests.py --write                  # and the table into docs/guides/trl_tests.md
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest
from _trl_tests_stand_in import install, make_hub
from _trl_tests_table import Outcomes, page, summary

LAST_WITH_TESTS = "0.23.1"
"""The last release of TRL whose source archive was found to have its tests; 0.24.0 and 1.16.0 have none."""
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "trl_tests.md"


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        suite, version = (
            (options.trl, options.trl.name.removeprefix("trl-"))
            if options.trl
            else (downloaded(folder), LAST_WITH_TESTS)
        )
        shutil.copytree(suite / "tests", folder / "work" / "tests")
        (folder / "work" / "tests" / "__init__.py").touch()
        os.chdir(folder / "work")
        make_hub(Path())
        install()
        outcomes = Outcomes()
        chosen = ["-k", options.only] if options.only else []
        quiet = ["-q", "-p", "no:cacheprovider", "--no-header", "--tb=short", f"--rootdir={folder / 'work'}"]
        pytest.main(["tests/test_grpo_trainer.py", *quiet, *chosen], plugins=[outcomes])
        os.chdir(PAGE.parent)
    if options.write:
        PAGE.write_text(page(outcomes, version), encoding="utf-8")
    print(summary(outcomes))
    sys.exit(bool(outcomes.unexplained))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--trl", type=lambda text: Path(text).resolve(), help="a checkout of TRL, or its unpacked archive"
    )
    parser.add_argument("--only", help="tests whose names have this, as pytest -k")
    parser.add_argument("--write", action="store_true", help="write the page")
    return parser.parse_args()


def downloaded(folder: Path) -> Path:
    """TRL's source archive, unpacked."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "trl", "-d", str(folder)]
    subprocess.run([*pip, f"trl=={LAST_WITH_TESTS}"], check=True)
    with tarfile.open(folder / f"trl-{LAST_WITH_TESTS}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / f"trl-{LAST_WITH_TESTS}"


if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    main()
