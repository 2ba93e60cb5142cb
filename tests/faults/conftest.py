"""Runs in the test's process check no shapes and draw no pictures."""

from pathlib import Path

import pytest

from tests.faults.phases import phase_recipe
from tests.support.pictures import blank_pictures, unchecked_shapes
from tests.support.runs import command, save_tiny_model

__all__ = ["blank_pictures", "unchecked_shapes"]


@pytest.fixture(scope="session")
def one_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and in `whole/run` a run of one driver that nothing disturbed."""
    folder = tmp_path_factory.mktemp("one-driver")
    save_tiny_model(folder / "model")
    ended = command("rl", phase_recipe(folder / "whole"), folder=folder / "whole")
    assert ended.code == 0, ended.err
    return folder
