"""The processes in which tests run commands."""

from pathlib import Path

import pytest

from tests.support.runs import start_program


def test_forks_begin_with_the_library_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each of them takes five seconds to start, and nothing says so."""
    monkeypatch.chdir(tmp_path)
    program = "import sys; print('tests.support.preloaded' in sys.modules)"
    assert start_program(program, folder=tmp_path, logs=tmp_path).ended().out == "True\n"
