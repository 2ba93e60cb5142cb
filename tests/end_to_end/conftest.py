"""What tests of whole runs share: a tiny model, a place, and pictures left blank where no file says `DRAWS = True`."""

from pathlib import Path

import pytest

from tests.support.fit_places import finished
from tests.support.pictures import blank_pictures, unchecked_shapes
from tests.support.runs import save_tiny_model

__all__ = ["blank_pictures", "finished", "unchecked_shapes"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that no test changes."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of a file go, beside a model."""
    made = tmp_path_factory.mktemp("runs")
    save_tiny_model(made / "model")
    return made


@pytest.fixture
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
