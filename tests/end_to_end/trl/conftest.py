"""The tiny model by its name, as scripts for TRL give one."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model(model: Path) -> str:
    return str(model)
