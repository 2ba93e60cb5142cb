"""Shapes that are not checked: half the time of a step of a tiny model is spent on its annotations."""

from collections.abc import Iterator

import pytest
from jaxtyping import config


@pytest.fixture(scope="module", autouse=True)
def unchecked_shapes() -> Iterator[None]:
    """For a `conftest.py`: the tests of its folder run as a user's program does; laws and engine check every shape."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
